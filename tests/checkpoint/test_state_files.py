import collections
import enum
import functools
import json
import math
import random
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch

from tests.checkpoint.conftest import through_files
from trainwright.checkpoint import CheckpointError, CheckpointTypeError
from trainwright.checkpoint.state_files import decode_state, encode_state

PLAIN = [
    None,
    True,
    False,
    0,
    -1,
    2**200,
    0.0,
    1e-320,
    0.1,
    "",
    "ü\n\udc80",
    b"",
    b"\x00\xff",
    [],
    [[]],
    (),
    ((1,), [2]),
    {},
    {"a": {"b": [1, 2.5, None]}},
    {1: "a", "1": "b"},
    {None: 1, 2.5: 2, b"x": 3, (1, ("y",)): 4},
    {"$tuple": [1]},
    {"$x": 1, "y": 2},
    OrderedDict([("b", 1), ("a", 2)]),
    OrderedDict(),
    Counter({3: 2}),
    random.getstate(),
]


@pytest.mark.parametrize("state", PLAIN, ids=lambda state: type(state).__name__)  # a repr may differ from run to run
def test_plain_values_come_back_equal_and_of_their_type(state, tmp_path):
    back = through_files(state, tmp_path)
    assert back == state
    assert type(back) is type(state)
    assert repr(back) == repr(state)  # also the types and the order inside


def test_floats_that_json_lacks_come_back(tmp_path):
    back = through_files({"a": [math.inf, -math.inf, math.nan, -0.0]}, tmp_path)["a"]
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert math.copysign(1, back[3]) == -1


def test_the_text_is_strict_json():
    text, _ = encode_state({"a": math.nan, "b": np.float32("inf"), 3: b"x"}, "state")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"bare {name}"))


def test_keys_that_look_alike_in_a_path_stay_apart(tmp_path):
    state = {1: torch.ones(1), "1": torch.zeros(1), "a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}
    state |= {"__metadata__": torch.full((1,), 5.0), "\ud800": torch.full((1,), 7.0), "\\ud800": torch.ones(3)}
    back = through_files(state, tmp_path)
    assert list(back) == list(state)
    for key in (1, "1", "a.b", "__metadata__", "\ud800", "\\ud800"):
        assert torch.equal(back[key], state[key])
    assert torch.equal(back["a"]["b"], state["a"]["b"])


def test_torch_schedulers_have_a_state_that_can_be_saved(tmp_path):
    schedules = torch.optim.lr_scheduler
    for make in (
        lambda o: schedules.MultiStepLR(o, [2, 4]),
        lambda o: schedules.LambdaLR(o, lambda step: 1.0),
        lambda o: schedules.OneCycleLR(o, 0.1, 10),
        lambda o: schedules.ReduceLROnPlateau(o),
        lambda o: schedules.CosineAnnealingLR(o, 10),
    ):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1, momentum=0.9)
        state = make(optimizer).state_dict()
        assert through_files(state, tmp_path) == state


class Foreign:
    pass


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Foreign(), "Foreign"),
        ({1, 2}, "set"),
        (deque([1]), "deque"),
        (len, "builtin_function"),
        (1j, "complex"),
        (torch.float32, "torch.dtype"),
        (np.array([object()]), "dtype object"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        ({(1, Foreign()): 2}, "key of"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,  # a repr may hold an address
)
def test_other_types_are_refused_with_their_place(value, says):
    with pytest.raises(CheckpointTypeError, match=says) as raised:
        encode_state({"state": {0: {"foo": value}}}, "optimizer")
    assert str(raised.value).startswith("optimizer.state.0.foo: got ")
    assert isinstance(raised.value, TypeError)


def test_a_list_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(CheckpointTypeError, match=r"state\.0: got a list that contains itself"):
        encode_state(loop, "state")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"$pickle": "gASV"}',
        b'{"$tensor": "absent"}',
        b'{"$tuple": [], "x": 1}',
        b'{"$float": "__import__"}',
        b'{"$bytes": "%"}',
        b'{"$dict": [[[], 1]]}',
        b'{"$array": {"dtype": "|O8", "data": "a", "shape": [], "scalar": 1}}',
        b'{"$array": {"dtype": "(2,)f4", "data": "a", "shape": [], "scalar": 1}}',
        b'{"$dict": 3}',
        b'{"$tensor": ["a", [0, 1]]}',
        b'{"$tensor": ["a", "0"]}',
        b"[" * 100_000,
    ],
    ids=lambda text: text[:20].decode(),
)
def test_text_that_is_no_state_is_an_error_that_names_the_file(text):
    with pytest.raises(CheckpointError, match=r"run/optimizer\.json: not a state"):
        decode_state(text, {"a": torch.zeros(8, dtype=torch.uint8)}, "run/optimizer.json")


class Masked(str):
    """A kind of text."""


class Kinds(enum.IntEnum):
    ONE = 1


Pair = collections.namedtuple("Pair", "one other")


@pytest.mark.parametrize(
    "value",
    [
        np.bytes_(b"abc"), np.bytes_(b"a\0"), np.bytes_(b""), np.str_("x"), np.str_("a\0"), np.str_(""),
        np.datetime64("2020-01-01"), np.timedelta64(5, "s"), np.bool_(True), np.longdouble(1) / 3,
        np.array(["a", "bc"]), np.array([b"a\0b"]), np.array("x"), np.array(["2020"], dtype="M8[D]"), "\ud800", b"\xff",
        np.float32(0.1), np.int64(-3), np.array(3), np.arange(6.0).reshape(2, 3).T, np.zeros((0, 2)),
        np.array([1 + 2j]), np.array([True, False]), np.array([1, 2], dtype=">i4"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_saved_comes_back_as_the_same_type(value, tmp_path):
    back = through_files(value, tmp_path)
    assert type(back) is type(value)
    assert repr(back) == repr(value)
    if isinstance(value, np.generic | np.ndarray):
        assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
        assert back.strides == value.strides


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(120).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(6).reshape(2, 1, 3).permute(2, 1, 0),
    ],
    ids=lambda tensor: str(tensor.stride()),
)
def test_a_tensor_comes_back_with_its_layout_in_memory(tensor, tmp_path):
    back = through_files({"a": tensor}, tmp_path)["a"]
    assert torch.equal(back, tensor)
    sizes = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    assert [back.stride(dim) for dim in sizes] == [tensor.stride(dim) for dim in sizes]


@pytest.mark.parametrize(
    "value",
    [
        np.ma.masked_array([1, 2], [0, 1]), np.ma.masked, np.zeros((1, 1)).view(np.matrix), np.rec.array([(1, 2)]),
        Masked("x"),
        Kinds.ONE, Pair(1, 2), torch.Size([1]), type("Own", (np.bytes_,), {})(b"x"), np.void(b"ab"),
        torch.ones(1).as_subclass(type("Own", (torch.Tensor,), {})),
        functools.reduce(lambda a, _: [a], range(5000), []),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_come_back_as_another_type_is_refused_with_its_place(value):
    with pytest.raises(CheckpointTypeError, match=r"^memory"):
        encode_state({"a": [value]}, "memory")

from collections import UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from trainwright.base.batch import num_rows
from trainwright.data import DataError, DistTensorData, Instance, collate, to_batch
from trainwright.data.collate import mixed
from trainwright.data.errors import add_batch_note


class Point(NamedTuple):
    x: torch.Tensor
    name: str


class Named(dict):
    pass


def _equal(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other


KINDS = {
    "tensors": lambda i: torch.full((2, 3), i).T,
    "pairs": lambda i: (torch.full((2,), float(i)), i),
    "lists": lambda i: [torch.tensor(i), float(i), str(i)],
    "dictionary": lambda i: {"x": torch.full((2,), i, dtype=torch.uint8), "more": {"y": i, "z": (float(i), b"b")}},
    "dictionary of its own kind": lambda i: Named(x=i),
    "named tuple": lambda i: Point(torch.tensor(i), str(i)),
    "arrays": lambda i: (np.full((2,), i, np.int16), np.float32(i), np.int64(i)),
    "truths": lambda i: (i > 1, np.bool_(i > 1)),
    "texts": lambda i: (str(i), {"s": str(i)}),
    "nothing in it": lambda i: ((), [], {}),
    "types that differ": lambda i: (torch.tensor(i) if i else torch.tensor(0.5), i if i else 0.5),
    "parameters": lambda i: torch.nn.Parameter(torch.full((2,), float(i))),
    "more keys in later samples": lambda i: {"a": i} | ({"b": i} if i else {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_what_torch_makes_of_it(kind):
    samples = [KINDS[kind](i) for i in range(4)]
    assert _equal(collate(samples), default_collate(samples))
    assert _equal(collate(tuple(samples)), default_collate(tuple(samples)))


def test_kinds_that_torch_was_taught_are_batched_so(monkeypatch):
    taught = lambda batch, *, collate_fn_map=None: f"{len(batch)} of them"  # noqa: E731
    monkeypatch.setitem(default_collate_fn_map, Point, taught)
    assert collate([(Point(1, "a"), 1), (Point(2, "b"), 2)])[0] == "2 of them"


def test_an_instance_becomes_the_arguments_of_forward():
    batch = Instance(
        inputs=DistTensorData(torch.rand(2, 3)), labels=DistTensorData(torch.tensor([1, 0], dtype=torch.int)), name="x"
    )
    moved = to_batch(batch, "cpu")
    assert set(moved) == {"inputs", "labels", "name"}
    assert moved["inputs"] is batch.inputs.tensor  # right already: no copy
    assert moved["labels"].dtype == torch.int64
    assert moved["name"] == "x"


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_labels_of_any_integer_type_work_with_cross_entropy(name):
    labels = torch.tensor([2, 0, 1]).to(getattr(torch, name))
    logits = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.3, 0.3, 0.4]])
    loss = F.cross_entropy(logits, to_batch({"labels": labels})["labels"])
    assert torch.equal(loss, F.cross_entropy(logits, torch.tensor([2, 0, 1])))


@pytest.mark.parametrize("batch", [{"x": torch.zeros(2)}, [torch.zeros(2)], {}, []])
def test_a_container_is_a_new_one_with_the_same_tensors(batch):
    moved = to_batch(batch)
    assert moved is not batch
    assert type(moved) is type(batch)
    assert [*map(id, moved.values() if isinstance(moved, dict) else moved)] == [
        *map(id, batch.values() if isinstance(batch, dict) else batch)
    ]


def test_tensors_are_converted_and_moved_wherever_they_are():
    right, label = torch.zeros(2), torch.tensor([1], dtype=torch.int32)
    for batch in ([right, label], (right, label), (right, [label])):
        assert to_batch(batch)[0] is right
    assert to_batch([right, label])[1].dtype == torch.int64
    assert to_batch({"x": right, "labels": label, "who": "me"})["labels"].dtype == torch.int64
    assert to_batch((right, [label]))[1][0].dtype == torch.int64

    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.int64):
        tensor = torch.ones(2).to(dtype)
        assert to_batch([tensor])[0] is tensor
    deep = {"deep": {"label": label}}
    point, texts, found, array = to_batch((Point(label, "a"), [label, "text", None], deep, np.int16([5])))
    assert (type(point), point.name, texts[1:]) == (Point, "a", ["text", None])
    assert found["deep"]["label"].dtype == texts[0].dtype == torch.int64
    assert (array.dtype, array.tolist()) == (torch.int64, [5])

    words = np.array(["a", "b"])
    assert to_batch({"words": words})["words"] is words

    moved = to_batch(Instance(a=torch.zeros(2), b={"label": torch.zeros(1, dtype=torch.int32)}), torch.device("meta"))
    assert moved["a"].device.type == "meta"
    assert (moved["b"]["label"].device.type, moved["b"]["label"].dtype) == ("meta", torch.int64)

    small = torch.ones(2, dtype=torch.int8)
    assert to_batch({"quantized": small, "y": small})["quantized"].dtype == torch.int8
    assert [part.dtype for part in to_batch((small, small))] == [torch.int8, torch.int64]
    assert to_batch(small).dtype == torch.int8


def test_lists_of_numbers_become_tensors():
    samples = [{"input_ids": [2, 5, 3], "boxes": [[0.0, 1.0], [2.0, 3.0]], "labels": i} for i in range(4)]
    batch = collate(samples)
    assert torch.equal(batch["input_ids"], torch.tensor([[2, 5, 3]] * 4))
    assert (batch["boxes"].shape, batch["boxes"].dtype) == ((4, 2, 2), torch.float32)
    assert torch.equal(collate([([1, 2], 3)] * 2)[0], torch.tensor([[1, 2], [1, 2]]))
    assert torch.equal(collate([UserDict(ids=[1, 2])] * 2)["ids"], torch.tensor([[1, 2], [1, 2]]))

    assert [part.tolist() for part in collate([[1.0, 2], [3.0, 4]])] == [[1.0, 3.0], [2, 4]]

    with pytest.raises(DataError, match=r"sample 1.*'input_ids'.*length 2; sample 0 has 3.*DataCollatorWithPadding"):
        collate([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2]}])


class Graph:
    """An object with ``to``, as those of PyTorch Geometric."""

    num_graphs = 3

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))


def test_objects_are_moved_by_their_own_method():
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    moved = to_batch({"graph": Graph(torch.ones(1)), "sequences": [packed], "text": UserDict(a=torch.ones(1))}, "meta")
    assert moved["graph"].x.device.type == moved["text"]["a"].device.type == "meta"
    assert type(moved["sequences"][0]) is PackedSequence
    assert moved["sequences"][0].data.device.type == "meta"


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((torch.zeros(3, 2), torch.zeros(3)), 3),
        ({"images": torch.zeros(3, 2), "boxes": torch.zeros(7, 4), "labels": torch.zeros(7)}, 3),
        ({"name": "text", "size": [224, 224], "images": torch.zeros(3, 2)}, 3),
        ({"scale": torch.tensor(2.0), "images": torch.zeros(3, 2)}, 3),
        ({"text": ["a", "b"], "scale": torch.tensor(2.0)}, 2),
        (
            (
                [torch.zeros(1, 4, 4), torch.zeros(1, 5, 5)],
                [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(1, 4)}],
            ),
            2,
        ),
        ([{"image": torch.zeros(1, 4, 4)}, {"image": torch.zeros(1, 5, 5)}], 2),
        (Graph(None), 3),
        ((Graph(None), torch.zeros(3)), 3),
        ({"sequences": pack_sequence([torch.ones(3), torch.ones(2)])}, 2),
        ((torch.zeros(0, 2), torch.zeros(0)), 0),
        ("text", None),
        (torch.tensor(2.0), None),
    ],
    ids=[
        "pair",
        "fields",
        "first_with_rows",
        "scalar",
        "texts",
        "detection",
        "list_of_samples",
        "graph",
        "graph_and_labels",
        "packed",
        "empty",
        "text",
        "one_number",
    ],
)
def test_the_rows_of_a_batch_are_those_of_its_first_value_that_has_some(batch, count):
    assert num_rows(batch) == count


@pytest.mark.parametrize(("images", "labels"), [("images", "labels"), ("pixel_values", "class_labels"), ("x", "y")])
def test_mixup_finds_images_and_labels(images, labels):
    batch = {"weight": torch.ones(2), images: torch.ones(2, 1, 4, 4), labels: torch.tensor([0, 1])}
    result = mixed(lambda one, other: (one * 2, other + 1), batch)
    assert list(result) == ["weight", images, labels]
    assert result[images].eq(2).all()
    assert result[labels].tolist() == [1, 2]
    assert batch[images].eq(1).all()


def test_mixup_of_fields_that_are_not_clear_is_an_error():
    with pytest.raises(DataError, match=r"mixup_func: the batch .* has 2 fields of images and 0 of labels"):
        mixed(lambda *pair: pair, {"a": torch.ones(2, 1, 4), "b": torch.ones(2, 1, 4)})


SCORES = torch.zeros(4, 3)


def on_a_gpu(message):
    raise RuntimeError(message)


KNOWN_ERRORS = {
    "a label without a score": (lambda: F.cross_entropy(SCORES, torch.full((4,), 3)), "A label is 3."),
    "a negative label": (lambda: F.cross_entropy(SCORES, torch.full((4,), -1)), "A label is -1."),
    "labels as floats": (lambda: F.cross_entropy(SCORES, torch.zeros(4)), "these are Float: convert them"),
    "labels of shape (B, 1)": (lambda: F.cross_entropy(SCORES, torch.zeros(4, 1).long()), "labels.squeeze(1)"),
    "weights of fewer classes": (
        lambda: F.cross_entropy(SCORES, torch.zeros(4).long(), weight=torch.ones(2)),
        "weights of the shape [2], and the model returns scores for 3 classes",
    ),
    "columns of classes": (lambda: F.cross_entropy(SCORES, torch.zeros(4, 3).long()), "labels.argmax(1)"),
    "an id without a row": (lambda: torch.nn.Embedding(5, 2)(torch.tensor([7])), "resize_token_embeddings"),
    "inputs as doubles": (lambda: torch.nn.Linear(3, 2)(SCORES.double()), "The inputs are Double"),
    "images as doubles": (lambda: torch.nn.Conv2d(1, 2, 1)(torch.zeros(1, 1, 3, 3).double()), "The inputs are double"),
    "weights as halves": (lambda: torch.nn.Linear(3, 2).half()(SCORES), "mixed_precision='fp16'"),
    "a convolution of bfloat16": (lambda: torch.nn.Conv2d(1, 2, 1).bfloat16()(SCORES[None]), "mixed_precision='fp16'"),
    "a score without a label": (
        lambda: F.binary_cross_entropy_with_logits(SCORES[:, :1], torch.zeros(4)),
        "shape [4, 1] and the labels [4]",
    ),
    "truth values for scores": (lambda: F.binary_cross_entropy_with_logits(SCORES, SCORES > 0), "labels.float()"),
    "truth values for probabilities": (lambda: F.kl_div(SCORES, SCORES > 0, reduction="batchmean"), "labels.float()"),
    "whole numbers for scores": (lambda: F.binary_cross_entropy_with_logits(SCORES, SCORES.long()), "labels.float()"),
    "a loss without gradient": (lambda: SCORES.sum().backward(), "Remove torch.no_grad()"),
    "labels as inputs": (lambda: torch.nn.Linear(3, 2)(SCORES.long()), "exchange inputs and labels"),
    "too few features": (lambda: torch.nn.Linear(10, 2)(SCORES), "expects 10 features and receives 3"),
    "images for a row": (lambda: torch.nn.Linear(9, 2)(torch.zeros(4, 3, 3)), "nn.Flatten()"),
    "images without channels": (lambda: torch.nn.Conv2d(1, 2, 1)(torch.zeros(4, 3, 3)), "x.unsqueeze(1)"),
    "channels at the end": (lambda: torch.nn.Conv2d(1, 2, 1)(torch.zeros(4, 3, 3, 1)), "x.movedim(-1, 1)"),
    "rows for a convolution": (lambda: torch.nn.Conv2d(1, 2, 1)(SCORES), "x.view(-1, channels, height, width)"),
    "images as bytes": (lambda: torch.nn.Conv2d(1, 2, 1)(torch.zeros(1, 1, 3, 3).byte()), "inputs.float()"),
    "images as bytes on a GPU": (
        lambda: on_a_gpu(
            "Input type (torch.cuda.ByteTensor) and weight type (torch.cuda.FloatTensor) should be the same"
        ),
        "inputs.float()",
    ),
    "labels as a list": (lambda: F.cross_entropy(SCORES, [0, 1, 2, 0]), "torch.tensor(labels)"),
    "labels as an array": (lambda: F.cross_entropy(SCORES, SCORES.numpy()), "are a numpy.ndarray"),
    "what an LSTM returns": (lambda: torch.nn.Linear(2, 2)(torch.nn.LSTM(3, 2)(SCORES)), "a tuple of its outputs"),
    "inputs as a list": (lambda: torch.nn.Linear(3, 2)([SCORES]), "torch.stack(...)"),
    "ids as floats": (lambda: torch.nn.Embedding(5, 2)(SCORES), "ids.long()"),
    "a batch of one": (lambda: torch.nn.BatchNorm1d(3)(SCORES[:1]), "dataloader_drop_last=True"),
    "mixed samples": (lambda: F.cross_entropy(SCORES, torch.zeros(2).long()), "x.flatten(1)"),
    "classes at the end": (lambda: F.cross_entropy(torch.zeros(4, 5, 3), torch.zeros(4, 5).long()), "movedim(-1, 1)"),
    "a tensor elsewhere": (
        lambda: on_a_gpu(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        ),
        "device=x.device",
    ),
    "a label on a GPU": (lambda: on_a_gpu("CUDA error: device-side assert triggered"), "device_str='cpu'"),
    "a worker that ended": (
        lambda: on_a_gpu("DataLoader worker (pid 7) exited unexpectedly with exit code 9."),
        "code 9",
    ),
    "a pair used as a dict": (lambda: [1, 2].pop("labels"), "a pair (inputs, target)"),
    "a loss per sample": (lambda: torch.zeros(3, requires_grad=True).mul(1).backward(), "such as loss.mean()"),
}


@pytest.mark.parametrize(("call", "fix"), KNOWN_ERRORS.values(), ids=KNOWN_ERRORS)
def test_errors_of_torch_about_data_get_a_fix(call, fix):
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)) as raised:
        call()
    for _ in range(2):  # noted once
        add_batch_note(raised.value, {"x": SCORES})
    batch, note = raised.value.__notes__
    assert batch == "The batch of this step: {x: float32 (4, 3) on cpu}"
    assert fix in note

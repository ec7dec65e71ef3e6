"""Files of safetensors: what is written comes back, and a malformed header is refused."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.conftest import put, through_files
from trainwright.checkpoint import Checkpointer, CheckpointError
from trainwright.cli.main import main

TENSOR_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def test_tensors_of_every_dtype_come_back_bit_for_bit(tmp_path):
    raw = torch.arange(48, dtype=torch.uint8)
    state = {str(dtype): raw.view(dtype) if dtype != torch.bool else raw > 5 for dtype in TENSOR_DTYPES}
    state |= {f"odd {dtype}": value[:3].clone() for dtype, value in list(state.items())}  # sizes that shift the next
    back = through_files(state, tmp_path)
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
    assert set(load_file(tmp_path / "state.safetensors")) == set(state)  # the reference reader agrees


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(0),
        torch.zeros(2, 0, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.arange(9)[::2],
        torch.ones(1).expand(4),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=["0-dim", "empty", "empty 3-d", "transposed", "strided", "expanded", "conj", "grad", "parameter", "neg"],
)
def test_tensors_of_every_layout_come_back(tensor, tmp_path):
    back = through_files(tensor, tmp_path)
    assert torch.equal(back, tensor.detach())
    assert back.shape == tensor.shape
    assert back.is_contiguous() or (tensor.dim() == 2 and back.stride() == tensor.stride())
    assert not back.requires_grad


def test_shared_memory_is_written_once_and_shared_again(tmp_path):
    shared = torch.arange(4.0)
    back = through_files({"a": shared, "b": [shared], "c": shared.view(4), "part": shared[:2]}, tmp_path)
    assert back["a"] is back["b"][0] is back["c"]
    assert torch.equal(back["part"], shared[:2])
    back["part"].zero_()
    assert torch.equal(back["a"], shared)
    assert len(load_file(tmp_path / "state.safetensors")) == 2


def test_what_is_read_does_not_lie_in_the_file(tmp_path):
    back = through_files(torch.ones(1000), tmp_path)
    (tmp_path / "state.safetensors").write_bytes(b"\xff" * 5000)
    assert torch.equal(back, torch.ones(1000))


def safetensors(header: object, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype: str = "F32", shape: object = (4,), offsets: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ONE = json.dumps(tensor()).encode()


HEADERS = {
    "empty": b"",
    "three bytes": b"\1\2\3",
    "a length of 2**63": safetensors({"weight": tensor()}, length=2**63),
    "a length of 2**64 - 1": safetensors({"weight": tensor()}, length=2**64 - 1),
    "a length beyond the file": safetensors({"weight": tensor()}, length=10**6),
    "a length of more than may be": safetensors({"weight": tensor()}, length=100_000_001),
    "no header": safetensors(b""),
    "not JSON": safetensors(b"hello world"),
    "a list": safetensors(b"[1, 2]"),
    "null": safetensors(b"null"),
    "not text": safetensors(b"\xff" * 16),
    "too deep": safetensors(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "a tensor that is a number": safetensors({"weight": 1}),
    "no dtype": safetensors({"weight": {"shape": [4], "data_offsets": [0, 16]}}),
    "an unknown dtype": safetensors({"weight": tensor("OBJECT")}),
    "a dtype that is never saved": safetensors({"weight": tensor("F8_E8M0", [16])}),
    "overlapping": safetensors({"weight": tensor(), "bias": tensor(shape=[2], offsets=[8, 16])}),
    "twice the same bytes": safetensors({"weight": tensor(), "bias": tensor()}),
    "a gap": safetensors({"weight": tensor(shape=[2], offsets=[8, 16])}),
    "bytes left over": safetensors({"weight": tensor()}, bytes(32)),
    "offsets beyond the file": safetensors({"weight": tensor(shape=[8], offsets=[0, 32])}),
    "negative offsets": safetensors({"weight": tensor(offsets=[-4, 12])}),
    "reversed offsets": safetensors({"weight": tensor(offsets=[16, 0])}),
    "offsets of 2**65": safetensors({"weight": tensor(offsets=[0, 2**65])}),
    "three offsets": safetensors({"weight": tensor(offsets=[0, 8, 16])}),
    "a negative shape": safetensors({"weight": tensor(shape=[-4])}),
    "a shape of another size": safetensors({"weight": tensor(shape=[3])}),
    "a shape that overflows": safetensors({"weight": tensor(shape=[2**62, 8])}),
    "a shape of fractions": safetensors({"weight": tensor(shape=[4.0])}),
    "one name twice": safetensors(b'{"weight":' + ONE + b',"weight":' + ONE + b"}"),
    "one key twice": safetensors(b'{"weight":{"dtype":"I32",' + ONE[1:] + b"}"),
    "metadata that is a list": safetensors({"__metadata__": [1], "weight": tensor()}),
    "metadata that is nested": safetensors({"__metadata__": {"a": {"b": "c"}}, "weight": tensor()}),
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_malformed_header_is_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(HEADERS[header])
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: not a safetensors file"):
        Checkpointer(model).load(path, checkpointables=[])
    assert torch.equal(model.weight, before)


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("header", HEADERS)
def test_a_malformed_header_with_a_fitting_manifest_is_refused_and_named(
    header: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = Checkpointer(nn.Linear(2, 2), tmp_path)
    checkpointer.save("model_0000001", iteration=1)
    checkpointer.wait()
    folder = tmp_path / "model_0000001"
    put(folder, "model.safetensors", HEADERS[header], signed=True)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        checkpointer.load(folder)
    assert main(["checkpoint", "show", str(folder)]) == 1
    assert main(["checkpoint", "verify", str(folder), "--deep"]) == 1
    assert "model.safetensors: not a safetensors file" in capsys.readouterr().out


def test_a_good_header_is_read(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(safetensors({"weight": tensor(shape=[2, 2])}))
    Checkpointer(nn.Linear(2, 2, bias=False)).load(tmp_path / "w.safetensors", checkpointables=[], strict=True)


@pytest.mark.parametrize(
    "tied", ["[1]", "{", "5", '{"a": 1}', '{"a": ["weight"]}', '{"weight": "nothing"}', "[" * 50_000]
)
def test_malformed_metadata_of_ours_is_no_crash(tied: str, tmp_path: Path) -> None:
    header = {"__metadata__": {"tied": tied}, "weight": tensor(shape=[2, 2])}
    (tmp_path / "w.safetensors").write_bytes(safetensors(header))
    Checkpointer(nn.Linear(2, 2, bias=False)).load(tmp_path / "w.safetensors", checkpointables=[], strict=True)

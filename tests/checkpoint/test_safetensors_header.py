"""The header of a safetensors file is checked before anything is read from it."""

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import put
from trainwright.checkpoint import Checkpointer, CheckpointError
from trainwright.cli.main import main


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
    assert main(["checkpoint", "show", str(folder)]) == 1 or header == "an unknown dtype"
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

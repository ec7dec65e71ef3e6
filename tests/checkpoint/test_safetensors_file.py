"""Tensors of every dtype and layout come back from a safetensors file."""

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.conftest import through_files

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
    assert back.is_contiguous()
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

"""Tensors are copied to separate memory before a save returns; the memory is used again by the next."""

import threading

import torch
from torch import nn

from tests.checkpoint.conftest import Training
from trainwright.checkpoint import Checkpointer


def test_memory_is_taken_once(tmp_path):
    training = Training()
    training.step()
    checkpointer = training.checkpointer(tmp_path)
    before = set(threading.enumerate())
    for iteration in range(20):
        checkpointer.prepare()
        training.step()
        checkpointer.save("model_0000009", iteration=iteration)
    checkpointer.wait()
    assert len(set(threading.enumerate()) - before) == 1


def test_shapes_types_and_strides_of_all_kinds_are_staged_as_they_are(tmp_path):
    class Odd(nn.Module):
        def __init__(self, seed):
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            random = torch.randn(4, 6, 8, 8, generator=generator)
            self.register_buffer("channels_last", random.to(memory_format=torch.channels_last))
            self.register_buffer("transposed", random[0, 0].t())
            self.register_buffer("scalar", random[0, 0, 0, 0].clone())
            self.register_buffer("empty", torch.empty(0, 3))
            self.register_buffer("flags", random[0, 0] > 0)
            self.register_buffer("brain", random[1].to(torch.bfloat16))
            self.register_buffer("two_parts", torch.view_as_complex(random[..., :2].contiguous()).conj())
            self.register_buffer("wide", random[2].double())
            self.register_buffer("small", random[3].to(torch.float8_e4m3fn))

    saved, other = Odd(0), Odd(1)
    checkpointer = Checkpointer(saved, tmp_path)
    checkpointer.save("one", iteration=1)
    Checkpointer(other, tmp_path).load(tmp_path / "one")
    for name, value in saved.state_dict().items():
        assert torch.equal(other.state_dict()[name].to(torch.complex128), value.to(torch.complex128)), name

"""One simulated process: the private parts of torch that it needs are there, and afterwards all is as before."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainwright._torch_compat.probing import real_tensors
from trainwright.config.errors import ConfigError
from trainwright.inspect.simulation import process as simulation
from trainwright.inspect.simulation.process import simulated_process


def test_a_model_of_any_size_trains() -> None:
    with simulated_process(0, 1):
        model = nn.Linear(10**6, 10**6)
        model(torch.zeros(2, 10**6)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.shape == (10**6, 10**6)


def test_conversions_keep_shared_parameters_shared() -> None:
    with simulated_process(0, 1):
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        model[1].weight = model[0].weight
        model.to(torch.bfloat16)
        assert model[0].weight is model[1].weight
        assert model[0].weight.dtype is torch.bfloat16
        assert isinstance(model[0].weight, nn.Parameter)


def test_processes_exchange_objects_without_the_others() -> None:
    with simulated_process(3, 1000):
        found = [None] * 1000
        dist.all_gather_object(found, "here")
        assert found == ["here"] * 1000
        dist.barrier()


def test_real_tensors_within() -> None:
    with simulated_process(0, 1), real_tensors():
        assert torch.ones(3).sum().item() == 3


def test_everything_is_as_before_afterwards() -> None:
    before = nn.Module._apply
    with pytest.raises(ZeroDivisionError), simulated_process(0, 2):
        raise ZeroDivisionError
    assert nn.Module._apply is before
    assert not dist.is_initialized()
    assert torch.ones(3).sum().item() == 3


def test_a_torch_that_cannot_do_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("no fake tensors here")

    monkeypatch.setattr(simulation, "_probe", broken)
    match = rf"torch {torch.__version__.split('+')[0]}.*cannot simulate a process .*no fake tensors here"
    with pytest.raises(ConfigError, match=match), simulated_process(0, 1):
        pass


def test_a_launched_process_is_refused() -> None:
    launched = simulated_process(0, 2)
    with launched, pytest.raises(ConfigError, match="without a launcher"), simulated_process(0, 2):
        pass

"""One simulated process: where it cannot be, it is refused."""

import pytest
import torch

from trainwright._torch_compat.probing import real_tensors
from trainwright.base.errors import ConfigError
from trainwright.inspect.simulation import process as simulation
from trainwright.inspect.simulation.process import simulated_process


def test_real_tensors_within() -> None:
    with simulated_process(0, 1), real_tensors():
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

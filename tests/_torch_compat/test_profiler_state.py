"""Whether a profiler records."""

import pytest
import torch

from trainwright._torch_compat import profiler_state
from trainwright._torch_compat.probing import fault_of


def test_todays_torch_is_as_expected() -> None:
    assert fault_of(profiler_state.probe) is None


def test_a_profiler_is_found_while_it_records() -> None:
    assert not profiler_state.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert profiler_state.is_profiling()
    assert not profiler_state.is_profiling()


def test_without_that_part_of_torch_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler_state._is_usable.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(torch.autograd, "_profiler_enabled")
        assert not profiler_state.is_profiling()
    profiler_state._is_usable.cache_clear()

"""If a private part of torch changes, the training completes with the public API and the same weights."""

import pytest
import torch
from torch import nn

from tests._torch_compat.conftest import Trained
from trainwright._torch_compat import norm_layers, profiler_state
from trainwright._torch_compat.norm_layers import BATCH_NORMS, RUNNING_NORMS
from trainwright._torch_compat.pipeline_stage import TimedStage
from trainwright._torch_compat.probing import check_close, is_usable
from trainwright.inspect.simulation.process import simulated_process


def test_a_training_on_todays_torch_takes_no_public_way(lines_of_training: Trained) -> None:
    assert lines_of_training() == []
    assert lines_of_training(optimizer="rmsprop") == []


def test_a_probe_that_fails_is_one_line_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    def probe() -> None:
        raise ValueError("first line\nsecond line")

    caplog.set_level("INFO", logger="trainwright")
    assert not is_usable("something", probe)
    assert [record.getMessage() for record in caplog.records] == [
        f"torch {torch.__version__}: using the public API for something (ValueError: first line)."
    ]


def test_numbers_are_close_up_to_rounding() -> None:
    check_close("it", [1.0, 2.0], [1.000001, 2.0])
    for found in ([1.0, 2.1], [1.0], [1.0, float("nan")]):
        with pytest.raises((ArithmeticError, ValueError)):
            check_close("it", found, [1.0, 2.0])


def test_all_of_torchs_are_found() -> None:
    for name in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LazyBatchNorm1d"):
        assert issubclass(getattr(nn, name), BATCH_NORMS)
        assert issubclass(getattr(nn, name), RUNNING_NORMS)
    assert issubclass(nn.InstanceNorm1d, RUNNING_NORMS)
    for other in (nn.InstanceNorm1d, nn.LayerNorm, nn.Module):
        assert not issubclass(other, BATCH_NORMS)


def test_where_torch_has_no_such_class_the_layers_themselves_count() -> None:
    assert norm_layers._base("_Another", (nn.BatchNorm1d, nn.BatchNorm2d)) == (nn.BatchNorm1d, nn.BatchNorm2d)
    assert norm_layers._base("Module", (nn.BatchNorm1d,)) == (nn.Module,)


def test_the_loss_of_the_last_stage_may_be_of_any_type() -> None:
    """Torch 2.11 compares it with the type of the example; newer ones do not ask."""
    with simulated_process(1, 2):
        shapes = torch.empty(2, device="meta"), torch.empty((), device="meta")
        stage = TimedStage(nn.Linear(2, 2), 1, 2, torch.device("cpu"), *shapes)
        stage._validate_fwd_outputs((torch.zeros((), dtype=torch.float64),))


def test_a_stage_exchanges_nothing_with_its_own_process_at_first() -> None:
    with simulated_process(1, 2):
        shape = torch.empty(2, device="meta")
        stage = TimedStage(nn.Linear(2, 2), 1, 4, torch.device("cpu"), shape, shape)
        stage.stage_index_to_group_rank = {0: 0, 1: 1, 2: 1, 3: 0}  # of ZBVZeroBubble
        assert [operation.peer for operation in stage._get_init_p2p_neighbors_ops()] == [0, 0]


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

"""TensorBoard events of each step."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.hooks.callbacks.conftest import SmallTrainer
from trainwright.hooks import (
    TensorBoardCallback,
)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_has_every_step_also_over_a_resume(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []

    def writer(**how: Any) -> SummaryWriter:
        given.append(how)
        # A folder each: files of one second and one process are not read in the order of their writing.
        return SummaryWriter(**{**how, "log_dir": str(tmp_path / f"logs{len(given)}")})

    first = SmallTrainer([TensorBoardCallback(writer)], tmp_path, saves=True, fails_at=4)
    with pytest.raises(ZeroDivisionError):
        first.train(0, 6)
    second = SmallTrainer([TensorBoardCallback(writer)], tmp_path, saves=True)
    second.checkpointer.load(tmp_path / "model_0000003")
    second.train(second.start_iter, 6)
    # What a killed run has written beyond the checkpoint is hidden.
    assert given == [{"log_dir": None, "comment": ""}, {"log_dir": None, "comment": "", "purge_step": 5}]
    before, after = events(tmp_path / "logs1"), events(tmp_path / "logs2")
    found = {tag: before[tag] + after[tag] for tag in before}
    assert found["step_loss"] == [(n, float(n)) for n in range(1, 7)]
    assert found["epoch_loss"] == [(1, 1.0), (2, 1.5), (3, 2.0), (4, 4.0), (5, 4.5), (6, 5.0)]
    assert found["lr"] == [(n, 0.25) for n in range(1, 7)]
    assert found["eval_step_loss"] == [(n, 0.5) for n in range(2)]
    assert found["eval_epoch_metric"] == [(0, pytest.approx(0.1)), (1, pytest.approx(0.2))]
    assert found["eval_epoch_loss"] == [(0, 1.0), (1, 0.5)]


def test_plain_logs_are_written_too(tmp_path: Path) -> None:
    callback = TensorBoardCallback(SummaryWriter, log_dir=str(tmp_path))
    callback.on_train_batch_end((1,), {"global_step": 3, "step_loss": 0.5, "lr": 0.25})  # type: ignore[arg-type]
    callback.on_train_end({})  # type: ignore[arg-type]
    assert events(tmp_path) == {"step_loss": [(3, 0.5)], "lr": [(3, 0.25)]}

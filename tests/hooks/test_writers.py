"""The hook that writes: slow writers, slow disks and failing ones around a training."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from trainwright.checkpoint import Checkpointer
from trainwright.engine.loop import TrainerBase
from trainwright.events import EventStorage, EventWriter, JSONWriter, get_event_storage
from trainwright.events.writers import default_writers
from trainwright.hooks import CallbackHook, EvalHook, PeriodicCheckpointer, PeriodicWriter


class Trainer(TrainerBase):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 1)

    def run_step(self) -> None:
        pass


class Memory(EventWriter):
    """With the iteration of each write, and the names of the values that are stored then."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.names: list[list[str]] = []
        self.closed = False

    def write(self, storage: EventStorage | None = None) -> None:
        storage = storage or get_event_storage()
        self.rows.append(storage.iter)
        self.names.append(sorted(storage.latest()))

    def close(self) -> None:
        self.closed = True


def test_no_step_waits_until_rows_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, in_steps = os.fsync, list[int]()

    def noting(descriptor: int) -> None:
        in_steps.append(trainer.iter)
        fsync(descriptor)

    trainer = Trainer()
    trainer.register_hooks(
        [
            CallbackHook(after_step=lambda t: t.storage.put_scalar("loss", 1.0)),
            PeriodicWriter(default_writers(tmp_path, 20, batch_size=1, tensorboard=None), period=1),
            CallbackHook(before_step=lambda t: monkeypatch.setattr(os, "fsync", noting)),
        ]
    )
    trainer.train(0, 20)
    monkeypatch.undo()
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(20))
    assert set(in_steps) <= {0, 20}  # when a file is made, and when it is closed


def test_a_checkpoint_is_not_there_before_the_rows_that_it_tells_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens to the process at any moment, a resume finds the rows that its checkpoint counts on."""
    path = tmp_path / "metrics.json"
    committed: list[tuple[int, int]] = []
    write, rename = os.write, os.rename

    def slow(descriptor: int, block: bytes) -> int:
        if b'"iteration"' in block:
            time.sleep(0.1)
        return write(descriptor, block)

    def noting(source: Any, target: Any, **kwargs: Any) -> None:
        if re.fullmatch(r"model_\d+", Path(target).name):
            rows = path.read_text().splitlines() if path.exists() else []
            committed.append((int(Path(target).name.removeprefix("model_")), len(rows)))
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "write", slow)
    monkeypatch.setattr(os, "rename", noting)
    trainer = Trainer()
    trainer.register_hooks(
        [
            CallbackHook(after_step=lambda t: t.storage.put_scalar("loss", 1.0)),
            PeriodicCheckpointer(Checkpointer(trainer.model, tmp_path / "checkpoints"), 1, file_prefix="model"),
            PeriodicWriter([JSONWriter(path)], period=1),
        ]
    )
    trainer.train(0, 4)
    assert [step for step, _ in committed] == [0, 1, 2, 3]
    assert all(rows > step for step, rows in committed)


@pytest.mark.parametrize("writer", [object(), Memory, None])
def test_what_is_no_writer_is_refused(writer: Any) -> None:
    with pytest.raises(TypeError, match="a writer must be an EventWriter object"):
        PeriodicWriter([writer])


def test_writers_write_each_period_after_evaluations_at_the_last_iteration_and_at_the_end() -> None:
    trainer, writer = Trainer(), Memory()
    final = CallbackHook(after_train=lambda t: t.storage.put_scalar("final", 1.0))
    trainer.register_hooks([final, PeriodicWriter([writer], period=3)])
    trainer.train(0, 8)
    assert (writer.rows, writer.names) == ([2, 5, 7, 8], [[], [], [], ["final"]])
    assert writer.closed

    trainer, writer = Trainer(), Memory()
    trainer.register_hooks([EvalHook(2, lambda: {"acc": 1.0}), PeriodicWriter([writer], period=5)])
    trainer.train(0, 6)
    assert writer.rows == [1, 3, 4, 5, 6]


def test_writers_are_closed_after_a_failure() -> None:
    trainer, writer = Trainer(), Memory()
    fail = CallbackHook(before_step=lambda t: 1 / (1 - t.iter))
    trainer.register_hooks([fail, PeriodicWriter([writer], period=3)])
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 8)
    assert (writer.rows[-1], writer.closed) == (0, True)  # the last iteration done


def test_writers_that_are_built_for_each_training() -> None:
    trainer, built = Trainer(), []

    def build() -> list[EventWriter]:
        built.append(Memory())
        return [built[-1]]

    trainer.register_hooks([PeriodicWriter(build, period=2)])
    trainer.train(0, 2)
    trainer.train(2, 4)
    assert [writer.rows for writer in built] == [[1, 2], [3, 4]]
    assert all(writer.closed for writer in built)


class OfStorage(EventWriter):
    def write(self, storage: EventStorage) -> None:  # type: ignore[override]
        pass


class OfNothing(EventWriter):
    def write(self) -> None:  # type: ignore[override]
        pass


class OfAnything(EventWriter):
    def write(self, *given: Any, **named: Any) -> None:
        pass


def test_a_writer_that_cannot_be_called_is_refused_with_the_line_to_write() -> None:
    facts = r"OfStorage.write is called without arguments: it takes \(storage\)\. Write def write\(self, storage=None\)"
    with pytest.raises(TypeError, match=facts):
        PeriodicWriter([OfStorage()])
    PeriodicWriter([OfNothing(), OfAnything()])

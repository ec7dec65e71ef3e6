"""Lines of the log, and what a run prints when memory is exhausted."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inspect.check.seeded_bugs import Net, config_files, objects
from trainwright.engine.logs import LogFile, log_to_console
from trainwright.engine.out_of_memory import add_memory_note, is_out_of_memory


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[logging.Logger, LogFile, Path]]:
    """A logger, and its file in a folder of its own."""
    path = tmp_path / "run" / "log.txt"
    path.parent.mkdir()
    logger, handler = logging.Logger("alone"), LogFile(path)
    logger.addHandler(handler)
    yield logger, handler, path
    handler.close()


Log = tuple[logging.Logger, LogFile, Path]


def test_lines_are_in_order(log: Log) -> None:
    logger, handler, path = log
    for number in range(3):
        logger.info("line %d", number)
    handler.close()
    assert path.read_text() == "".join(f"line {number}\n" for number in range(3))


def test_a_line_that_cannot_be_made_or_written_stops_nothing(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    logger, handler, path = log
    logger.info("%d", "no number")
    path.parent.rename(path.parent.with_name("moved"))
    path.parent.write_text("no folder")
    logger.info("fine")
    handler.close()
    said = capsys.readouterr().err
    assert "Logging error" in said
    assert "log.txt cannot be written: [Errno" in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_disk_ends_no_run(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    logger, handler, path = log
    path.unlink()
    path.symlink_to("/dev/full")
    logger.info("line")
    handler.close()
    assert "log.txt cannot be written: [Errno 28]" in capsys.readouterr().err


def test_a_file_that_was_moved_is_made_again(log: Log) -> None:
    logger, handler, path = log
    path.rename(path.with_name("moved.txt"))
    logger.info("later")
    handler.close()
    assert path.read_text() == "later\n"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.txt")
    with pytest.raises(OSError, match="a regular file is needed here, and this is a pipe"):
        LogFile(tmp_path / "log.txt")


LIBRARY = logging.getLogger("trainwright")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    level, handlers = LIBRARY.level, list(LIBRARY.handlers)
    yield
    LIBRARY.setLevel(level)
    LIBRARY.handlers[:] = handlers


@pytest.mark.parametrize(
    ("level", "stays"), [(logging.NOTSET, logging.INFO), (logging.ERROR, logging.ERROR), (logging.DEBUG, logging.DEBUG)]
)
def test_a_level_that_the_user_has_set_stays(level: int, stays: int) -> None:
    LIBRARY.setLevel(level)
    log_to_console()
    assert LIBRARY.level == stays


HOST = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"


def test_other_errors_are_not_of_the_memory() -> None:
    assert is_out_of_memory(RuntimeError(HOST))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_largest_tensors_have_names(tmp_path: Path) -> None:
    trainer: Any = objects(tmp_path / "run")
    trainer.model = torch.nn.Linear(2000, 2500)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
    trainer.model(torch.ones(2, 2000)).sum().backward()
    trainer.optimizer.step()
    error = MemoryError()
    add_memory_note(error, trainer)
    lines = error.__notes__[0].splitlines()
    assert lines[0].startswith("Memory: 19.1 MiB parameters and buffers, 19.1 MiB gradients, 19.1 MiB states")
    assert {line.split("float32  ")[1] for line in lines[2:5]} == {
        *("weight", "gradient of weight", "momentum_buffer of weight")
    }


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize(
    ("error", "build", "settings"),
    [
        (
            MemoryError,
            objects,
            ["batch_size=16, gradient_accumulation_steps=2", "gradient_checkpointing=True", "'bf16'"],
        ),
        (
            torch.OutOfMemoryError,
            config_files,
            [
                "train.train_micro_batch_size=16 train.num_accumulation_steps=2 train.global_batch_size=32",
                "train.activation_checkpoint.enabled=True",
                "trainwright find batch-size",
            ],
        ),
    ],
)
def test_the_error_of_a_training(
    error: type[Exception], build: Any, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(tmp_path / "run")
    calls = []

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(self, *arguments, **named)

    plain = Net.forward
    monkeypatch.setattr(Net, "forward", forward)
    with pytest.raises(error) as raised:
        trainer.train()
    note = next(note for note in raised.value.__notes__ if note.startswith("Memory:"))
    assert "states of the optimizer" in note.splitlines()[0]
    for text in settings:
        assert text in note

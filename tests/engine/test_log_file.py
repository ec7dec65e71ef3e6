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
def logger() -> Iterator[logging.Logger]:
    logger = logging.Logger("alone")
    yield logger
    for handler in logger.handlers:
        handler.close()
        handler.close()


def test_lines_are_in_order(tmp_path: Path, logger: logging.Logger) -> None:
    handler = LogFile(tmp_path / "log.txt")
    logger.addHandler(handler)
    for number in range(3):
        logger.info("line %d", number)
    handler.close()
    assert (tmp_path / "log.txt").read_text() == "".join(f"line {number}\n" for number in range(3))


def test_a_line_that_cannot_be_made_or_written_stops_nothing(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    handler = LogFile(tmp_path / "run" / "log.txt")
    logger.addHandler(handler)
    logger.info("%d", "no number")
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").write_text("no folder")
    logger.info("fine")
    handler.close()
    said = capsys.readouterr().err
    assert "Logging error" in said
    assert "log.txt cannot be written: [Errno" in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_disk_ends_no_run(tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogFile(tmp_path / "log.txt")
    logger.addHandler(handler)
    (tmp_path / "log.txt").unlink()
    (tmp_path / "log.txt").symlink_to("/dev/full")
    logger.info("line")
    handler.close()
    assert "log.txt cannot be written: [Errno 28]" in capsys.readouterr().err


def test_a_file_that_was_moved_is_made_again(tmp_path: Path, logger: logging.Logger) -> None:
    handler = LogFile(tmp_path / "log.txt")
    logger.addHandler(handler)
    (tmp_path / "log.txt").rename(tmp_path / "moved.txt")
    logger.info("later")
    handler.close()
    assert (tmp_path / "log.txt").read_text() == "later\n"


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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_are_of_the_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


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
    ("build", "settings"),
    [
        (objects, ["batch_size=16, gradient_accumulation_steps=2", "gradient_checkpointing=True", "'bf16'"]),
        (
            config_files,
            [
                "train.train_micro_batch_size=16 train.num_accumulation_steps=2 train.global_batch_size=32",
                "train.activation_checkpoint.enabled=True",
                "trainwright find batch-size",
            ],
        ),
    ],
)
def test_the_error_of_a_training(build: Any, settings: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    trainer = build(tmp_path / "run")
    calls = []

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(self, *arguments, **named)

    plain = Net.forward
    monkeypatch.setattr(Net, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    note = next(note for note in raised.value.__notes__ if note.startswith("Memory:"))
    assert "states of the optimizer" in note.splitlines()[0]
    for text in settings:
        assert text in note

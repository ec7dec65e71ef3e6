"""What a terminal shows during a training, read with a terminal emulator; and what a pipe gets."""

import logging
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyte
import pytest

from tests.fork_server import python
from trainwright.base.terminal import coloured
from trainwright.events import EventStorage, ProgressAwareHandler, ProgressWriter
from trainwright.events.phases import activity
from trainwright.events.rate import Position
from trainwright.events.writers import default_writers
from trainwright.events.writers.progress import LiveBar, bar_stream, live_bars, shown_values


class Screen:
    """A terminal of ``columns``, as a stream."""

    encoding = "utf-8"

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self.raw = ""
        self._screen = pyte.Screen(columns, 30)
        self._stream = pyte.Stream(self._screen)

    def write(self, text: str) -> int:
        self.raw += text
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display if line.strip()]

    @property
    def is_cursor_visible(self) -> bool:
        return not self._screen.cursor.hidden


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    yield
    for bar in [*live_bars]:
        bar.close()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("COLUMNS", "80")
    return Screen()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# The screen.


def bar_at(screen: Screen, *points: tuple[float, Position], **metrics: str) -> LiveBar:
    """A bar that has been drawn at each of the times."""
    at = [points[0][1]]
    with pytest.MonkeyPatch.context() as patch:
        start, now = time.monotonic(), [0.0]
        patch.setattr(time, "monotonic", lambda: start + now[0])
        bar = LiveBar(lambda: at[0], lambda: metrics, file=screen)  # type: ignore[arg-type]
        bar.console.width = screen.columns
        for now[0], at[0] in points:
            bar._render()
        bar.console.print(bar._render())
    return bar


METRICS = {"loss": "0.4312", "accuracy": "0.9125", "lr": "1.00e-03"}
POINTS = [(0.0, Position(0, 300, per_epoch=100)), (3.0, Position(1, 300, per_epoch=100))]


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (80, ["Epoch 2/3 ━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━  51/100  16.7 it/s  ETA 0:02, run 0:08",
              "loss 0.4312  accuracy 0.9125  lr 1.00e-03"]),
        (160, ["Epoch 2/3 ━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━  51/100  16.7 it/s  ETA 0:02, run 0:08"
               "  loss 0.4312  accuracy 0.9125  lr 1.00e-03"]),
    ],
)  # fmt: skip
def test_the_lines_of_a_terminal(columns: int, lines: list[str]) -> None:
    screen = Screen(columns)
    bar_at(screen, *POINTS, (12.0, Position(151, 300, per_epoch=100)), **METRICS)
    assert screen.lines == lines


def test_an_evaluation_shows_itself() -> None:
    screen = Screen(80)
    with activity("evaluation", 40) as evaluation:
        evaluation.done = 12
        bar_at(screen, *POINTS)
    assert re.fullmatch(r"evaluation 12/40  0:0\d", screen.lines[-1])
    bar_at(screen, *POINTS)
    assert "evaluation" not in screen.lines[-1]


# While a training runs.


def put(storage: EventStorage, iteration: int) -> None:
    storage.iter = iteration
    storage.put_scalars(total_loss=0.5, time=0.1)
    storage.put_scalar("lr", 0.01, smoothing_hint=False)


@pytest.mark.slow
def test_the_bar_moves_by_time_and_not_by_writes(screen: Screen) -> None:
    storage = EventStorage(6)
    writer = ProgressWriter(10, file=screen)  # type: ignore[arg-type]
    writer.begin(storage)
    second = ProgressWriter(10, file=screen)  # type: ignore[arg-type]
    second.begin(storage)
    second.close()
    assert len(live_bars) == 1  # a second bar is not shown
    assert " 6/10" in screen.lines[0]
    put(storage, 8)
    wait_until(lambda: " 8/10" in screen.lines[0])
    wait_until(lambda: storage._max_pending == 0)  # the thread has asked for the values, and has read no tensor
    put(storage, 9)
    wait_until(lambda: "loss 0.5" in "".join(screen.lines))
    storage.iter, storage.is_over = 10, True
    writer.write(storage)
    writer.close()
    writer.close()
    assert " 10/10" in screen.lines[0]
    assert screen.is_cursor_visible
    assert "\x1b[?25l" not in screen.raw  # a process that is killed cannot show it again
    assert not live_bars


def test_lines_are_whole_above_the_bar(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", screen)
    handler = ProgressAwareHandler(screen)  # type: ignore[arg-type]
    handler.setFormatter(logging.Formatter("[log] %(message)s"))
    own = logging.StreamHandler(screen)  # type: ignore[type-var]
    logging.getLogger().addHandler(own)
    log = logging.Logger("of_test")
    log.addHandler(handler)
    storage = EventStorage()
    writer = ProgressWriter(4, file=screen)  # type: ignore[arg-type]
    writer.begin(storage)
    try:
        for iteration in range(4):
            put(storage, iteration)
            print("printed", iteration)
            log.info("checkpoint %d: [bold]saved[/bold]", iteration)
            log.info("only progress", extra={"progress": True})
            logging.getLogger("of_the_program").warning("own handler %d", iteration)
            assert live_bars[0]._live is not None
            live_bars[0]._live.refresh()
    finally:
        logging.getLogger().removeHandler(own)
        writer.close()
    expected = [
        line
        for n in range(4)
        for line in (f"printed {n}", f"[log] checkpoint {n}: [bold]saved[/bold]", f"own handler {n}")
    ]
    assert screen.lines[:12] == expected
    assert screen.lines[12].startswith("train ━")
    assert len(screen.lines) <= 14
    assert sys.stdout is screen
    assert own.stream is screen


def test_a_record_that_cannot_be_formatted_does_not_stop_the_run(
    screen: Screen, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = ProgressWriter(4, file=screen)  # type: ignore[arg-type]
    writer.begin(EventStorage())
    record = logging.LogRecord("trainwright", logging.INFO, __file__, 1, "%d", ("no number",), None)
    ProgressAwareHandler(screen).handle(record)  # type: ignore[arg-type]
    writer.close()
    assert "Logging error" in capsys.readouterr().err


def test_a_bar_that_fails_says_so_and_ends_no_training() -> None:
    screen = Screen(80)
    bar = LiveBar(lambda: Position(1, 2), lambda: 1 / 0, file=screen)  # type: ignore[arg-type, return-value]
    bar.start()
    bar.close()
    assert screen.lines[0].startswith("train: the progress bar failed (ZeroDivisionError")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_worker_prints_without_the_bar(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", screen)
    writer = ProgressWriter(4, file=screen)  # type: ignore[arg-type]
    writer.begin(EventStorage())
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()

    def work() -> None:
        sender.send((len(live_bars), type(sys.stdout).__name__))

    worker = context.Process(target=work)
    with live_bars[0].console._lock:  # the worker would wait for it for ever
        worker.start()
        worker.join(30)
    assert receiver.poll(0)
    assert receiver.recv() == (0, "Screen")
    writer.close()


# Colours, and where there is no terminal.


@pytest.mark.parametrize(("no_color", "expected"), [("", "\x1b[33mslow\x1b[0m"), ("1", "slow")])
def test_colours_on_a_terminal(no_color: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    screen = Screen()
    handler = ProgressAwareHandler(screen)  # type: ignore[arg-type]
    for level, text in ((logging.INFO, "info"), (logging.WARNING, "slow")):
        handler.handle(logging.LogRecord("trainwright", level, __file__, 1, text, (), None))
    assert screen.raw == f"info\n{expected}\n"
    bar_at(screen, *POINTS, **METRICS)
    assert bool(re.search(r"\x1b\[[\d;]*(3\d|9\d|38;)[\d;]*m", screen.raw)) == (no_color == "")


def test_where_the_bar_goes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def writers() -> list[str]:
        return [type(one).__name__ for one in default_writers(tmp_path, 4, batch_size=1, tensorboard=None)]

    terminal = Screen()
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert bar_stream() is terminal
        assert writers()[:2] == ["ProgressWriter", "ConsoleWriter"]
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", terminal)
        assert bar_stream() is terminal
        monkeypatch.setenv("TERM", "dumb")
        assert bar_stream() is None
        assert writers()[0] == "ConsoleWriter"
        assert coloured("text", 31, file) == "text"


def test_the_values_of_both_apis() -> None:
    values = {"aux_loss": 1.0, "lr": 0.01, "eval_f1": 0.5, "total_loss": 0.25, "Acc@1": 98.6111, "time": 0.1}
    shown = shown_values({name: (value, 0) for name, value in values.items()})
    assert [*shown.items()] == [
        ("total_loss", "0.2500"), ("aux_loss", "1.000"), ("Acc@1", "98.61 %"), ("eval_f1", "0.5000"), ("lr", "1.00e-02")
    ]  # fmt: skip


# Complete programs in a terminal.

PROGRAM = """
import os, sys, tempfile, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from trainwright import Trainer, TrainingConfig
from trainwright.hooks import HookBase

class Act(HookBase):
    def after_step(self):
        if self.trainer.iter == 3:
            print("printed by the program")
            if sys.argv[1] == "raises":
                raise ValueError("a fault of the model")
            if sys.argv[1] != "ends":
                os.kill(os.getpid(), int(sys.argv[1]))

data = TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.long))
config = TrainingConfig(output_dir=tempfile.mkdtemp(), num_epochs=2, batch_size=4, tensorboard=None, metrics=None,
                        early_stopping=None)
trainer = Trainer(nn.Linear(4, 2), config, data)
trainer.register_hooks([Act()])
trainer.train()
"""


def in_terminal(action: str, columns: int = 80) -> tuple[Screen, int]:
    """Run the program in a terminal; the screen at its end, and the exit status."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30 if columns else 0, columns, 0, 0))
    command = [python(), "-u", "-c", PROGRAM, action]
    width = {"COLUMNS": str(columns)} if columns else {}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env={**os.environ, **width}
    )
    os.close(theirs)
    screen, data = Screen(columns or 80), b""
    try:
        while chunk := os.read(ours, 65536):
            data += chunk
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    screen.write(data.decode().replace("\r\n", "\n"))
    return screen, process.wait(60)


@pytest.mark.parametrize(
    ("action", "status", "last"),
    [("raises", 1, "ValueError: a fault of the model"), ("2", -2, ""), ("15", 143, "")],
    ids=["exception", "ctrl_c", "sigterm"],
)
@pytest.mark.exhaustive(every=3)
def test_the_terminal_is_complete_after(action: str, status: int, last: str) -> None:
    screen, code = in_terminal(action)
    assert code in (status, 130 if status == -2 else status)
    assert "printed by the program" in screen.lines
    assert screen.is_cursor_visible
    assert screen.lines[-1].startswith(last)
    shown = "\n".join(screen.lines)
    assert ("Traceback" in shown, "resume_from_checkpoint=True" in shown) == (bool(last), True)
    bars = [place for place, line in enumerate(screen.lines) if line.startswith("Epoch 1/2 ━")]
    assert len(bars) == 1  # the bar has ended, and what follows is below it
    assert all("━" not in line for line in screen.lines[bars[0] + 1 :])


def test_a_terminal_without_a_size() -> None:
    screen, code = in_terminal("ends", columns=0)
    assert code == 0
    (bar,) = [line for line in screen.lines if "━" in line]
    assert bar.startswith("Epoch 2/2 ━━━━━━━━━━━━━━━━━━━━")
    assert re.search(r" 4/4  ([\d.]+ it/s  )?in 0:0", bar)
    # Without the name and the level of the logger.
    assert [line[9:] for line in screen.lines if re.match(r"\d\d:\d\d:\d\d Fin", line)] == [
        "Finished after iteration 8"
    ]


def test_a_pipe_gets_lines() -> None:
    done = subprocess.run([python(), "-c", PROGRAM, "ends"], capture_output=True, timeout=120, check=True)
    shown = (done.stdout + done.stderr).decode()
    assert "\r" not in shown
    assert "\x1b" not in shown
    assert len(re.findall(r"Epoch 2/2  total_loss ", shown)) == 1
    assert "iteration 8/8" not in shown  # the line of the epoch has its values

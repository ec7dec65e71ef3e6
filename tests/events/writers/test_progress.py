import io
import logging
import re
import time

import pytest

from trainwright.events import ConsoleWriter, EventStorage, ProgressAwareHandler, ProgressWriter
from trainwright.events.writers.progress import live_bars


class Screen(io.StringIO):
    """What a terminal shows of the text written to it: a carriage return overwrites the line."""

    def isatty(self):
        return True

    def lines(self):
        shown = []
        for line in self.getvalue().replace("\x1b[A", "").split("\n"):
            cells = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            shown.append("".join(cells).rstrip())
        return shown


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def handler(screen):
    return ProgressAwareHandler(screen)


@pytest.fixture
def log(handler, monkeypatch):
    logger = logging.getLogger("trainwright.events")
    handler.setFormatter(logging.Formatter("[log] %(message)s"))
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    monkeypatch.setattr(logger, "propagate", False)
    yield logger
    logger.removeHandler(handler)
    logger.setLevel(level)


def put_step(storage, iteration):
    storage.iter = iteration
    storage.put_scalars(total_loss=0.5, aux_loss=0.25, time=0.1)
    storage.put_scalar("lr", 0.01, smoothing_hint=False)


def test_one_bar_shows_iterations_loss_rate_and_speed(screen):
    storage = EventStorage()
    writer = ProgressWriter(10, batch_size=32, file=screen)
    writer.write(storage)
    assert screen.getvalue() == ""  # nothing yet to show
    for iteration in range(10):
        put_step(storage, iteration)
        writer.write(storage)
    writer.close()
    writer.close()
    (bar,) = [line for line in screen.lines() if line]
    assert "10/10" in bar
    assert re.search(r"loss=0\.5, lr=1\.00e-02, 320\.0 samples/s", bar)
    assert not live_bars


def test_a_resumed_bar_starts_where_the_run_does(screen):
    storage = EventStorage(6)
    put_step(storage, 6)
    writer = ProgressWriter(10, file=screen)
    writer.write(storage)
    assert "7/10" in screen.lines()[-1]
    storage.iter = 10  # the final evaluation comes after the last iteration
    storage.put_scalar("Acc@1", 99.0, smoothing_hint=False)
    writer.write(storage)
    writer.close()
    assert "10/10" in screen.getvalue()
    assert "11/10" not in screen.getvalue()
    assert "Acc@1=99" in screen.getvalue()


def test_log_lines_stand_whole_above_the_bar_and_progress_lines_are_left_out(screen, log):
    storage = EventStorage()
    bar, console = ProgressWriter(4, file=screen), ConsoleWriter(8, 4)
    for iteration in range(4):
        put_step(storage, iteration)
        bar.write(storage)
        console.write(storage)
        log.warning("checkpoint %d saved", iteration)
    bar.close()
    lines = [line for line in screen.lines() if line]
    assert lines[:4] == [f"[log] checkpoint {iteration} saved" for iteration in range(4)]
    assert len(lines) == 5
    assert "4/4" in lines[4]
    assert "consumed_samples" not in screen.getvalue()


def test_without_a_bar_the_handler_is_an_ordinary_one(screen, log):
    storage = EventStorage()
    put_step(storage, 0)
    ConsoleWriter(8, 4).write(storage)
    assert screen.lines()[0].startswith("[log] eta: 0:00:00  iteration: 1/4")
    assert "\r" not in screen.getvalue()


def test_a_record_that_cannot_be_formatted_does_not_stop_the_run(screen, handler, capsys):
    storage = EventStorage()
    put_step(storage, 0)
    writer = ProgressWriter(4, file=screen)
    writer.write(storage)
    record = logging.LogRecord("trainwright", logging.INFO, __file__, 1, "%d", ("no number",), None)
    handler.handle(record)
    writer.close()
    assert "Logging error" in capsys.readouterr().err


def test_a_bar_is_there_from_the_start_and_shows_the_rate_of_this_process(screen):
    storage = EventStorage(1000)
    writer = ProgressWriter(2000, file=screen)
    writer.begin(storage)
    assert "1000/2000" in screen.lines()[-1]
    put_step(storage, 1019)
    time.sleep(0.2)
    writer.write(storage)
    rate = float(re.search(r"([\d.]+)it/s", screen.lines()[-1]).group(1))
    writer.close()
    assert rate < 110  # 20 iterations in a fifth of a second, not 1020


def test_without_a_beginning_what_was_done_before_is_no_rate(screen):
    storage = EventStorage()
    put_step(storage, 9999)
    writer = ProgressWriter(20000, file=screen)
    writer.write(storage)
    assert "?it/s" in screen.lines()[-1] or "0.00it/s" in screen.lines()[-1]
    writer.close()

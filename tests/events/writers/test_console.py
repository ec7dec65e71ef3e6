import io
import logging
import re
import time

import pytest

from trainwright.events import ConsoleWriter, EventStorage, ProgressAwareHandler, ProgressWriter
from trainwright.events.writers.console import live_bars


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="trainwright.events")
    return lambda: [record.getMessage() for record in caplog.records]


def put_step(storage, iteration, **scalars):
    storage.iter = iteration
    storage.samples = 32 * (iteration + 1)
    storage.put_scalars(total_loss=1.23456, time=0.5, data_time=0.01, **scalars)
    storage.put_scalar("lr", 0.01, smoothing_hint=False)


def test_a_line_shows_where_the_run_is_and_how_fast(lines, caplog):
    storage = EventStorage()
    put_step(storage, 0)
    put_step(storage, 1)
    ConsoleWriter(32, 100).write(storage)
    assert lines() == [
        "eta: 0:00:49  iteration: 2/100  consumed_samples: 64  total_loss: 1.235  "
        "time: 0.5000 s/iter  data_time: 0.0100 s/iter  total_throughput: 64.00 samples/s  lr: 1.00e-02"
    ]
    assert caplog.records[0].progress is True
    assert caplog.records[0].name == "trainwright.events"


def test_losses_are_the_median_of_the_last_twenty_iterations(lines):
    storage = EventStorage()
    for iteration in range(50):
        storage.iter = iteration
        storage.put_scalar("losses/box_loss", float(iteration))
    ConsoleWriter(1, 50).write(storage)
    assert "losses/box_loss: 39.5" in lines()[0]


def test_without_iteration_times_there_is_no_eta_and_no_speed(lines):
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    ConsoleWriter(8, 10).write(storage)
    assert lines() == ["iteration: 1/10  consumed_samples: 0  loss: 1"]


def test_the_eta_is_the_median_time_of_a_thousand_iterations_not_the_mean(lines):
    storage = EventStorage()
    for iteration in range(9):
        storage.iter = iteration
        storage.put_scalar("time", 1.0 if iteration else 500.0)
    ConsoleWriter(8, 69).write(storage)
    assert lines()[0].startswith("eta: 0:01:00  ")


def test_the_final_evaluation_is_shown_alone_at_the_end(lines):
    storage = EventStorage()
    writer = ConsoleWriter(32, 2)
    put_step(storage, 0)
    put_step(storage, 1)
    writer.write(storage)
    storage.iter = 2
    storage.put_scalar("Acc@1", 98.765, smoothing_hint=False)
    writer.write(storage)
    assert lines()[1:] == ["iteration: 2/2  consumed_samples: 64  Acc@1: 98.77 %"]


def test_nothing_new_is_no_line(lines):
    storage = EventStorage()
    writer = ConsoleWriter(32, 10)
    writer.write(storage)
    put_step(storage, 0)
    writer.write(storage)
    writer.write(storage)
    assert len(lines()) == 1


def test_a_resumed_run_does_not_show_what_was_put_before(lines):
    first = EventStorage()
    first.put_scalar("Acc@1", 50.0, smoothing_hint=False)
    resumed = EventStorage(4)
    resumed.load_state_dict(first.state_dict())
    writer = ConsoleWriter(32, 10)
    writer.write(resumed)
    assert lines() == []
    put_step(resumed, 4)
    writer.write(resumed)
    assert len(lines()) == 1
    assert "Acc@1" not in lines()[0]


def test_the_eta_follows_a_run_that_becomes_slower(lines):
    storage, writer = EventStorage(), ConsoleWriter(8, 4_000)
    for iteration in range(4_000):
        storage.iter = iteration
        storage.put_scalar("time", 1.0 if iteration < 1_500 else 2.0)
        if iteration % 100 == 99:
            writer.write(storage)
    etas = [line.split()[1] for line in lines()]
    assert etas[14] == "0:41:40"  # 2500 iterations of a second
    assert etas[29] == "0:33:20"  # 1000 of two


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


def put_shown_step(storage, iteration):
    storage.iter = iteration
    storage.put_scalars(total_loss=0.5, aux_loss=0.25, time=0.1)
    storage.put_scalar("lr", 0.01, smoothing_hint=False)


def test_one_bar_shows_iterations_loss_rate_and_speed(screen):
    storage = EventStorage()
    writer = ProgressWriter(10, batch_size=32, file=screen)
    writer.write(storage)
    assert screen.getvalue() == ""  # nothing yet to show
    for iteration in range(10):
        put_shown_step(storage, iteration)
        writer.write(storage)
    writer.close()
    writer.close()
    (bar,) = [line for line in screen.lines() if line]
    assert "10/10" in bar
    assert re.search(r"loss=0\.5, lr=1\.00e-02, 320\.0 samples/s", bar)
    assert not live_bars


def test_a_resumed_bar_starts_where_the_run_does(screen):
    storage = EventStorage(6)
    put_shown_step(storage, 6)
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
        put_shown_step(storage, iteration)
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
    put_shown_step(storage, 0)
    ConsoleWriter(8, 4).write(storage)
    assert screen.lines()[0].startswith("[log] eta: 0:00:00  iteration: 1/4")
    assert "\r" not in screen.getvalue()


def test_a_record_that_cannot_be_formatted_does_not_stop_the_run(screen, handler, capsys):
    storage = EventStorage()
    put_shown_step(storage, 0)
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
    put_shown_step(storage, 1019)
    time.sleep(0.2)
    writer.write(storage)
    rate = float(re.search(r"([\d.]+)it/s", screen.lines()[-1]).group(1))
    writer.close()
    assert rate < 110  # 20 iterations in a fifth of a second, not 1020


def test_without_a_beginning_what_was_done_before_is_no_rate(screen):
    storage = EventStorage()
    put_shown_step(storage, 9999)
    writer = ProgressWriter(20000, file=screen)
    writer.write(storage)
    assert "?it/s" in screen.lines()[-1] or "0.00it/s" in screen.lines()[-1]
    writer.close()


def test_an_unknown_batch_size_leaves_samples_and_speed_out(lines):
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    storage.put_scalar("time", 0.5)
    ConsoleWriter(0, 10).write(storage)
    assert lines() == ["eta: 0:00:04  iteration: 1/10  loss: 1  time: 0.5000 s/iter"]

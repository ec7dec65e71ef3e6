import io
import logging
import re
import time

import pytest

from trainwright.events import ConsoleWriter, EventStorage, ProgressAwareHandler
from trainwright.events.phases import importing


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="trainwright.events")
    return lambda: [record.getMessage() for record in caplog.records]


def put_step(storage, iteration, **scalars):
    storage.iter = iteration
    storage.samples = 32 * (iteration + 1)
    storage.put_scalars(total_loss=1.23456, time=0.5, data_time=0.01, **scalars)
    storage.put_scalar("lr", 0.01, smoothing_hint=False)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_line_shows_where_the_run_is_and_how_fast(lines, caplog, clock):
    storage, writer = EventStorage(), ConsoleWriter(32, 100)
    put_step(storage, 0, accuracy=0.75)
    writer.write(storage)
    put_step(storage, 1)
    clock[0] = 0.5
    writer.write(storage)
    values = "total_loss 1.235  accuracy 0.7500  lr 1.00e-02  2.00 it/s  64 samples/s"
    assert lines() == [
        f"iteration 1/100  {values}",  # no rate is known
        f"iteration 2/100  {values.replace('accuracy 0.7500  ', '')}  ETA 0:49",
    ]
    assert caplog.records[0].progress is True
    assert caplog.records[0].name == "trainwright.events"


def test_the_eta_is_that_of_this_process_and_of_its_last_lines(lines, clock):
    storage, writer = EventStorage(100), ConsoleWriter(0, 4_100)
    storage.put_scalar("time", 1000.0)  # of another machine
    for iteration in range(100, 4_100):
        storage.iter = iteration
        storage.put_scalar("total_loss", 1.0)
        clock[0] += 1.0 if iteration < 1_600 else 2.0
        if iteration % 100 == 99:
            writer.write(storage)
    etas = [line.partition("ETA ")[2] for line in lines()]
    assert etas[0] == ""
    assert etas[14] == "41:40"  # 2500 iterations of a second
    assert etas[-5] == "13:20"  # 400 of two
    assert etas[-1] == ""


def test_the_eta_does_not_repeat_an_import(lines, clock, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    storage, writer = EventStorage(), ConsoleWriter(0, 100)
    put_step(storage, 0)
    writer.write(storage)
    with importing():
        clock[0] += 40
    clock[0] += 1
    put_step(storage, 1)
    writer.write(storage)
    assert lines()[-1].endswith("ETA 1:38")  # 98 iterations of a second


def test_results_of_evaluations_and_what_the_line_of_an_epoch_has_are_not_repeated(lines):
    storage, writer = EventStorage(), ConsoleWriter(32, 3)
    put_step(storage, 0)
    storage.put_scalar("Acc@1", 98.765, smoothing_hint=False)
    storage.results.add("Acc@1")
    writer.write(storage)
    put_step(storage, 1)
    storage.line_at = 2
    writer.write(storage)
    put_step(storage, 2)
    writer.write(storage)
    writer.write(storage)
    assert [line.split()[1] for line in lines()] == ["1/3", "3/3"]
    assert "Acc@1" not in lines()[0]


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


@pytest.mark.parametrize(("columns", "is_terminal"), [(80, True), (100, True), (160, True), (120, False)])
def test_lines_fit_and_are_broken_between_fields(columns, is_terminal, monkeypatch):
    class Stream(io.StringIO):
        def isatty(self):
            return is_terminal

    monkeypatch.setenv("COLUMNS", str(columns if is_terminal else 50))
    stream, fields = Stream(), [f"a_metric_{n} 0.{n}" for n in range(20)]
    handler = ProgressAwareHandler(stream)
    handler.setFormatter(logging.Formatter("12:34:56 %(message)s"))
    for text in ("  ".join(fields), "word " * 60):
        handler.handle(logging.LogRecord("trainwright", logging.INFO, __file__, 1, text, (), None))
    *broken, prose = stream.getvalue().splitlines() if not is_terminal else [*stream.getvalue().splitlines(), ""]
    assert max(map(len, broken)) <= columns
    assert re.findall(r"a_metric_\d+ [\d.]+", stream.getvalue()) == fields
    assert [line[:9].strip() for line in broken[1:3]] == ["", ""] if columns < 160 else True
    assert len(prose) == (0 if is_terminal else len("12:34:56 " + "word " * 60))

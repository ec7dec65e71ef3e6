import logging

import pytest

from trainwright.events import ConsoleWriter, EventStorage


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


def test_an_unknown_batch_size_leaves_samples_and_speed_out(lines):
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    storage.put_scalar("time", 0.5)
    ConsoleWriter(0, 10).write(storage)
    assert lines() == ["eta: 0:00:04  iteration: 1/10  loss: 1  time: 0.5000 s/iter"]

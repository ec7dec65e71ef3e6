import itertools
import math
import subprocess
import threading
import time

import pytest
import torch

from tests.fork_server import python
from trainwright.events import EventStorage, TensorBoardWriter
from trainwright.events.writers.rows import sync_files

pytest.importorskip("tensorboard")


@pytest.fixture(autouse=True)
def _each_look_at_the_clock_is_a_second_later(monkeypatch):
    """TensorBoard reads files by name: by second, then by a count of this process that sorts as text."""
    seconds = itertools.count(int(time.time()))
    monkeypatch.setattr("time.time", lambda: float(next(seconds)))


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0})
    events.Reload()
    return events


def points(folder, name):
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def train(folder, start, stop):
    writer = TensorBoardWriter(folder, window_size=3)
    with EventStorage(start) as storage:
        for iteration in range(start, stop):
            storage.iter = iteration
            storage.put_scalar("loss", float(iteration), smoothing_hint=False)
            storage.put_scalar("smooth", float(iteration))
            writer.write()
            if iteration == 2:
                writer.close()  # after which the same run may go on
        writer.close()
        writer.close()


def test_scalars_pictures_and_histograms_arrive_once_with_their_iteration(tmp_path):
    storage = EventStorage()
    writer = TensorBoardWriter(tmp_path)
    for _ in range(2):
        storage.put_scalar("loss", torch.tensor(0.5))
        storage.put_image("input", torch.rand(3, 4, 5))
        storage.put_histogram("weights", torch.arange(10.0), bins=5)
        storage.put_histogram("broken", torch.tensor([math.nan]))
        storage.put_text("sentence", "A *text*.")
        writer.write(storage)
        writer.write(storage)
        storage.step()
    writer.close()
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 0.5), (1, 0.5)]
    assert [(event.step, event.height, event.width) for event in events.Images("input")] == [(0, 4, 5), (1, 4, 5)]
    histogram = events.Histograms("weights")[1]
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.sum) == (1, 10, 45)
    assert [count for count in histogram.histogram_value.bucket if count] == [2] * 5
    assert "broken" not in events.Tags()["histograms"]
    assert [event.step for event in events.Tensors("sentence/text_summary")] == [0, 1]
    assert events.Tensors("sentence/text_summary")[0].tensor_proto.string_val[0] == b"A *text*."


def test_a_resumed_run_overwrites_what_came_after_its_checkpoint(tmp_path):
    train(tmp_path, 0, 8)
    train(tmp_path, 5, 10)
    assert points(tmp_path, "loss") == [(step, float(step)) for step in range(10)]
    assert points(tmp_path, "smooth")[-1] == (9, 8.0)


def test_pictures_are_encoded_in_the_background_and_a_checkpoint_waits_for_them(tmp_path, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    add, may_encode = SummaryWriter.add_image, threading.Event()
    monkeypatch.setattr(SummaryWriter, "add_image", lambda *given: may_encode.wait(20) and add(*given))
    writer = TensorBoardWriter(tmp_path)
    with EventStorage() as storage:
        storage.put_image("input", torch.rand(3, 4, 5))
        writer.write(storage)
        may_encode.set()
        sync_files()
        assert [event.step for event in read(tmp_path).Images("input")] == [0]
        storage.put_image("input", torch.rand(3, 4, 5))
        monkeypatch.setattr(SummaryWriter, "add_image", lambda *given: 1 / 0)
        writer.write(storage)
        with pytest.raises(ZeroDivisionError):
            writer.close()


def test_after_sync_the_rows_of_a_process_that_ends_without_close_are_there(tmp_path):
    program = f"""
import os
from trainwright.events import EventStorage, TensorBoardWriter
from trainwright.events.writers.base import SafeWriter
with EventStorage(0) as storage:
    storage.put_scalar("loss", 1.0)
    writer = TensorBoardWriter({str(tmp_path)!r})
    writer.write()
os._exit(1)
"""
    assert subprocess.run([python(), "-c", program]).returncode == 1
    assert points(tmp_path, "loss") == [(0, 1.0)]


def test_a_missing_tensorboard_is_said_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        TensorBoardWriter(tmp_path).write(storage)

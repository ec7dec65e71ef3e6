"""Writing in the background: a slow writer delays no step, and every queued row is on disk when it has to be."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwright.base.files import atomic_write
from trainwright.events import EventStorage, EventWriter, JSONWriter, get_event_storage
from trainwright.events.writers import SafeWriter, default_writers, writer_thread
from trainwright.events.writers.rows import sync_files
from trainwright.events.writers.writer_thread import WriterDispatcher


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.fixture
def storage() -> Iterator[EventStorage]:
    with EventStorage() as storage:
        yield storage


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Shut until a test opens it; open at the end, so that no thread waits for ever."""
    gate = threading.Event()
    yield gate
    gate.set()


class Memory(EventWriter):
    """Records the rows that it is given; waits before each row for its gate."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.rows: list[tuple[int, dict[str, tuple[float, int]]]] = []
        self.threads: list[threading.Thread] = []
        self.storages: list[EventStorage] = []
        self.is_closed = False

    def __repr__(self) -> str:
        return "Memory()"

    def write(self, storage: EventStorage | None = None) -> None:
        if self.gate is not None:
            self.gate.wait(20)
        storage = get_event_storage() if storage is None else storage
        self.threads.append(threading.current_thread())
        self.storages.append(storage)
        self.rows.append((storage.iter, storage.latest_with_smoothing_hint()))

    def close(self) -> None:
        self.is_closed = True


def put_steps(storage: EventStorage, dispatcher: WriterDispatcher, count: int, **kwargs: Any) -> None:
    for _ in range(count):
        storage.put_scalar("loss", float(storage.iter))
        storage.samples += 4
        dispatcher.write(storage, **kwargs)
        storage.step()


def put_and_close(storage: EventStorage, dispatcher: WriterDispatcher) -> None:
    """As a training does at its end."""
    try:
        put_steps(storage, dispatcher, 1)
    finally:
        dispatcher.close()


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def wait_until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- what a writer sees -------------------------------------------------------------------------------------------


def test_a_slow_writer_sees_each_row_as_it_was_in_one_storage_and_one_thread(
    storage: EventStorage, gate: threading.Event
) -> None:
    memory = Memory(gate)
    dispatcher = WriterDispatcher([memory])
    put_steps(storage, dispatcher, 30)  # all before the first is written
    gate.set()
    dispatcher.close()
    medians = [(step - min(step, 19) / 2, step) for step in range(30)]  # of at most 20 values
    assert memory.rows == [(step, {"loss": median}) for step, median in enumerate(medians)]
    assert memory.is_closed
    assert len(set(map(id, memory.storages))) == 1
    assert memory.storages[0] is not storage
    assert set(memory.threads) != {threading.current_thread()}


def test_histories_samples_hints_and_the_beginning_are_those_of_then(
    storage: EventStorage, gate: threading.Event
) -> None:
    written: list[Any] = []

    class Curious(Memory):
        def write(self, storage: EventStorage | None = None) -> None:
            super().write(storage)
            seen = get_event_storage()
            loss = seen.history("loss")
            media = [item.name for item in seen.media()]
            written.append((seen.samples, loss.values(), loss.avg(2), loss.global_avg(), media, seen.smoothing_hints()))
            assert seen.latest() == {name: (h.latest(), h.latest_iteration()) for name, h in seen.histories().items()}
            assert (seen.start_iter, seen.first_unwritten) == (0, 0)

    dispatcher = WriterDispatcher([Curious(gate)])
    storage.put_image("first", [[0.0]])  # type: ignore[arg-type]  # what as_tensor takes
    put_steps(storage, dispatcher, 2)
    storage.put_image("second", [[0.0]])  # type: ignore[arg-type]
    storage.put_scalar("acc", 1.0, smoothing_hint=False)
    gate.set()
    dispatcher.close()
    assert written == [
        (4, [(0.0, 0)], 0.0, 0.0, ["first"], {"loss": True}),
        (8, [(0.0, 0), (1.0, 1)], 0.5, 0.5, ["first"], {"loss": True}),
    ]


def test_a_put_in_a_writer_is_an_error_that_names_where_to_put(storage: EventStorage) -> None:
    class Putting(EventWriter):
        def write(self, storage: EventStorage | None = None) -> None:
            get_event_storage().put_scalars(score=1.0)

    class PuttingHere(Putting):
        in_background = False

    with pytest.raises(ValueError, match=r"'score'.*hook(.|\n)*in_background = False"):
        put_and_close(storage, WriterDispatcher([Putting()]))
    for step, writer in enumerate((PuttingHere(), SafeWriter(PuttingHere()))):
        put_steps(storage, WriterDispatcher([writer]), 1)
        assert storage.latest()["score"] == (1.0, step)


# -- slow writers, slow disks -------------------------------------------------------------------------------------


def test_the_rest_is_there_while_one_writer_hangs(
    tmp_path: Path, storage: EventStorage, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, quick, path = Memory(gate), Memory(), tmp_path / "metrics.json"
    dispatcher = WriterDispatcher([hanging, quick, JSONWriter(path)])
    put_steps(storage, dispatcher, 90)
    sync_files()
    assert iterations(path) == list(range(90))
    wait_until(lambda: len(quick.rows) == 90)
    assert hanging.rows == []
    gate.set()
    dispatcher.close()
    assert [step for step, _ in hanging.rows] == list(range(90))
    assert "left out" not in caplog.text


def test_what_is_too_much_for_a_writer_is_left_out_and_said_and_results_stay(
    storage: EventStorage, gate: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_thread, "_MAX_QUEUED_ROWS", 5)
    memory = Memory(gate)
    dispatcher = WriterDispatcher([memory])
    put_steps(storage, dispatcher, 1)
    wait_until(lambda: not dispatcher._threads[0]._queue)  # it is in the hands of the writer
    put_steps(storage, dispatcher, 1, keep=True)
    put_steps(storage, dispatcher, 20)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "Memory: slower than the training" in warning.getMessage()
    gate.set()
    dispatcher.close()
    assert [step for step, _ in memory.rows] == [0, 1, 18, 19, 20, 21]
    assert caplog.records[-1].getMessage().startswith("Memory: 16 rows were dropped")
    assert len(caplog.records) == 2


def test_at_the_end_patience_is_bounded_and_the_last_row_is_written(
    storage: EventStorage, gate: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_thread, "_CLOSE_TIMEOUT_S", 0.05)

    class Slow(Memory):
        def write(self, storage: EventStorage | None = None) -> None:
            time.sleep(0.02)
            super().write(storage)

    memory = Slow()
    dispatcher = WriterDispatcher([memory])
    put_steps(storage, dispatcher, 50)
    put_steps(storage, dispatcher, 1, keep=True)
    dispatcher.close()
    written = [step for step, _ in memory.rows]
    assert written[-1] == 50
    assert memory.is_closed
    assert 1 < len(written) < 51
    assert f"{51 - len(written)} rows were dropped" in caplog.text


def test_a_writer_that_does_not_come_back_is_left_behind(
    storage: EventStorage, gate: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_thread, "_CLOSE_TIMEOUT_S", 0.05)
    memory = Memory(gate)
    dispatcher = WriterDispatcher([memory])
    put_steps(storage, dispatcher, 3)
    dispatcher.close()
    assert "Memory: write() or close() does not return" in caplog.text
    assert "2 rows are not written." in caplog.text
    put_steps(storage, dispatcher, 1)  # and it is never called by two threads
    gate.set()
    wait_until(lambda: memory.is_closed)
    dispatcher.close()
    assert "Memory: 1 rows were dropped" in caplog.text
    wait_until(lambda: not any(thread.name == "trainwright-write" for thread in threading.enumerate()))


# -- what is on the disk when ---------------------------------------------------------------------------------------


def test_settled_rows_are_synced(tmp_path: Path, storage: EventStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    path = tmp_path / "metrics.json"
    atomic_write(path, b"")

    def noting(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            synced.append(path.read_bytes().count(b"\n"))
        fsync(descriptor)

    dispatcher = WriterDispatcher([JSONWriter(path)])
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", noting)
        put_steps(storage, dispatcher, 3)
        assert synced == []
        sync_files()
        assert synced == [3]
        put_steps(storage, dispatcher, 1)
        dispatcher.close()
        assert synced == [3, 4]
        sync_files()
        assert synced == [3, 4]
    assert iterations(path) == list(range(4))


def test_the_same_run_may_go_on_after_its_end(tmp_path: Path, storage: EventStorage) -> None:
    memory, path = Memory(), tmp_path / "metrics.json"
    dispatcher = WriterDispatcher([memory, JSONWriter(path)])
    for _ in range(3):
        put_steps(storage, dispatcher, 2)
        dispatcher.close()
    assert iterations(path) == list(range(6))
    assert len(set(map(id, memory.storages))) == 1


# -- failures -------------------------------------------------------------------------------------------------------


def test_what_a_writer_raises_comes_to_the_training_and_the_others_go_on(tmp_path: Path, storage: EventStorage) -> None:
    class Broken(EventWriter):
        def write(self, storage: EventStorage | None = None) -> None:
            raise ConnectionError("the tracker is down")

    path = tmp_path / "metrics.json"
    dispatcher = WriterDispatcher([Broken(), JSONWriter(path)])
    with pytest.raises(ConnectionError, match="the tracker is down"):  # noqa: PT012  # at one of the next writes
        for _ in range(1000):
            put_steps(storage, dispatcher, 1)
            time.sleep(0.001)
    count = storage.iter + 1  # the one that raised was handed over too
    with pytest.raises(ConnectionError):
        put_and_close(storage, dispatcher)
    assert iterations(path)[:count] == list(range(count))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt("No space")])
def test_rows_of_a_full_disk_or_an_interrupt_are_written_once_afterwards(
    error: BaseException, tmp_path: Path, storage: EventStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(descriptor: int, block: bytes) -> int:
        write(descriptor, block)
        raise error

    path = tmp_path / "metrics.json"
    dispatcher = WriterDispatcher([JSONWriter(path)])
    put_steps(storage, dispatcher, 2)
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        with pytest.raises(type(error), match="No space"):
            put_steps(storage, dispatcher, 1)
    storage.step()
    put_and_close(storage, dispatcher)
    assert iterations(path) == [0, 1, 2, 3]


def test_a_safe_writer_of_a_file_that_fails_ends_no_run(
    tmp_path: Path, storage: EventStorage, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(JSONWriter):
        def append(self, storage: EventStorage) -> None:
            raise OSError(28, "No space left on device")

    dispatcher = WriterDispatcher([SafeWriter(Full(tmp_path / "a.json")), JSONWriter(tmp_path / "b.json")])
    put_steps(storage, dispatcher, 2)
    put_and_close(storage, dispatcher)
    assert iterations(tmp_path / "b.json") == [0, 1, 2]
    assert "is disabled for the rest of the run" in caplog.text


def test_an_interrupt_in_a_writer_is_not_lost(storage: EventStorage) -> None:
    class Leaving(EventWriter):
        def write(self, storage: EventStorage | None = None) -> None:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        put_and_close(storage, WriterDispatcher([SafeWriter(Leaving())]))


# -- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_no_part_in_what_is_written(tmp_path: Path, storage: EventStorage, gate: threading.Event) -> None:
    memory, path = Memory(gate), tmp_path / "metrics.json"
    dispatcher = WriterDispatcher([memory, JSONWriter(path)])
    put_steps(storage, dispatcher, 3)
    child = os.fork()
    if child == 0:
        try:
            sync_files()
            os._exit(0 if get_event_storage() is storage else 3)
        finally:
            os._exit(1)
    end = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    gate.set()
    dispatcher.close()
    assert iterations(path) == list(range(3))


def test_the_files_of_a_run_are_written_at_once_without_a_thread(tmp_path: Path, storage: EventStorage) -> None:
    before = threading.active_count()
    writers = default_writers(tmp_path, 10, batch_size=4, table=tmp_path / "metrics.csv", tensorboard=None)
    dispatcher = WriterDispatcher(writers)
    put_steps(storage, dispatcher, 3)
    assert threading.active_count() == before
    assert iterations(tmp_path / "metrics.json") == [0, 1, 2]
    dispatcher.close()
    assert (tmp_path / "metrics.csv").read_text() == "iteration,loss\n0,0.0\n1,0.5\n2,1.0\n"

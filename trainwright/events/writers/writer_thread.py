"""A thread that writes beside the training: what is handed to it waits in a queue that never grows beyond its bound."""

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.events.snapshot import Snapshot, StorageView
from trainwright.events.storage import EventStorage, storages_of_threads
from trainwright.events.writers.base import EventWriter, FileWriter

logger = logging.getLogger("trainwright.events")

_ROWS_OF_A_WRITER = 100  # that may wait for a slow one
_ROWS_OF_FILES = 5000  # gathered into one block whenever the disk is ready, so they wait only where it hangs
_SILENT_S = 1.0  # at the end of a run: longer waits are told
_PATIENCE_S = 20.0  # at the end of a run: for what waits, and then for a writer that does not come back

_file_lanes: weakref.WeakSet["Lane"] = weakref.WeakSet()


@atexit.register
def settle_files() -> None:
    """Wait until every row that was handed over before is on the disk.

    A checkpoint says how far the writers have come, so it is not there before the rows are.
    """
    for lane in list(_file_lanes):
        lane.settle()


def _forget_in_child() -> None:
    """A forked process has none of the threads: what they write is its parent's affair."""
    _file_lanes.clear()
    storages_of_threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True, slots=True)
class _Row:
    view: StorageView
    snapshot: Snapshot
    must_stay: bool  # others are left out first


class Lane:
    """Writers that are called in one thread, which begins with the first row and ends with ``finish``.

    Files share a lane, since their rows are written in blocks; any other writer has its own, so that it holds up nobody
    else. When the queue is full the oldest row is left out, and that is said. A row shows the newest values of all
    metrics, so what is lost is the course in between.
    """

    def __init__(self, writers: Sequence[EventWriter], *, are_files: bool = False) -> None:
        self._writers = list(writers)
        self._are_files = are_files
        self._capacity = _ROWS_OF_FILES if are_files else _ROWS_OF_A_WRITER
        self._changed = threading.Condition()
        self._queue: deque[_Row] = deque()
        self._num_put = self._num_done = self._num_left_out = 0
        self._num_synced = self._sync_goal = 0  # in rows done
        self._deadline: float | None = None  # of the end
        self._thread: threading.Thread | None = None
        self._is_lost = False  # its thread has not come back
        self._failure: BaseException | None = None
        self._view: StorageView | None = None
        self._shown: weakref.ref[EventStorage] | None = None  # by the view

    def __repr__(self) -> str:
        return f"Lane({self._writers!r}, are_files={self._are_files})"

    # What the training calls. None of it waits for a writer, but for settle() and join().

    def put(self, storage: EventStorage, snapshot: Snapshot, *, must_stay: bool) -> None:
        """Have ``snapshot`` of ``storage`` written."""
        if self._view is None or self._shown is None or self._shown() is not storage:
            self._shown, self._view = weakref.ref(storage), StorageView(storage)
        if self._is_lost:
            self._num_left_out += 1
            return
        with self._changed:
            is_full = len(self._queue) >= self._capacity
            if is_full:
                self._leave_out_one()
            self._queue.append(_Row(self._view, snapshot, must_stay))
            self._num_put += 1
            self._changed.notify_all()
        if is_full and self._num_left_out == 1:
            logger.warning(
                "%s: slower than the training, which does not wait. %d rows do; from now on the oldest is left out.",
                self._name(),
                self._capacity,
            )
        if self._thread is None:
            self._begin()

    def settle(self) -> None:
        """Return when the rows put so far are on the disk, or have failed to come there."""
        if self._thread is None or threading.current_thread() is self._thread:
            return
        thread = self._thread
        with self._changed:
            goal = self._sync_goal = self._num_put
            self._changed.notify_all()
            while self._num_synced < goal and thread.is_alive():
                self._changed.wait(1.0)

    def raise_failure(self) -> None:
        """Raise what a writer has raised, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Ask for the end: what waits is written, then the writers are closed. ``join`` waits for that."""
        if self._thread is not None:
            with self._changed:
                self._deadline = time.monotonic() + _PATIENCE_S
                self._changed.notify_all()
        elif not self._is_lost:
            self._close()

    def join(self) -> None:
        """Wait for the end. A writer that does not come back is left behind, unless it writes a file."""
        if self._thread is not None:
            silent = _SILENT_S if self._are_files else min(_SILENT_S, _PATIENCE_S)
            self._thread.join(silent)
            if self._thread.is_alive():
                at_most = "" if self._are_files else f", at most {_PATIENCE_S:.0f} s"
                logger.info("Waiting for %s: %d rows are to be written%s.", self._name(), len(self._queue), at_most)
                self._thread.join(None if self._are_files else 2 * _PATIENCE_S - silent)
            self._is_lost = self._thread.is_alive()
            self._thread = None
            if self._is_lost:
                self._leave_behind()
            else:
                self._deadline = None
        if self._num_left_out:
            logger.warning(
                "%s: %d rows were left out, since writing was slower than the training.",
                self._name(),
                self._num_left_out,
            )
            self._num_left_out = 0

    # Inside.

    def _leave_out_one(self) -> None:
        self._num_left_out += 1
        self._num_done += 1
        del self._queue[next((place for place, row in enumerate(self._queue) if not row.must_stay), 0)]

    def _leave_behind(self) -> None:
        with self._changed:
            self._num_left_out += len(self._queue)
            self._queue.clear()
        logger.warning("%s: does not come back from a write or its end, and is left behind.", self._name())

    def _take(self) -> list[_Row]:
        if self._deadline is not None and time.monotonic() > self._deadline and not self._are_files:
            while any(not row.must_stay for row in self._queue):
                self._leave_out_one()
        count = len(self._queue) if self._are_files else min(1, len(self._queue))
        return [self._queue.popleft() for _ in range(count)]

    # What its thread calls.

    def _begin(self) -> None:
        # A daemon: a writer that never comes back must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="trainwright-write", daemon=True)
        if self._are_files:
            _file_lanes.add(self)
        self._thread.start()

    def _work(self) -> None:
        try:
            while self._write_next():
                pass
            self._close()
        finally:
            storages_of_threads.pop(threading.get_ident(), None)

    def _write_next(self) -> bool:
        """Wait for rows and write them; False when the end was asked for and none is left."""
        with self._changed:
            while not (self._queue or self._deadline is not None or self._sync_goal > self._num_synced):
                self._changed.wait()
            rows = self._take()
            is_over = self._deadline is not None and not rows
            syncs = is_over or self._sync_goal > self._num_synced
        if rows:
            storages_of_threads[threading.get_ident()] = rows[0].view
        for writer in self._writers:
            try:
                self._write(writer, rows)
                if syncs and isinstance(writer, FileWriter):
                    writer.sync()
            except BaseException as error:  # whatever it is, the training hears of it
                self._failure = self._failure or error
        with self._changed:
            self._num_done += len(rows)
            if syncs:
                self._num_synced = self._num_done
            self._changed.notify_all()
        return not is_over

    def _write(self, writer: EventWriter, rows: list[_Row]) -> None:
        for row in rows:
            row.view.show(row.snapshot)
            if self._are_files and isinstance(writer, FileWriter):
                writer.gather(row.view)
            else:
                writer.write()
        if self._are_files and isinstance(writer, FileWriter):
            writer.flush()

    def _close(self) -> None:
        for writer in self._writers:
            try:
                writer.close()
            except BaseException as error:
                self._failure = self._failure or error

    def _name(self) -> str:
        return ", ".join(type(writer).__name__ for writer in self._writers)

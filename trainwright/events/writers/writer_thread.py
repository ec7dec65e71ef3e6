"""Writers run in background threads with bounded queues of rows, so that training does not wait for them."""

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.config.errors import ConfigTypeError
from trainwright.events.storage import EventStorage, Snapshot, StorageView, storages_of_threads, take_snapshot
from trainwright.events.writers.base import EventWriter, FileWriter, is_file_writer, unwrapped

logger = logging.getLogger("trainwright.events")

_MAX_QUEUED_ROWS = 100  # of one writer
_MAX_QUEUED_FILE_ROWS = 5000  # written as one block when the disk is ready, so they queue up only if it hangs
_QUIET_WAIT_S = 1.0  # at the end of a run: longer waits are logged
_CLOSE_TIMEOUT_S = 20.0  # at the end of a run: for the queued rows, and again for a writer that does not return

_file_threads: weakref.WeakSet["WriterThread"] = weakref.WeakSet()
_file_threads_lock = threading.Lock()  # a save in the background reads the set while a run may add to it


@atexit.register
def sync_files() -> None:
    """Wait until every queued row of a file is on disk.

    A checkpoint records which rows are written, so these rows must be on disk before the checkpoint is committed.
    """
    with _file_threads_lock:
        threads = list(_file_threads)
    for thread in threads:
        thread.sync()


def _forget_in_child() -> None:
    """A forked process has no writer threads; the parent process writes the rows."""
    global _file_threads_lock
    _file_threads_lock = threading.Lock()  # a thread of the parent process may hold it, and would never release it here
    _file_threads.clear()
    storages_of_threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True, slots=True)
class _Row:
    view: StorageView
    snapshot: Snapshot
    keep: bool  # rows without it are dropped first


class WriterThread:
    """Calls writers in one thread, which starts with the first row and ends after ``finish``.

    File writers share a thread, because they write rows in blocks; every other writer has its own, so that it delays
    no other. If the queue is full, the oldest row is dropped, with a warning. Each row holds the newest values of all
    metrics, so only intermediate values are lost.
    """

    def __init__(self, writers: Sequence[EventWriter], *, are_files: bool = False) -> None:
        self._writers = list(writers)
        self._are_files = are_files
        self._capacity = _MAX_QUEUED_FILE_ROWS if are_files else _MAX_QUEUED_ROWS
        self._changed = threading.Condition()
        self._queue: deque[_Row] = deque()
        self._num_dropped = 0
        self._syncs: list[threading.Event] = []  # requests, set when the rows before them are on disk
        self._deadline: float | None = None  # set by ``finish``
        self._thread: threading.Thread | None = None
        self._is_abandoned = False  # its thread did not end in time
        self._failure: BaseException | None = None
        self._view: StorageView | None = None
        self._shown: weakref.ref[EventStorage] | None = None  # by the view

    def __repr__(self) -> str:
        return f"WriterThread({self._writers!r}, are_files={self._are_files})"

    # Called by the training thread. Only sync() and join() wait for a writer.

    def put(self, storage: EventStorage, snapshot: Snapshot, *, keep: bool) -> None:
        if self._view is None or self._shown is None or self._shown() is not storage:
            self._shown, self._view = weakref.ref(storage), StorageView(storage)
        if self._is_abandoned:
            self._num_dropped += 1
            return
        with self._changed:
            is_full = len(self._queue) >= self._capacity
            if is_full:
                self._drop_one()
            self._queue.append(_Row(self._view, snapshot, keep))
            self._changed.notify_all()
        if is_full and self._num_dropped == 1:
            logger.warning(
                "%s: slower than the training, which does not wait. The queue is full (%d rows): from now on the"
                " oldest row is dropped.",
                self._name(),
                self._capacity,
            )
        if self._thread is None:
            # A daemon thread: a writer that never returns must not block the end of the process.
            self._thread = threading.Thread(target=self._work, name="trainwright-write", daemon=True)
            if self._are_files:
                with _file_threads_lock:
                    _file_threads.add(self)
            self._thread.start()

    def sync(self) -> None:
        """Wait until the queued rows are on disk or have failed."""
        if self._thread is None or threading.current_thread() is self._thread:
            return
        thread, done = self._thread, threading.Event()
        with self._changed:
            self._syncs.append(done)
            self._changed.notify_all()
        while thread.is_alive() and not done.wait(1.0):
            pass

    def raise_failure(self) -> None:
        """Raise the first error of a writer, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Request the end: the thread writes the queued rows and closes the writers. ``join`` waits for it."""
        if self._thread is not None:
            with self._changed:
                self._deadline = time.monotonic() + _CLOSE_TIMEOUT_S
                self._changed.notify_all()
        elif not self._is_abandoned:
            self._close()

    def join(self) -> None:
        """Wait for the end. A writer that does not return is abandoned, unless it writes a file."""
        if self._thread is not None:
            silent = _QUIET_WAIT_S if self._are_files else min(_QUIET_WAIT_S, _CLOSE_TIMEOUT_S)
            self._thread.join(silent)
            if self._thread.is_alive():
                at_most = "" if self._are_files else f", at most {_CLOSE_TIMEOUT_S:.0f} s"
                logger.info("Waiting for %s: %d rows in the queue%s.", self._name(), len(self._queue), at_most)
                self._thread.join(None if self._are_files else 2 * _CLOSE_TIMEOUT_S - silent)
            self._is_abandoned = self._thread.is_alive()
            self._thread = None
            if self._is_abandoned:
                with self._changed:
                    num_lost = len(self._queue)
                    self._queue.clear()
                after = {getattr(unwrapped(writer), "after_loss", "") for writer in self._writers} - {""}
                logger.warning(
                    "%s: write() or close() does not return; the run ends without waiting for it. %d rows are not"
                    " written.%s", self._name(), num_lost, "".join(f" {text}" for text in after),
                )  # fmt: skip
            else:
                self._deadline = None
        if self._num_dropped:
            logger.warning(
                "%s: %d rows were dropped, because writing was slower than the training.",
                self._name(),
                self._num_dropped,
            )
            self._num_dropped = 0

    def _drop_one(self) -> None:
        self._num_dropped += 1
        del self._queue[next((place for place, row in enumerate(self._queue) if not row.keep), 0)]

    # Called by the writer thread.

    def _work(self) -> None:
        try:
            while self._write_next():
                pass
            self._close()
        finally:
            storages_of_threads.pop(threading.get_ident(), None)

    def _write_next(self) -> bool:
        """Wait for rows and write them; return False when the end is requested and the queue is empty."""
        with self._changed:
            while not (self._queue or self._deadline is not None or self._syncs):
                self._changed.wait()
            if self._deadline is not None and time.monotonic() > self._deadline and not self._are_files:
                while any(not row.keep for row in self._queue):
                    self._drop_one()
            count = len(self._queue) if self._are_files else min(1, len(self._queue))
            rows = [self._queue.popleft() for _ in range(count)]
            is_over = self._deadline is not None and not rows
            syncs, self._syncs = self._syncs, []
        if rows:
            storages_of_threads[threading.get_ident()] = rows[0].view
        for writer in self._writers:
            try:
                self._write(writer, rows)
                if self._are_files and isinstance(writer, FileWriter) and (syncs or is_over):
                    writer.sync()
            except BaseException as error:  # any error is raised in the training thread
                self._failure = self._failure or error
        for done in syncs:
            done.set()
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
        return ", ".join(type(unwrapped(writer)).__name__ for writer in self._writers)


class WriterDispatcher:
    """Calls writers: file writers share one thread, others have one thread each, terminal writers run synchronously."""

    def __init__(self, writers: Sequence[EventWriter]) -> None:
        for writer in writers:
            if not isinstance(writer, EventWriter):
                got = f"{writer!r:.80} ({type(writer).__name__})"
                raise ConfigTypeError(f"PeriodicWriter.writers: got {got}; a writer must be an EventWriter object.")
        background = [writer for writer in writers if getattr(writer, "in_background", True)]
        files = [writer for writer in background if is_file_writer(writer)]
        self._synchronous = [writer for writer in writers if not getattr(writer, "in_background", True)]
        self._file_threads = [WriterThread(files, are_files=True)] if files else []
        other_threads = [WriterThread([writer]) for writer in background if not is_file_writer(writer)]
        self._threads = [*self._file_threads, *other_threads]
        self._held: Snapshot | None = None  # for the file writers

    def begin(self, storage: EventStorage) -> None:
        """Call ``begin`` of the synchronous writers, before the first step."""
        for writer in self._synchronous:
            writer.begin(storage)

    def write(self, storage: EventStorage, *, keep: bool = False) -> None:
        """Write the current values of ``storage``, or queue them for the writer threads.

        ``keep``: if a queue is full, drop rows without ``keep`` before this one.
        """
        for writer in self._synchronous:
            writer.write()
        held, self._held = self._held, None
        if held is not None and storage.histories():
            for thread in self._file_threads:
                thread.put(storage, held, keep=True)
        if self._threads:
            snapshot = take_snapshot(storage)
            for thread in self._threads:
                thread.put(storage, snapshot, keep=keep)
        self._raise_failure()

    def hold_for_files(self, storage: EventStorage) -> None:
        """Let file writers write the current values of ``storage`` before the next ``write``; they skip known rows.

        Nothing is written now: a run that fails in its first step does not change its files.
        """
        self._held = take_snapshot(storage)

    def close(self) -> None:
        for thread in self._threads:
            thread.finish()
        try:
            for writer in self._synchronous:
                writer.close()
        finally:
            for thread in self._threads:
                thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        for thread in self._threads:
            thread.raise_failure()

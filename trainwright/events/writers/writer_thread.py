"""Writers run in background threads with bounded queues of rows, so that training does not wait for them."""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainwright.base.errors import ConfigTypeError
from trainwright.base.signatures import read_signature, shown_arguments
from trainwright.events.storage import EventStorage, Snapshot, StorageView, storages_of_threads, take_snapshot
from trainwright.events.writers.base import EventWriter, is_file_writer, unwrapped

logger = logging.getLogger("trainwright.events")

_MAX_QUEUED_ROWS = 100
_QUIET_WAIT_S = 1.0  # at the end of a run: longer waits are logged
_CLOSE_TIMEOUT_S = 20.0  # at the end of a run: for the queued rows, and again for a writer that does not return

if hasattr(os, "register_at_fork"):  # a forked process has no writer threads
    os.register_at_fork(after_in_child=storages_of_threads.clear)


@dataclass(frozen=True, slots=True)
class _Row:
    snapshot: Snapshot
    view: StorageView
    keep: bool  # rows without it are dropped first


class WriterThread:
    """Calls a writer in a thread, which starts with the first row and ends after ``finish``.

    If the queue is full, the oldest row is dropped, with a warning. Each row holds the newest values of all metrics, so
    only intermediate values are lost.
    """

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self._name = type(unwrapped(writer)).__name__
        self._changed = threading.Condition()
        self._queue: deque[_Row] = deque()
        self._num_dropped = 0
        self._deadline: float | None = None  # set by ``finish``
        self._thread: threading.Thread | None = None
        self._is_abandoned = False  # its thread did not end in time
        self._failure: BaseException | None = None
        self._view = _View()

    def __repr__(self) -> str:
        return f"WriterThread({self._writer!r})"

    # Called by the training thread. Only join() waits for the writer.

    def put(self, storage: EventStorage, snapshot: Snapshot, *, keep: bool) -> None:
        if self._is_abandoned:
            self._num_dropped += 1
            return
        with self._changed:
            is_full = len(self._queue) >= _MAX_QUEUED_ROWS
            if is_full:
                self._drop_one()
            self._queue.append(_Row(snapshot, self._view.of(storage), keep))
            self._changed.notify_all()
        if is_full and self._num_dropped == 1:
            logger.warning(
                "%s: slower than the training, which does not wait. The queue is full (%d rows): from now on the"
                " oldest row is dropped.",
                self._name,
                _MAX_QUEUED_ROWS,
            )
        if self._thread is None:
            # A daemon thread: a writer that never returns must not block the end of the process.
            self._thread = threading.Thread(target=self._work, name="trainwright-write", daemon=True)
            self._thread.start()

    def take_failure(self) -> BaseException | None:
        """The first error of the writer, once."""
        failure, self._failure = self._failure, None
        return failure

    def finish(self) -> None:
        """Request the end: the thread writes the queued rows and closes the writer. ``join`` waits for it."""
        if self._thread is not None:
            with self._changed:
                self._deadline = time.monotonic() + _CLOSE_TIMEOUT_S
                self._changed.notify_all()
        elif not self._is_abandoned:
            self._close()

    def join(self) -> None:
        """Wait for the end. A writer that does not return is abandoned."""
        if self._thread is not None:
            silent = min(_QUIET_WAIT_S, _CLOSE_TIMEOUT_S)
            self._thread.join(silent)
            if self._thread.is_alive():
                text = "Waiting for %s: %d rows in the queue, at most %.0f s."
                logger.info(text, self._name, len(self._queue), _CLOSE_TIMEOUT_S)
                self._thread.join(2 * _CLOSE_TIMEOUT_S - silent)
            self._is_abandoned = self._thread.is_alive()
            self._thread = None
            if not self._is_abandoned:
                self._deadline = None
            else:
                with self._changed:
                    num_lost = len(self._queue)
                    self._queue.clear()
                after = getattr(unwrapped(self._writer), "after_loss", "")
                logger.warning(
                    "%s: write() or close() does not return; the run ends without waiting for it. %d rows are not"
                    " written.%s", self._name, num_lost, after and f" {after}",
                )  # fmt: skip
        if self._num_dropped:
            text = "%s: %d rows were dropped, because writing was slower than the training."
            logger.warning(text, self._name, self._num_dropped)
            self._num_dropped = 0

    def _drop_one(self) -> None:
        self._num_dropped += 1
        del self._queue[next((place for place, row in enumerate(self._queue) if not row.keep), 0)]

    # Called by the writer thread.

    def _work(self) -> None:
        while (row := self._next()) is not None:
            row.view.show(row.snapshot)
            storages_of_threads[threading.get_ident()] = row.view
            try:
                self._writer.write()
            except BaseException as error:  # any error is raised in the training thread
                self._failure = self._failure or error
        self._close()
        storages_of_threads.pop(threading.get_ident(), None)

    def _next(self) -> _Row | None:
        """The next row; None when the end is requested and the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._deadline is not None)
            if self._deadline is not None and time.monotonic() > self._deadline:
                while any(not row.keep for row in self._queue):
                    self._drop_one()
            return self._queue.popleft() if self._queue else None

    def _close(self) -> None:
        try:
            self._writer.close()
        except BaseException as error:
            self._failure = self._failure or error


class _View:
    """The same read-only storage for each row of a run."""

    def __init__(self) -> None:
        self._shown: weakref.ref[EventStorage] | None = None
        self._view: StorageView | None = None

    def of(self, storage: EventStorage) -> StorageView:
        if self._view is None or self._shown is None or self._shown() is not storage:
            self._shown, self._view = weakref.ref(storage), StorageView(storage)
        return self._view


class WriterDispatcher:
    """Calls writers: those of files and terminals in this thread, each of the others in a thread of its own."""

    def __init__(self, writers: Sequence[EventWriter]) -> None:
        for writer in writers:
            if isinstance(writer, EventWriter) and getattr(writer.write, "__func__", None) is EventWriter.write:
                raise ConfigTypeError(f"{type(writer).__name__} has no write: write def write(self, storage=None).")
            if not isinstance(writer, EventWriter):
                got = f"{writer!r:.80} ({type(writer).__name__})"
                call = f": {writer.__name__}(...)" if isinstance(writer, type) else ""
                raise ConfigTypeError(
                    f"PeriodicWriter.writers: got {got}; a writer must be an EventWriter object{call}."
                )
            _check_write(writer)
        self._synchronous = [writer for writer in writers if not getattr(writer, "in_background", True)]
        background = [writer for writer in writers if getattr(writer, "in_background", True)]
        self._files = [writer for writer in background if is_file_writer(writer)]
        self._threads = [WriterThread(writer) for writer in background if not is_file_writer(writer)]
        self._view = _View()  # for the file writers
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
        if not (self._files or self._threads):
            return
        held, self._held = self._held, None
        snapshot = take_snapshot(storage)
        for thread in self._threads:
            thread.put(storage, snapshot, keep=keep)
        failures = [thread.take_failure() for thread in self._threads]
        view = self._view.of(storage)
        for each in ([held] if held is not None and storage.histories() else []) + [snapshot]:
            view.show(each)
            for writer in self._files:
                try:
                    writer.write(view)
                except BaseException as error:  # after the others have written
                    failures.append(error)
        _raise_first(failures)

    def hold_for_files(self, storage: EventStorage) -> None:
        """Let file writers write the current values of ``storage`` before the next ``write``; they skip known rows.

        Nothing is written now: a run that fails in its first step does not change its files.
        """
        self._held = take_snapshot(storage)

    def close(self) -> None:
        failures: list[BaseException | None] = []
        for thread in self._threads:
            thread.finish()
        try:
            for writer in (*self._synchronous, *self._files):
                try:
                    writer.close()
                except BaseException as error:
                    failures.append(error)
        finally:
            for thread in self._threads:
                thread.join()
        _raise_first([*failures, *(thread.take_failure() for thread in self._threads)])


def _check_write(writer: EventWriter) -> None:
    """Raise ConfigTypeError if ``write`` does not take the call, which is without arguments."""
    try:
        with suppress(ValueError):  # it has no signature
            read_signature(writer.write, follow_wrapped=False).bind()
    except TypeError:
        raise ConfigTypeError(
            f"{type(writer).__name__}.write is called without arguments: it takes {shown_arguments(writer.write)}."
            " Write def write(self, storage=None), and in it storage = storage or get_event_storage()."
        ) from None


def _raise_first(failures: Sequence[BaseException | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure

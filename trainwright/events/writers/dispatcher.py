"""Dispatches metrics to the writers without waiting for them."""

from collections.abc import Sequence

from trainwright.config.errors import ConfigTypeError
from trainwright.events.snapshot import Snapshot, take_snapshot
from trainwright.events.storage import EventStorage
from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.fault_tolerant import is_file_writer
from trainwright.events.writers.writer_thread import WriterThread


class WriterDispatcher:
    """Calls writers: file writers share one thread, others have one thread each, terminal writers run synchronously."""

    def __init__(self, writers: Sequence[EventWriter]) -> None:
        for writer in writers:
            if not isinstance(writer, EventWriter):
                got = f"{writer!r:.80} ({type(writer).__name__})"
                raise ConfigTypeError(f"PeriodicWriter.writers: got {got}; a writer must be an EventWriter object.")
        self._synchronous = [writer for writer in writers if not _is_in_background(writer)]
        files = [writer for writer in writers if _is_in_background(writer) and is_file_writer(writer)]
        others = [writer for writer in writers if _is_in_background(writer) and not is_file_writer(writer)]
        self._threads = [WriterThread(files, are_files=True)] if files else []
        self._num_file_threads = len(self._threads)
        self._held: Snapshot | None = None
        self._threads += [WriterThread([writer]) for writer in others]

    def begin(self, storage: EventStorage) -> None:
        """Call ``begin`` of the synchronous writers, before the first step."""
        for writer in self._synchronous:
            writer.begin(storage)

    def write(self, storage: EventStorage, *, keep: bool = False) -> None:
        """Write the current values of ``storage``, or queue them for the writer threads.

        ``keep``: if a queue is full, drop rows without ``keep`` before this one.

        Raises:
            Exception: the first error of a writer, now or in the background since the last call.
        """
        for writer in self._synchronous:
            writer.write()
        held, self._held = self._held, None
        if held is not None and storage.histories():
            for thread in self._threads[: self._num_file_threads]:
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
        """Wait until all rows are written, and close the writers.

        Raises:
            Exception: the first error of a writer since the last call.
        """
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


def _is_in_background(writer: EventWriter) -> bool:
    return getattr(writer, "in_background", True)

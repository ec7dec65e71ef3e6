"""What is put comes to the writers, and the training waits for none of them."""

from collections.abc import Sequence

from trainwright.config.errors import ConfigTypeError
from trainwright.events.snapshot import Snapshot, take_snapshot
from trainwright.events.storage import EventStorage
from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.fault_tolerant import is_file_writer
from trainwright.events.writers.writer_thread import Lane


class Delivery:
    """Calls writers: files in one thread, each other writer in one of its own, those of a terminal here and now."""

    def __init__(self, writers: Sequence[EventWriter]) -> None:
        for writer in writers:
            if not isinstance(writer, EventWriter):
                got = f"{writer!r:.80} ({type(writer).__name__})"
                raise ConfigTypeError(f"PeriodicWriter.writers: got {got}; a writer must be an EventWriter object.")
        self._here = [writer for writer in writers if not _is_beside(writer)]
        files = [writer for writer in writers if _is_beside(writer) and is_file_writer(writer)]
        others = [writer for writer in writers if _is_beside(writer) and not is_file_writer(writer)]
        self._lanes = [Lane(files, are_files=True)] if files else []
        self._num_of_files = len(self._lanes)
        self._held: Snapshot | None = None
        self._lanes += [Lane([writer]) for writer in others]

    def begin(self, storage: EventStorage) -> None:
        """Before the first step: writers of a terminal may show that there is a run."""
        for writer in self._here:
            writer.begin(storage)

    def write(self, storage: EventStorage, *, must_stay: bool = False) -> None:
        """Have written what ``storage``, the current one, tells now.

        ``must_stay``: where rows must be left out, not this one before others.

        Raises:
            Exception: what a writer has raised, now or beside the training since the last call.
        """
        for writer in self._here:
            writer.write()
        held, self._held = self._held, None
        if held is not None and storage.histories():
            for lane in self._lanes[: self._num_of_files]:
                lane.put(storage, held, must_stay=True)
        if self._lanes:
            snapshot = take_snapshot(storage)
            for lane in self._lanes:
                lane.put(storage, snapshot, must_stay=must_stay)
        self._raise_failure()

    def hold_for_files(self, storage: EventStorage) -> None:
        """Write what ``storage`` tells now before the next ``write``, into files alone: they know which rows they have.

        Not at once: a run that fails in its first step leaves files as they are.
        """
        self._held = take_snapshot(storage)

    def close(self) -> None:
        """Wait until all is written, and close the writers.

        Raises:
            Exception: as above.
        """
        for lane in self._lanes:
            lane.finish()
        try:
            for writer in self._here:
                writer.close()
        finally:
            for lane in self._lanes:
                lane.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        for lane in self._lanes:
            lane.raise_failure()


def _is_beside(writer: EventWriter) -> bool:
    return getattr(writer, "in_background", True)

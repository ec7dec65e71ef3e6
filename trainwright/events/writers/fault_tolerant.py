"""A wrapper that disables a writer after an error, so that the run continues."""

import logging
from collections.abc import Callable

from trainwright.events.storage import EventStorage
from trainwright.events.writers.base import EventWriter, FileWriter

logger = logging.getLogger("trainwright.events")


class SafeWriter(FileWriter):
    """Wrap another writer: if it raises, log the error once and disable it; the run continues."""

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self.in_background = getattr(writer, "in_background", True)
        self._is_on = True

    def __repr__(self) -> str:
        return f"SafeWriter({self._writer!r})"

    def write(self, storage: EventStorage | None = None) -> None:
        if storage is None:
            self._try(self._writer.write)
        else:
            self._try(lambda: self._writer.write(storage))

    def close(self) -> None:
        try:
            self._writer.close()
        except Exception:
            if self._is_on:
                self._switch_off()

    @property
    def is_of_file(self) -> bool:
        """Whether the wrapped writer can be called as a file writer."""
        return is_file_writer(self._writer)

    def gather(self, storage: EventStorage) -> None:
        writer = self._writer
        if isinstance(writer, FileWriter):
            self._try(lambda: writer.gather(storage))

    def flush(self) -> None:
        if isinstance(self._writer, FileWriter):
            self._try(self._writer.flush)

    def sync(self) -> None:
        if isinstance(self._writer, FileWriter):
            self._try(self._writer.sync)

    def _try(self, call: Callable[[], None]) -> None:
        if not self._is_on:
            return
        try:
            call()
        except Exception:  # any error of a tracker or a disk: it is logged, and the run does not depend on it
            self._switch_off()

    def _switch_off(self) -> None:
        self._is_on = False
        logger.exception("%r failed and is disabled for the rest of the run; training continues.", self._writer)


def is_file_writer(writer: EventWriter) -> bool:
    """Whether a writer only writes rows into a file: False for a subclass that overrides ``write``."""
    if isinstance(writer, SafeWriter):
        return writer.is_of_file
    return isinstance(writer, FileWriter) and type(writer).write is FileWriter.write

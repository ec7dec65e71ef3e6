"""A writer's failure need not end a run."""

import logging
from collections.abc import Callable

from trainwright.events.storage import EventStorage
from trainwright.events.writers.base import EventWriter, FileWriter

logger = logging.getLogger("trainwright.events")


class SafeWriter(FileWriter):
    """Around another writer: when that one raises, say so once and switch it off; the run goes on."""

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
        """Whether it can be called as the writer of a file."""
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
        except Exception:  # whatever a tracker or a disk may do: the log has it, the run does not need it
            self._switch_off()

    def _switch_off(self) -> None:
        self._is_on = False
        logger.exception("%r failed and is switched off for the rest of the run; training goes on.", self._writer)


def is_file_writer(writer: EventWriter) -> bool:
    """Whether all that a writer does is to write rows into a file: so not where a subclass adds to ``write``."""
    if isinstance(writer, SafeWriter):
        return writer.is_of_file
    return isinstance(writer, FileWriter) and type(writer).write is FileWriter.write

"""The interfaces of a writer, which reads new metrics from the storage, and a wrapper that disables one that fails."""

import logging
import sys
from typing import Any

from trainwright.events.storage import EventStorage, get_event_storage

logger = logging.getLogger("trainwright.events")


class EventWriter:
    """Base of all writers.

    ``write`` is called periodically, not at every iteration, and writes the metrics that are new since its last call.
    ``close`` is called once at the end of a run; a later ``write`` may open the target again.

    During training both are called in a background thread of the writer, so a slow writer does not slow the training.
    There the current storage is a read-only view of the run's storage at the iteration to write, the same object at
    every call. A writer that is slower than the training is called less often. Writers of local files are called in
    the training thread, with such a view, as an append takes less time than a switch of threads.

    Attributes:
        in_background: False for a class that must run in the training thread, which then waits for it: because it puts
            metrics, reads the model, or uses objects that are bound to the thread that created them.
        may_fail: True for a class whose failure does not end the training, as of a service: it is logged once, and the
            writer is disabled.
    """

    in_background: bool = True
    may_fail: bool = False

    def begin(self, storage: EventStorage) -> None:
        """Called before the first step with the run's storage, only if ``in_background`` is False."""

    def write(self, storage: EventStorage | None = None) -> None:
        """Write the new metrics of ``storage``, by default the current storage."""
        raise NotImplementedError(f"{type(self).__name__} must define write(self, storage=None).")

    def close(self) -> None:
        """Close files and connections. A second call does nothing."""


class FileWriter(EventWriter):
    """A writer that appends to a local file, in the training thread."""

    def write(self, storage: EventStorage | None = None) -> None:
        self.append(get_event_storage() if storage is None else storage)

    def append(self, storage: EventStorage) -> None:
        """Pass the new metrics of ``storage`` to the operating system: they survive the end of this process."""
        raise NotImplementedError(f"{type(self).__name__} must define append(self, storage).")


class SafeWriter(EventWriter):
    """Wrap another writer: if it raises, log the error once and disable it; the run continues."""

    def __init__(self, writer: EventWriter) -> None:
        self.writer: Any = writer
        self.in_background = getattr(writer, "in_background", True)
        self._is_on = True

    def __repr__(self) -> str:
        return f"SafeWriter({self.writer!r})"

    def write(self, storage: EventStorage | None = None) -> None:
        try:
            if self._is_on:
                self.writer.write(*() if storage is None else (storage,))
        except Exception:  # any error of a tracker or a disk: it is logged, and the run does not depend on it
            self._disable()

    def close(self) -> None:
        try:
            self.writer.close()
        except Exception:
            self._disable()

    def _disable(self) -> None:
        """Call it in the ``except`` block of the error."""
        if self._is_on:
            error = sys.exception()
            text = "%r failed and is disabled for the rest of the run; training continues. (%s)"
            logger.error(text, self.writer, error, exc_info=not isinstance(error, OSError))  # such as a full disk
        self._is_on = False


def guarded(writer: EventWriter) -> EventWriter:
    """The writer, in a :class:`SafeWriter` if it may fail."""
    is_safe = isinstance(writer, SafeWriter) or not getattr(writer, "may_fail", False)
    return writer if is_safe else SafeWriter(writer)


def unwrapped(writer: EventWriter) -> Any:
    return writer.writer if isinstance(writer, SafeWriter) else writer


def is_file_writer(writer: EventWriter) -> bool:
    """Whether a writer only writes rows into a file: False for a subclass that overrides ``write``."""
    inner = unwrapped(writer)
    return isinstance(inner, FileWriter) and type(inner).write is FileWriter.write

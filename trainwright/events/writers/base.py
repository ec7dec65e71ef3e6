"""The interface of a writer, which reads new metrics from the storage and writes them to its target."""

from trainwright.events.storage import EventStorage, get_event_storage


class EventWriter:
    """Base of all writers.

    ``write`` is called periodically, not at every iteration, and writes the metrics that are new since its last call.
    ``close`` is called once at the end of a run; a later ``write`` may open the target again.

    During training both are called in a background thread of the writer, so a slow writer does not slow the training.
    There the current storage is a read-only view of the run's storage at the iteration to write, the same object at
    every call. A writer that is slower than the training is called less often.

    Attributes:
        in_background: False for a class that must run in the training thread, which then waits for it: because it puts
            metrics, reads the model, or uses objects that are bound to the thread that created them.
    """

    in_background: bool = True

    def begin(self, storage: EventStorage) -> None:
        """Called before the first step with the run's storage, only if ``in_background`` is False."""

    def write(self, storage: EventStorage | None = None) -> None:
        """Write the new metrics of ``storage``, by default the current storage."""
        raise NotImplementedError(f"{type(self).__name__} must define write(self, storage=None).")

    def close(self) -> None:
        """Close files and connections. A second call does nothing."""


class FileWriter(EventWriter):
    """A writer whose target is a file: it gathers rows and writes them in blocks."""

    def write(self, storage: EventStorage | None = None) -> None:
        self.gather(get_event_storage() if storage is None else storage)
        self.flush()
        self.sync()

    def gather(self, storage: EventStorage) -> None:
        """Read the new metrics of ``storage``; ``flush`` writes them."""
        raise NotImplementedError(f"{type(self).__name__} must define gather(self, storage).")

    def flush(self) -> None:
        """Pass the gathered rows to the operating system: they survive the end of this process. May be retried."""
        raise NotImplementedError(f"{type(self).__name__} must define flush(self).")

    def sync(self) -> None:
        """Wait until the flushed rows are on disk: they survive a power failure."""

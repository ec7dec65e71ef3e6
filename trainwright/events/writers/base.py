"""What a writer is: it takes from the storage what is new and brings it somewhere."""

from trainwright.events.storage import EventStorage, get_event_storage


class EventWriter:
    """Base of all writers.

    ``write`` is called now and then, not at every iteration, and takes what is new since its last call; ``close`` once
    at the end of a run, after which a further ``write`` may open the target again.

    In a training both are called in a thread of the writer's own, so that a slow one does not slow the training. The
    current storage is there one to read: the run's, as it was at the iteration that is to be written, the same object
    at every call. A writer that is too slow for what is to be written is called less often.

    Attributes:
        in_background: False for a class that must be called by the training itself, which then waits for it: because it
            puts metrics, looks at the model, or holds what is tied to the thread that made it.
    """

    in_background: bool = True

    def begin(self, storage: EventStorage) -> None:
        """Called before the first step of a training, with its storage, of a writer that is not in the background."""

    def write(self, storage: EventStorage | None = None) -> None:
        """Write what is new in ``storage``, by default the current one."""
        raise NotImplementedError(f"{type(self).__name__} must define write(self, storage=None).")

    def close(self) -> None:
        """Let go of files. Called twice, it does nothing the second time."""


class FileWriter(EventWriter):
    """A writer of a file on a disk: its rows can be gathered, and put into the file many at a time."""

    def write(self, storage: EventStorage | None = None) -> None:
        self.gather(get_event_storage() if storage is None else storage)
        self.flush()
        self.sync()

    def gather(self, storage: EventStorage) -> None:
        """Take what is new, to be written by ``flush``."""
        raise NotImplementedError(f"{type(self).__name__} must define gather(self, storage).")

    def flush(self) -> None:
        """Give the system what was gathered: it is then safe from the end of this process. When it fails, it may be
        called again.
        """
        raise NotImplementedError(f"{type(self).__name__} must define flush(self).")

    def sync(self) -> None:
        """Return when what was flushed is on the disk: safe from the end of this machine's power."""

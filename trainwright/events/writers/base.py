"""What a writer is: it takes from the storage what is new and brings it somewhere."""

from trainwright.events.storage import EventStorage


class EventWriter:
    """Base of all writers.

    ``write`` is called now and then, not at every iteration, and takes what is new since its last call; ``close`` once
    at the end of a run, after which a further ``write`` may open the target again.
    """

    def write(self, storage: EventStorage | None = None) -> None:
        """Write what is new in ``storage``, by default the current one."""
        raise NotImplementedError(f"{type(self).__name__} must define write(self, storage=None).")

    def close(self) -> None:
        """Let go of files. Called twice, it does nothing the second time."""

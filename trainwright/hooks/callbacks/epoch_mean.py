"""The mean of a metric over the epoch so far, computed when somebody reads it."""

from typing import Any

from trainwright.events.storage import EventStorage


class EpochMean:
    """The mean of what was put under ``name`` since ``begin``; every value is added once, however often it is read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._next = 0  # the first iteration whose values are not in the total
        self._total = 0.0
        self._count = 0

    def begin(self, iteration: int) -> None:
        """An epoch begins, and ``iteration`` is its first."""
        self._next, self._total, self._count = iteration, 0.0, 0

    def read(self, storage: EventStorage) -> float:
        """NaN before the first value of the epoch."""
        history = storage.histories().get(self.name)
        for value, iteration in history.values_since(self._next) if history else ():
            self._total += value
            self._count += 1
            self._next = iteration + 1
        return self._total / self._count if self._count else float("nan")

    def read_with(self, storage: EventStorage, value: float) -> float:
        """The mean with one more value, which has not been put yet."""
        self.read(storage)
        return (self._total + value) / (self._count + 1)

    def state_dict(self, storage: EventStorage) -> dict[str, Any]:
        """All that was put so far is in it: the storage's own state holds recent values only."""
        self.read(storage)
        return {"next": self._next, "total": self._total, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._total, self._count = state["next"], state["total"], state["count"]

"""The values of one metric over a run, and the averages that writers and hooks show."""

import math
import statistics
from array import array
from typing import Any, NoReturn

from trainwright.base.errors import ConfigError


class HistoryBuffer:
    """The last ``max_length`` values of one metric with the iteration of each, and the mean of all values ever."""

    def __init__(self, max_length: int = 1_000_000) -> None:
        if max_length < 1:
            raise ConfigError(f"HistoryBuffer.max_length: got {max_length}; it must be a whole number >= 1.")
        self.max_length = max_length
        # 16 bytes per value; a list of tuples takes over 100, which matters in runs of a million iterations.
        self._values = array("d")
        self._iterations = array("q")
        self._count = 0  # of all values ever added, including dropped ones
        self._total = 0.0

    def __repr__(self) -> str:
        return f"HistoryBuffer(max_length={self.max_length})"

    def __len__(self) -> int:
        return min(self._end(), self.max_length)

    def update(self, value: float, iteration: int | None = None) -> None:
        """Add a value. Without an iteration the values are numbered 0, 1, 2, …"""
        self._iterations.append(self._count if iteration is None else iteration)
        self._values.append(value)
        self._count += 1
        self._total += value
        if len(self._values) >= 2 * self.max_length:
            self._cut()

    def extend(self, values: list[float], iterations: list[int]) -> None:
        """Call ``update`` for each value, in a tenth of the time."""
        self._iterations.fromlist(iterations)  # first: another thread may read the values that have an iteration
        self._values.fromlist(values)
        self._count += len(values)
        total = self._total
        for value in values:  # one by one: the rounding must not depend on how values are grouped into calls
            total += value
        self._total = total
        if len(self._values) >= 2 * self.max_length:
            self._cut()

    def replace_last(self, values: list[float], total_before: float) -> None:
        """Replace the newest values. ``total_before``: the total of all values before them."""
        # In place, and as many as before: read-only views share the arrays.
        self._values[len(self._values) - len(values) :] = array("d", values)
        self._total = total_before
        for value in values:
            self._total += value

    def frozen(self) -> "HistoryBuffer":
        """A read-only view of the values up to now, without later ones. It copies nothing, so its cost is constant."""
        return _FrozenHistory(self)

    @property
    def total(self) -> float:
        return self._total

    def latest(self) -> float:
        """The newest value."""
        self._require_values()
        return self._values[self._end() - 1]

    def latest_iteration(self) -> int:
        """The iteration of the newest value."""
        self._require_values()
        return self._iterations[self._end() - 1]

    def median(self, window_size: int) -> float:
        """Median of the last ``window_size`` values; NaN if any of them is NaN."""
        return median(self.last_values(window_size))

    def avg(self, window_size: int) -> float:
        """Mean of the last ``window_size`` values."""
        values = self.last_values(window_size)
        return sum(values) / len(values)

    def global_avg(self) -> float:
        """Mean of all values ever added, including values before a resume and values no longer kept."""
        self._require_values()
        return self._total / self._count

    def values(self) -> list[tuple[float, int]]:
        """``(value, iteration)`` of the kept values, oldest first."""
        return self.newest(len(self))

    def values_of_last_iterations(self, num_iterations: int) -> list[float]:
        """Values of the ``num_iterations`` iterations up to the newest value; each may have none or several values."""
        return self.last_values(self._count_from(self.latest_iteration() - num_iterations + 1))

    def values_since(self, iteration: int) -> list[tuple[float, int]]:
        """``(value, iteration)`` of the kept values of ``iteration`` and later ones, oldest first."""
        return self.newest(self._count_from(iteration))

    def state_dict(self, max_values: int) -> dict[str, Any]:
        """The last ``max_values`` values, and the count and total for the global mean: plain numbers."""
        end = self._end()
        start = max(0, end - min(max_values, self.max_length))
        values, iterations = self._values[start:end].tolist(), self._iterations[start:end].tolist()
        return {"values": values, "iterations": iterations, "count": self._count, "total": self._total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = array("d", state["values"])
        self._iterations = array("q", state["iterations"])
        self._count = state["count"]
        self._total = state["total"]

    def move_last(self, iteration: int, to: int) -> bool:
        """Move the newest value from ``iteration`` to the iteration ``to``; return whether there was such a value.

        It replaces a value already recorded for ``to``, for example by a run that stopped after an evaluation.
        """
        if not self._end() or self.latest_iteration() != iteration:
            return False
        self._iterations[-1] = to
        if self._end() > 1 and self._iterations[-2] == to:
            self._total -= self._values.pop()
            self._iterations.pop()
            self._count -= 1
        return True

    def _end(self) -> int:
        """How many values of the arrays belong to this history."""
        return len(self._values)

    def _cut(self) -> None:
        """Drop the oldest values. Rare, because each cut copies the remaining values."""
        # New arrays, because frozen histories share the current ones and refer to values by position.
        self._values = self._values[-self.max_length :]
        self._iterations = self._iterations[-self.max_length :]

    def _count_from(self, iteration: int) -> int:
        """How many values at the end belong to ``iteration`` or later ones."""
        end = first = self._end()
        while first > 0 and self._iterations[first - 1] >= iteration:
            first -= 1
        return end - first

    def last_values(self, num_values: int) -> list[float]:
        """The last ``num_values`` values, oldest first."""
        self._require_values()
        if num_values < 1:
            raise ConfigError(f"HistoryBuffer: got window_size={num_values}; it must be a whole number >= 1.")
        end = self._end()
        return self._values[max(0, end - min(num_values, self.max_length)) : end].tolist()

    def newest(self, num_values: int) -> list[tuple[float, int]]:
        """``(value, iteration)`` of the last ``num_values`` kept values, oldest first."""
        end = self._end()
        start = end - min(num_values, len(self))
        return list(zip(self._values[start:end], self._iterations[start:end], strict=True))

    def _require_values(self) -> None:
        if not self._end():
            raise ConfigError("HistoryBuffer: no value has been added yet; call update(value) before reading.")


class _FrozenHistory(HistoryBuffer):
    """A history at one moment. It shares the arrays, which only grow, and stores their length at that moment."""

    def __init__(self, history: HistoryBuffer) -> None:
        vars(self).update(vars(history))
        self._length = history._end()

    def _end(self) -> int:
        return self._length

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            "HistoryBuffer: this is a read-only copy for writers. Record values during training, with"
            " EventStorage.put_scalar."
        )

    update = extend = load_state_dict = _refuse


def median(values: list[float]) -> float:
    """The middle value, or the mean of the two middle ones; NaN if any value is NaN, as in numpy."""
    return math.nan if math.isnan(sum(values)) and any(map(math.isnan, values)) else statistics.median(values)

"""The values of one metric over a run, and the averages that writers and hooks show."""

import math
from array import array
from typing import TypedDict

from trainwright.config.errors import ConfigError


class HistoryState(TypedDict):
    """What a resumed run needs of one metric's past: plain numbers only."""

    values: list[float]
    iterations: list[int]
    count: int
    total: float


class HistoryBuffer:
    """The last ``max_length`` values of one metric with the iteration of each, and the mean of all values ever."""

    def __init__(self, max_length: int = 1_000_000) -> None:
        if max_length < 1:
            raise ConfigError(f"HistoryBuffer.max_length: got {max_length}; it must be a whole number >= 1.")
        self.max_length = max_length
        # 16 bytes a value; a list of tuples would take over 100, which shows in runs of a million iterations.
        self._values = array("d")
        self._iterations = array("q")
        self._count = 0  # of all values ever, also those no longer kept
        self._total = 0.0

    def __repr__(self) -> str:
        return f"HistoryBuffer(max_length={self.max_length})"

    def __len__(self) -> int:
        return min(len(self._values), self.max_length)

    def update(self, value: float, iteration: int | None = None) -> None:
        """Add a value. Without an iteration the values are numbered 0, 1, 2, …"""
        self._values.append(value)
        self._iterations.append(self._count if iteration is None else iteration)
        self._count += 1
        self._total += value
        if len(self._values) >= 2 * self.max_length:  # cut rarely: each cut moves all that stays
            del self._values[: -self.max_length]
            del self._iterations[: -self.max_length]

    def latest(self) -> float:
        """The newest value."""
        self._require_values()
        return self._values[-1]

    def latest_iteration(self) -> int:
        """The iteration of the newest value."""
        self._require_values()
        return self._iterations[-1]

    def median(self, window_size: int) -> float:
        """Median of the last ``window_size`` values; NaN if one of them is."""
        return median(self._last(window_size))

    def avg(self, window_size: int) -> float:
        """Mean of the last ``window_size`` values."""
        values = self._last(window_size)
        return sum(values) / len(values)

    def global_avg(self) -> float:
        """Mean of all values ever put, also of those before a resume and of those no longer kept."""
        self._require_values()
        return self._total / self._count

    def values(self) -> list[tuple[float, int]]:
        """``(value, iteration)`` of the values kept, oldest first."""
        return list(zip(self._values[-self.max_length :], self._iterations[-self.max_length :], strict=True))

    def values_of_last_iterations(self, num_iterations: int) -> list[float]:
        """Values of the last ``num_iterations`` iterations, up to the newest value's; each may hold none or several."""
        oldest = self.latest_iteration() - num_iterations
        count = 0
        for iteration in reversed(self._iterations):
            if iteration <= oldest:
                break
            count += 1
        return self._last(count)

    def values_since(self, iteration: int) -> list[tuple[float, int]]:
        """``(value, iteration)`` of the values kept that belong to ``iteration`` or a later one, oldest first."""
        first = len(self._values)
        while first > 0 and self._iterations[first - 1] >= iteration:
            first -= 1
        return list(zip(self._values[first:], self._iterations[first:], strict=True))

    def state_dict(self, max_values: int) -> HistoryState:
        """The last ``max_values`` values and what the global mean needs."""
        kept = min(max_values, self.max_length)
        return {
            "values": self._values[-kept:].tolist(),
            "iterations": self._iterations[-kept:].tolist(),
            "count": self._count,
            "total": self._total,
        }

    def load_state_dict(self, state: HistoryState) -> None:
        """Take over the past that ``state_dict`` returned, in place of the present values."""
        self._values = array("d", state["values"])
        self._iterations = array("q", state["iterations"])
        self._count = state["count"]
        self._total = state["total"]

    def _last(self, num_values: int) -> list[float]:
        self._require_values()
        if num_values < 1:
            raise ConfigError(f"HistoryBuffer: got a window of {num_values} values; it must be at least 1.")
        return self._values[-min(num_values, self.max_length) :].tolist()

    def _require_values(self) -> None:
        if not self._values:
            raise ConfigError("HistoryBuffer: it holds no value yet; call update(value) before reading.")


def median(values: list[float]) -> float:
    """The middle value, or the mean of the two middle ones; NaN if any value is NaN, as in numpy."""
    if any(map(math.isnan, values)):  # NaN has no place in an order: sorting it would give any of the values
        return math.nan
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

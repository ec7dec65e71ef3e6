"""The means of noisy metrics over an epoch, which its last row and its line show."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

from trainwright.events.smoothing import HistoryBuffer


class Epochs(Protocol):
    """Where epochs of different numbers of iterations are. All are counted from 0."""

    def at(self, iteration: int) -> int:
        """The epoch of an iteration."""

    def first(self, epoch: int) -> int:
        """The first iteration of an epoch."""


# The iterations of each epoch: a fraction, where epochs end within an iteration.
EpochLength = int | Fraction | Epochs


def epoch_around(epochs: EpochLength, iteration: int) -> tuple[int, int]:
    """The first iteration of the epoch of ``iteration``, and that of the next epoch. An epoch may end within one.

    >>> epoch_around(5, 4), epoch_around(5, 5), epoch_around(Fraction(5, 2), 2)
    ((0, 5), (5, 10), (0, 3))
    """
    epoch, first = epoch_at(epochs, iteration)
    return first, first_of_epoch(epochs, epoch + 1)


def epoch_at(epochs: EpochLength, iteration: int) -> tuple[int, int]:
    """The epoch of ``iteration``, from 0, and its first iteration.

    >>> epoch_at(5, 4), epoch_at(5, 5), epoch_at(Fraction(5, 2), 3)
    ((0, 0), (1, 5), (1, 3))
    """
    epoch = int(iteration // epochs) if isinstance(epochs, int | Fraction) else epochs.at(iteration)
    return epoch, first_of_epoch(epochs, epoch)


def first_of_epoch(epochs: EpochLength, epoch: int) -> int:
    """The first iteration of an epoch."""
    return math.ceil(epoch * epochs) if isinstance(epochs, int | Fraction) else epochs.first(epoch)


class RunningMean:
    """The mean of a metric's values from an iteration on.

    Each value is added once: a checkpoint holds only the newest ones of a history. ``is_finite``: NaN and infinity do
    not count.
    """

    def __init__(self, first: int = 0, *, is_finite: bool = False) -> None:
        self._is_finite = is_finite
        self.begin(first)

    def begin(self, first: int) -> None:
        """Start again, with the values of iteration ``first``."""
        self._next, self._total, self._count = first, 0.0, 0

    def add(self, history: HistoryBuffer, final: float) -> list[float]:
        """Add the values before the iteration ``final``; returns the later ones, which may change."""
        later = []
        for value, iteration in history.values_since(self._next):
            counts = not self._is_finite or math.isfinite(value)
            if iteration < final:
                self._next = iteration + 1
                self._total, self._count = self._total + (value if counts else 0.0), self._count + counts
            elif counts:
                later.append(value)
        return later

    def so_far(self, more: Sequence[float] = ()) -> float:
        """The mean of the values that were added and of ``more``; NaN if there is none."""
        count = self._count + len(more)
        return (self._total + sum(more)) / count if count else math.nan

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "total": self._total, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next, self._total, self._count = state["next"], state["total"], state["count"]


class EpochMeans:
    """The means of the finite values of all noisy metrics, epoch by epoch.

    Attributes:
        first: the first iteration of the epoch.
        known: the mean of each metric at the end of an epoch, and the iteration of its newest value there.
    """

    def __init__(self) -> None:
        self.first = 0
        self.known: dict[str, tuple[float, int]] = {}
        self._means: dict[str, RunningMean] = {}

    def begin(self, first: int) -> None:
        """An epoch begins with iteration ``first``."""
        if first > self.first:  # else it has begun, or it has ended already
            self.first, self._means = first, {}

    def end(self, histories: Mapping[str, HistoryBuffer], final: Mapping[str, float], following: int) -> None:
        """The means are known now; the next epoch begins with iteration ``following``, or this one continues."""
        self.add(histories, final)
        self.known = {
            name: (mean, histories[name].latest_iteration())
            for name, one in self._means.items()
            if math.isfinite(mean := one.so_far()) and math.isfinite(histories[name].latest())
        }
        self.begin(following)

    def add(self, histories: Mapping[str, HistoryBuffer], final: Mapping[str, float]) -> None:
        """Add the values before the iteration that ``final`` has for a metric; from there on they may change."""
        for name, history in histories.items():
            self._means.setdefault(name, RunningMean(self.first, is_finite=True)).add(history, final[name])

    def state_dict(self) -> dict[str, Any]:
        known = {name: list(pair) for name, pair in self.known.items()}
        sums = {name: list(mean.state_dict().values()) for name, mean in self._means.items()}
        return {"first": self.first, "known": known, "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first = state["first"]
        self.known = {name: (mean, at) for name, (mean, at) in state["known"].items()}
        self._means = {name: RunningMean(is_finite=True) for name in state["sums"]}
        for name, values in state["sums"].items():
            self._means[name].load_state_dict(dict(zip(("next", "total", "count"), values, strict=True)))

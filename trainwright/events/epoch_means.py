"""The means of noisy metrics over an epoch, which its last row and its line show."""

import math
from collections.abc import Mapping
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


class EpochMeans:
    """Adds the finite values of an epoch as they come: a checkpoint holds only the newest values of a history.

    Attributes:
        first: the first iteration of the epoch.
        known: the mean of each metric at the end of an epoch, and the iteration of its newest value there.
    """

    def __init__(self) -> None:
        self.first = 0
        self.known: dict[str, tuple[float, int]] = {}
        self._sums: dict[str, tuple[int, float, int]] = {}  # the next iteration, the total and the count

    def begin(self, first: int) -> None:
        """An epoch begins with iteration ``first``."""
        if first > self.first:  # else it has begun, or it has ended already
            self.first, self._sums = first, {}

    def end(self, histories: Mapping[str, HistoryBuffer], final: Mapping[str, float], following: int) -> None:
        """The means are known now; the next epoch begins with iteration ``following``, or this one continues."""
        self.add(histories, final)
        self.known = {
            name: (total / count, histories[name].latest_iteration())
            for name, (_, total, count) in self._sums.items()
            if count and math.isfinite(histories[name].latest())
        }
        self.begin(following)

    def add(self, histories: Mapping[str, HistoryBuffer], final: Mapping[str, float]) -> None:
        """Add the values before the iteration that ``final`` has for a metric; from there on they may change."""
        for name, history in histories.items():
            following, total, count = self._sums.get(name, (self.first, 0.0, 0))
            for value, iteration in history.values_since(following):
                if iteration >= final[name]:
                    break
                following = iteration + 1
                if math.isfinite(value):
                    total, count = total + value, count + 1
            self._sums[name] = following, total, count

    def so_far(self, name: str) -> float:
        """The mean of the values that were added since the last ``begin``; NaN if none was finite."""
        _, total, count = self._sums[name]
        return total / count if count else math.nan

    def state_dict(self) -> dict[str, Any]:
        known = {name: list(pair) for name, pair in self.known.items()}
        return {"first": self.first, "known": known, "sums": {name: list(one) for name, one in self._sums.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first = state["first"]
        self.known = {name: (mean, at) for name, (mean, at) in state["known"].items()}
        self._sums = {name: (following, total, count) for name, (following, total, count) in state["sums"].items()}

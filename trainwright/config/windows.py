"""How many micro-batches each update has: one number, or a schedule of them by the number of the update."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Windows:
    """An update is a window of micro-batches; ends of epochs, which may shorten one, are not known here.

    Args:
        lengths: the first update, from 0, of each number of micro-batches, and that number.

    >>> windows = Windows.of({0: 1, 1000: 4})
    >>> windows.at(999), windows.at(1000), windows.before(1001), windows.updates(1004)
    (1, 4, 1004, 1001)
    """

    lengths: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, setting: int | Mapping[int, int]) -> "Windows":
        """Those of the setting ``gradient_accumulation_steps``."""
        if not isinstance(setting, Mapping):
            return cls(((0, setting),))
        first, *others = sorted(setting.items())
        return cls((first, *(now for before, now in pairwise([first, *others]) if now[1] != before[1])))

    @property
    def setting(self) -> int | dict[str, int]:
        """As JSON has it."""
        return {str(first): length for first, length in self.lengths} if self.is_scheduled else self.lengths[0][1]

    @property
    def is_scheduled(self) -> bool:
        """Whether the number changes."""
        return len(self.lengths) > 1

    @property
    def largest(self) -> int:
        return max(length for _, length in self.lengths)

    def at(self, update: int) -> int:
        """The micro-batches of ``update``, counted from 0."""
        return self.lengths[bisect_right(self.lengths, update, key=lambda one: one[0]) - 1][1]

    def before(self, update: int) -> int:
        """The micro-batches of all updates before ``update``."""
        ends = [first for first, _ in self.lengths[1:]] + [update]
        parts = zip(self.lengths, ends, strict=True)
        return sum(max(0, min(end, update) - first) * length for (first, length), end in parts)

    def updates(self, batches: int | Fraction) -> int:
        """The fewest updates that have ``batches`` micro-batches or more."""
        starts = [(self.before(first), first, length) for first, length in self.lengths]
        before, first, length = max(one for one in starts if one[0] <= max(0, batches))
        return first + max(0, math.ceil(Fraction(batches - before, length)))

    def scaled(self, function: Callable[[int], int]) -> int | dict[int, int]:
        """The setting with another number for each one."""
        found = {first: function(length) for first, length in self.lengths}
        return found if self.is_scheduled else found[0]


@dataclass(frozen=True, slots=True)
class WindowEpochs:
    """Epochs of so many micro-batches, in iterations of different numbers of them."""

    micro_batches: Fraction
    windows: Windows

    def at(self, iteration: int) -> int:
        return int(self.windows.before(iteration) // self.micro_batches)

    def first(self, epoch: int) -> int:
        return self.windows.updates(epoch * self.micro_batches)

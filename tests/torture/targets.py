"""At which of its file operations a start shall die."""

import random
from collections import Counter

from tests.torture.operations import is_in_save, label_of
from tests.torture.reader import Snapshot
from tests.torture.starts import Noted

_STEP = "STEP"


def is_again(name: str) -> bool:
    """Whether an operation saves a numbered checkpoint under an existing name."""
    name, _, again = label_of(name).partition("@")
    return name.endswith(again) and again != ""


class Targets:
    """The operations to die at: those of an undisturbed run, and what else the starts of this job have done."""

    def __init__(self, names: list[str], rng: random.Random) -> None:
        self._rng = rng
        self._wanted = dict.fromkeys(name for name in names if is_in_save(name))  # a set with an order
        self._tries = Counter(dict.fromkeys(self._wanted, 0))  # of those in a save that are known
        self._again: Counter[str] = Counter()  # of those where a name is saved again, _STEP in place of its digits
        self._hit: set[str] = set()
        self._starting: Counter[str] = Counter()

    def learn(self, noted: Noted) -> None:
        """Know the operations that a start has done, and the one that was its last."""
        for name in noted.done:
            if is_again(name):
                self._again[name.replace(label_of(name)[-7:], _STEP)] += 0
            else:
                (self._tries if is_in_save(name) else self._starting)[name] += 0
        if noted.died_at is not None:
            self._hit.add(noted.died_at)

    def are_hit(self) -> bool:
        """Whether each operation of an undisturbed run has been the last of some start."""
        return all(name in self._hit for name in self._wanted)

    def choose(self, found: Snapshot) -> str | None:
        """One that was not hit yet, in the next saves of a run that continues from ``found``; else any."""
        if left_behind := [step for step in found.steps if _iteration(step) > found.committed[1]]:
            return self._one_again(left_behind[0][-7:])
        ahead = [name for name in self._tries if _iteration(name) > found.committed[1]]
        if not ahead:
            return None
        left = [name for name in ahead if name not in self._hit]
        wanted = [name for name in left if name in self._wanted]
        # What only a run does that was killed before depends on how it was: it may not come again.
        others = [name for name in left if name not in self._wanted and not self._tries[name]]
        name = self._one_of((others if others and self._rng.random() < 0.15 else wanted) or left or ahead)
        self._tries[name] += 1
        return name

    def _one_again(self, digits: str) -> str:
        """One in the save of a name that a kill has left with nothing pointing at it."""
        names = [*self._again, f"model_{_STEP}@{_STEP} | exchange model_{_STEP}"]
        least = min(self._again[name] for name in names)
        name = self._rng.choice([name for name in names if self._again[name] == least])
        self._again[name] += 1
        return name.replace(_STEP, digits)

    def _one_of(self, names: list[str]) -> str:
        """One that was tried least, mostly of the next saves: no start reaches what lies behind it."""
        least = min(self._tries[name] for name in names)
        names = sorted((name for name in names if self._tries[name] == least), key=_iteration)
        return names[min(int(self._rng.expovariate(1 / 40)), len(names) - 1)]

    def has_left(self, found: Snapshot) -> bool:
        """Whether a run that continues from ``found`` will do an operation that was not hit yet."""
        return any(name not in self._hit and _iteration(name) > found.committed[1] for name in self._wanted)

    def choose_while_starting(self) -> str | None:
        names = [name for name in self._starting if "#" not in name]
        if not names:
            return None
        least = min(self._starting[name] for name in names)
        name = self._rng.choice([name for name in names if self._starting[name] == least])
        self._starting[name] += 1
        return name


def _iteration(name: str) -> int:
    digits = label_of(name)[-7:]
    return int(digits) if digits.isdigit() else 10**7

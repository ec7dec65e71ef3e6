"""When the ``after_step`` of a hook is due: known in advance as a number, so that other iterations call nothing."""

import enum
import sys
from collections.abc import Callable
from typing import Any, TypeAlias


class Moment(enum.Enum):
    """A moment that has no period."""

    FIRST = "after the first iteration of a training"
    LAST = "after the last one"
    RESULTS = "after an iteration with new results of an evaluation"


class Recurring:
    """A period that knows in advance when it may be over next.

    Args:
        is_over: whether it is over after the current iteration; it may be several times.
        next_end: the least number of iterations done, above the one that it is called with, at which it may be over.
    """

    def __init__(self, is_over: Callable[[], int], next_end: Callable[[int], int]) -> None:
        self.is_over, self.next_end = is_over, next_end

    def __call__(self) -> int:
        return self.is_over()

    def __or__(self, other: "Recurring") -> "Recurring":
        return Recurring(
            lambda: self.is_over() or other.is_over(), lambda done: min(self.next_end(done), other.next_end(done))
        )


NEVER = Recurring(lambda: False, lambda done: sys.maxsize)
Period: TypeAlias = int | Callable[[], int]
"""When a hook acts: every n iterations (0: never), or after an iteration for which the function returns True, such as
``trainer.state.is_epoch_end`` of the Python API; the steps of a schedule may be several. A function is called once
after each iteration; a :class:`Recurring` only when it may be over."""


class Condition:
    """Whether ``period`` is over after the current iteration of a trainer."""

    def __init__(self, period: Period) -> None:
        self.period = period
        # The latest answer of a function, which may have changed its state for it: a timer, for example.
        self._answer = 0
        self._training: object = None
        self._iter = -1

    def __call__(self, trainer: Any) -> int:
        period = self.period
        if not callable(period):
            return period > 0 and (trainer.iter + 1) % period == 0
        if isinstance(period, Recurring):
            return period()
        if self._iter != trainer.iter or self._training is not trainer.phases:  # phases: a new object in each training
            self._iter, self._training = trainer.iter, trainer.phases
            self._answer = period()
        return self._answer


Due: TypeAlias = tuple[Period | Condition | Moment, ...]


class NextCall:
    """When a hook with the moments ``due`` is called next.

    Attributes:
        due: its moments.
        at: the number of iterations done from which on :meth:`has_come` is asked; 0: always.
        results: the latest results of an evaluation that it has seen.
    """

    def __init__(self, due: Due) -> None:
        self.results: object = None
        self._is_first = True  # no iteration of this training has ended
        self._set(due)

    def _set(self, due: Due) -> None:
        self.due = due
        self._moments = {one for one in due if isinstance(one, Moment)}
        self._conditions = [
            one if isinstance(one, Condition) else Condition(one) for one in due if not isinstance(one, Moment)
        ]
        self.forget()

    def forget(self) -> None:
        """Compute it again: the periods, or the length of the run, may have changed."""
        self.at = 0

    def follow(self, due: Due) -> None:
        """The hook has changed its moments."""
        if due == self.due:  # made anew with each access
            self.due = due
        else:
            self._set(due)

    def has_come(self, trainer: Any) -> bool:
        """Whether the hook is due after the current iteration."""
        done, results = trainer.iterations_done, trainer.last_eval_results
        is_due = Moment.FIRST in self._moments and self._is_first
        is_due |= Moment.LAST in self._moments and done >= trainer.max_iter
        is_due |= Moment.RESULTS in self._moments and results is not self.results
        if self.at <= done:
            is_due |= sum(bool(one(trainer)) for one in self._conditions) > 0  # each is asked
            self.at = min((_next_end(one.period, done) for one in self._conditions), default=sys.maxsize)
        self._is_first, self.results = False, results
        return is_due


def _next_end(period: Period, done: int) -> int:
    if isinstance(period, Recurring):
        return period.next_end(done)
    if callable(period):
        return done + 1
    return (done // period + 1) * period if period > 0 else sys.maxsize

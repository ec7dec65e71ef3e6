"""Ends an evaluation before its next batch: all ranks end it at the same one.

One process looks before each batch. Several ranks exchange their requests about once in a second, before a batch whose
number all of them know. A rank that has no more batches takes part in the exchanges until the others have none, and one
that fails takes part in the next one, which ends the evaluation of the others.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Protocol, TypeVar

from trainwright.base.agreed_checks import AgreedChecks
from trainwright.base.dist import get_world_size

T = TypeVar("T")


class StopRequests(Protocol):
    """What may end an evaluation."""

    def requests(self) -> list[int]:
        """Those of this process, as many on each: 0 for one that is not made."""

    def end_evaluation(self, requests: list[int]) -> None:
        """Raise an exception that is no ``Exception``, for those of all processes, of which one is made."""


_requests = ContextVar[StopRequests | None]("_requests", default=None)


@contextmanager
def stopped_by(requests: StopRequests) -> Iterator[None]:
    """Evaluations in this context end before their next batch if ``requests`` have it."""
    before = _requests.set(requests)
    try:
        yield
    finally:
        _requests.reset(before)


class StopChecks:
    """The checks of one evaluation, on each rank; none outside of :func:`stopped_by`.

    Attributes:
        next: the number of the batch, from 0, before which :meth:`check` is called next.
    """

    def __init__(self, *, is_active: bool = True) -> None:
        self._requests = _requests.get() if is_active else None
        self._agreed = AgreedChecks(0) if get_world_size() > 1 else None
        self._is_over = self._requests is None or self._agreed is None  # no further exchange
        self.next: float = math.inf if self._requests is None else 0

    def before_each(self, batches: Iterable[T]) -> Iterable[T]:
        """``batches``, with a check before one is read if it is due."""
        return batches if self._requests is None else self._checked(batches)

    def _checked(self, batches: Iterable[T]) -> Iterator[T]:
        reader = iter(batches)
        for number in count():
            if number >= self.next and self.check(number):
                return
            try:
                batch = next(reader)
            except StopIteration:
                return
            yield batch

    def check(self, batch: float, *, is_done: bool = False, has_failed: bool = False) -> bool:
        """Raise what ends the evaluation, or return whether to leave its batches: a rank has failed, or all are done.

        ``is_done``, ``has_failed``: this rank has no more batches, or has failed.
        """
        requests, agreed = self._requests, self._agreed
        assert requests is not None
        if agreed is None:
            if any(others := requests.requests()):
                requests.end_evaluation(others)
            return False
        self._is_over = True  # after an error
        failed, is_left, *others = agreed.largest(int(batch), has_failed, not is_done, *requests.requests())
        self._is_over, self.next = bool(failed or not is_left), agreed.next
        if any(others) and not self._is_over:
            requests.end_evaluation(others)
        return self._is_over

    @contextmanager
    def taking_part(self, *, reports_failure: bool) -> Iterator[None]:
        """A context around the batches of this rank, at whose end it waits for the others to have no more, too.

        ``reports_failure``: the others are in no exchange within a batch where they would wait for this rank.
        """
        try:
            yield
        except Exception:
            if reports_failure and not self._is_over:
                self.check(self.next, has_failed=True)
            raise
        while not self._is_over:
            self.check(self.next, is_done=True)

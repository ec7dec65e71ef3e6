"""Time iterations and phases."""

import dataclasses
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from trainwright.events.phases import PhaseTimes
from trainwright.hooks.advice import Facts, Shares, advice, duration, percent, shares_of
from trainwright.hooks.base import HookBase
from trainwright.parallel.dist import is_main_process

logger = logging.getLogger("trainwright.hooks")

_MIN_SHOWN = 1.0  # seconds: a shorter training logs no phases


class IterationTimer(HookBase):
    """Record the seconds of each iteration as ``time``; at the end log the time of each phase, and advice.

    The ``warmup_iter``-th iteration of a run is the first one recorded, since earlier ones are slower. A resumed run
    skips the same iterations as an uninterrupted one. Hooks do not count as part of an iteration. The shares at the end
    cover the time after the first iteration, in which libraries are imported.

    ``facts(trainer)`` returns the facts that the advice needs; without it the advice uses general words.
    """

    def __init__(self, warmup_iter: int = 3, facts: Callable[[Any], Facts] | None = None) -> None:
        self._warmup_iter = warmup_iter
        self._facts = facts
        self._train_start = 0.0
        self._steps_total = self._first_step = 0.0
        self._before = PhaseTimes()  # at the start of the training
        self._timed_from: float | None = None  # the end of the first iteration, and
        self._phases_of_first = PhaseTimes()  # until then: imports, the first use of a device
        self._advised = ""  # each advice is logged once, also if each epoch is a separate training

    def before_train(self) -> None:
        self._train_start = time.perf_counter()
        self._steps_total, self._timed_from = 0.0, None
        self._before = dataclasses.replace(self.trainer.phases)

    def after_step(self) -> None:
        trainer = self.trainer
        seconds = trainer.step_seconds
        self._steps_total += seconds
        if self._timed_from is None:
            self._end_first_iteration()
        if trainer.iter >= self._warmup_iter - 1:
            trainer.storage.put_scalar("time", seconds)

    def after_train(self) -> None:
        iterations = self.trainer.iter - self.trainer.start_iter
        if iterations <= 0 or not is_main_process():
            return
        total = time.perf_counter() - self._train_start
        first = self._slow_first_iteration(iterations)
        compiling = self.trainer.phases.compile - self._before.compile
        without = f", after a first one of {_clock(first)}" if first else ""
        if compiling:
            first, without = 0.0, f", without {_clock(compiling)} of compiling"
        logger.info(
            "Trained %d iterations in %s (%s each%s); %s in total, %s of it outside the steps.",
            iterations,
            _clock(self._steps_total),
            duration(max(0.0, self._steps_total - compiling - first) / (iterations - bool(first))),
            without,
            _clock(total),
            _clock(total - self._steps_total),
        )
        if self._timed_from is not None and iterations > 1:
            self._show_phases(iterations, time.perf_counter() - self._timed_from)

    def _end_first_iteration(self) -> None:
        self._timed_from, self._first_step = time.perf_counter(), self.trainer.step_seconds
        self._phases_of_first = dataclasses.replace(self.trainer.phases)

    def _slow_first_iteration(self, iterations: int) -> float:
        """The seconds of the first iteration, if it would distort the mean; else 0."""
        rest = (self._steps_total - self._first_step) / max(1, iterations - 1)
        return self._first_step if iterations > 1 and self._first_step > max(1.0, 10 * rest) else 0.0

    def _show_phases(self, iterations: int, seconds: float) -> None:
        phases = _since(self._phases_of_first, self.trainer.phases)
        if phases.total == 0 or seconds < _MIN_SHOWN:
            return
        shares = shares_of(phases, seconds)
        facts = Facts() if self._facts is None else self._facts(self.trainer)
        facts = dataclasses.replace(facts, iterations=iterations)
        logger.info("%s", _time_line(shares, facts))
        text = advice(shares, facts)
        subject = text.partition(" ")[0] if text else ""
        if text and subject != self._advised:
            self._advised = subject
            logger.info("Advice: %s", text)


def _since(before: PhaseTimes, now: PhaseTimes) -> PhaseTimes:
    names = [field.name for field in dataclasses.fields(PhaseTimes)]
    return PhaseTimes(**{name: getattr(now, name) - getattr(before, name) for name in names})


def _time_line(shares: Shares, facts: Facts) -> str:
    parts = [field.name for field in dataclasses.fields(shares) if field.name != "seconds"]
    shown = {name: share for name in parts if (share := getattr(shares, name)) >= 0.005}
    line = ", ".join(f"{name} {percent(share)}" for name, share in shown.items())
    if facts.device == "cpu":
        return f"Time: {line}."
    return f"Time of the host: {line}. It runs ahead of the {facts.device} device: {facts.names.profile} shows both."


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if seconds >= 60 else duration(max(0.0, seconds))

"""How long iterations take, and where the time goes."""

import dataclasses
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from trainwright.events.phases import PhaseTimes
from trainwright.hooks.advice import Facts, Shares, advice, duration, percent, shares_of
from trainwright.hooks.base import HookBase
from trainwright.hooks.slowest import HookClock
from trainwright.parallel.dist import is_main_process

logger = logging.getLogger("trainwright.hooks")

_MIN_SHOWN = 1.0  # seconds: of a shorter training no phases are shown
_HOOKS_TIMED = 60  # iterations: longer than most periods of logging
_MOST_OF_IT = 0.5  # a hook that takes less than this of the time of all is not to blame


class IterationTimer(HookBase):
    """Put the seconds of each iteration as ``time``, and log the whole at the end: where it went, and what would help.

    The first ``warmup_iter`` iterations of a run are left out: they are slower than the rest. Not so after a resume,
    where the same iterations shall have a time as without one. Hooks are timed apart.

    ``facts(trainer)`` tells what advice has to know of a training; without it advice is in general words.
    """

    def __init__(self, warmup_iter: int = 3, facts: Callable[[Any], Facts] | None = None) -> None:
        self._warmup_iter = warmup_iter
        self._facts = facts
        self._train_start = 0.0
        self._steps_total = 0.0
        self._first_timed = 0
        self._before = PhaseTimes()  # what was there when the training began
        self._clock: HookClock | None = None
        self._advised = ""  # each advice is given once, also where the epochs are trainings of their own

    def before_train(self) -> None:
        self._train_start = time.perf_counter()
        self._steps_total = 0.0
        self._first_timed = self._warmup_iter
        self._before = dataclasses.replace(self.trainer.phases)
        self._clock = None
        # In place of after_step, once: from then on no iteration asks whether there is something to begin.
        self.after_step = self._begin_clock  # type: ignore[method-assign]

    def after_step(self) -> None:
        trainer = self.trainer
        seconds = trainer.step_seconds
        self._steps_total += seconds
        if trainer.iter >= self._first_timed:
            trainer.storage.put_scalar("time", seconds)

    def _begin_clock(self) -> None:
        """The first ``after_step``: have some iterations tell which hook is slow."""
        stand_in = self.after_step
        del self.after_step
        self.after_step()
        lists = self.trainer.step_calls
        for calls in lists:
            calls[:] = [self.after_step if call == stand_in else call for call in calls]
        self._clock = HookClock(lists, self.trainer.phases, _HOOKS_TIMED)

    def after_train(self) -> None:
        if self._clock is not None:
            self._clock.stop()
        iterations = self.trainer.iter - self.trainer.start_iter
        if iterations <= 0 or not is_main_process():
            return
        total = time.perf_counter() - self._train_start
        compiling = self.trainer.phases.compile - self._before.compile
        logger.info(
            "Trained %d iterations in %s (%s each%s); %s in all, %s of it outside the steps.",
            iterations,
            _clock(self._steps_total),
            duration(max(0.0, self._steps_total - compiling) / iterations),
            f", without {_clock(compiling)} of compiling" if compiling else "",
            _clock(total),
            _clock(total - self._steps_total),
        )
        self._show_phases(iterations, total)

    def _show_phases(self, iterations: int, seconds: float) -> None:
        phases = _since(self._before, self.trainer.phases)
        if phases.total == 0 or seconds < _MIN_SHOWN:
            return
        shares = shares_of(phases, seconds)
        facts = Facts() if self._facts is None else self._facts(self.trainer)
        slowest = None if self._clock is None else self._clock.slowest()
        hook = slowest if slowest is not None and slowest[1] >= _MOST_OF_IT else None
        facts = dataclasses.replace(facts, iterations=iterations, hook=hook)
        logger.info("%s", _time_line(shares, facts))
        told = advice(shares, facts)
        kind = told.partition(" ")[0] if told else ""
        if told and kind != self._advised:
            self._advised = kind
            logger.info("Advice: %s", told)


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

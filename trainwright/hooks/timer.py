"""Time iterations and phases; at the end show the time of each phase, and one suggestion if some can be saved.

The suggestions have three rules: waiting for data, evaluations, saves. Each is timed separately and has a setting that
changes it. Other slow parts show in the shares and in a trace.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from trainwright.base.devices import count_cpus
from trainwright.base.dist import is_main_process
from trainwright.events.phases import PhaseTimes
from trainwright.hooks.base import HookBase

logger = logging.getLogger("trainwright.hooks")

_MIN_SHOWN = 1.0  # seconds: a shorter training logs no phases
_MIN_SECONDS, _MIN_ITERATIONS = 2.0, 50  # a shorter training gets no advice
_MIN_SAVING = 0.15  # of the time
_QUICK_BATCH = 0.5e-3  # seconds: faster than a worker process passes a batch on
_QUICK_ITERATION = 2e-3  # seconds, with workers: a batch takes about as long to pass on as to read


@dataclass(frozen=True, slots=True)
class SettingNames:
    """The names of the settings that help, as the user writes them; general words by default."""

    workers: str = "num_workers of the loader"
    no_workers: str = "num_workers=0 of the loader"
    collate: str = "a collate_fn that returns its argument"
    save: str = "a larger period"
    asynchronous: str = "a Checkpointer with asynchronous=True"
    evaluate: str = "a larger period"
    profile: str = "a ProfileHook"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a training besides its times.

    Attributes:
        iterations: the number of timed iterations.
        batches: batches of an iteration.
        device: the type of the device that trains, "cpu" or "cuda".
        num_workers: processes that read data; None if unknown.
        reads_batches: whether the data set returns complete batches.
        is_in_memory: whether the data are tensors in memory, which no worker reads faster.
        saves_async: whether saves are written in the background.
        num_cpus: CPUs that this process may use.
        names: the names of settings.
    """

    iterations: int = 0
    batches: int = 1
    device: str = "cpu"
    num_workers: int | None = None
    reads_batches: bool = False
    is_in_memory: bool = False
    saves_async: bool = True
    num_cpus: int = field(default_factory=count_cpus)
    names: SettingNames = field(default_factory=SettingNames)


class IterationTimer(HookBase):
    """Record the seconds of each iteration as ``time``; at the end log the time of each phase, and advice.

    The ``warmup_iter``-th iteration of a run is the first one recorded, since earlier ones are slower. A resumed run
    skips the same iterations as an uninterrupted one. Hooks do not count as part of an iteration. The shares at the end
    cover the time after the first iteration, in which libraries are imported.

    ``facts(trainer)`` returns the facts that the advice needs; without it the advice uses general words.
    """

    slot = "step"
    in_copies = False

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
            self._timed_from, self._first_step = time.perf_counter(), seconds
            self._phases_of_first = dataclasses.replace(trainer.phases)
            trainer.storage.rate.update(trainer.iterations_done, is_first=True)
        if trainer.iter >= self._warmup_iter - 1:
            trainer.storage.put_scalar("time", seconds)

    def after_train(self) -> None:
        iterations = self.trainer.iter - self.trainer.start_iter
        if iterations <= 0 or not is_main_process():
            return
        total = time.perf_counter() - self._train_start
        rest = (self._steps_total - self._first_step) / max(1, iterations - 1)
        # The first iteration, if it would distort the mean; else 0.
        first = self._first_step if iterations > 1 and self._first_step > max(1.0, 10 * rest) else 0.0
        compiling = self.trainer.phases.compile - self._before.compile
        without = f", after a first one of {_clock(first)}" if first else ""
        if compiling:
            first, without = 0.0, f", without {_clock(compiling)} of compiling"
        logger.info(
            "Trained %s in %s (%s each%s); %s in total, %s of it outside the steps.",
            f"{iterations} iteration{'s' * (iterations > 1)}",
            _clock(self._steps_total),
            duration(max(0.0, self._steps_total - compiling - first) / (iterations - bool(first))),
            without,
            _clock(total),
            _clock(total - self._steps_total),
        )
        if self._timed_from is not None and iterations > 1:
            self._show_phases(iterations, time.perf_counter() - self._timed_from)

    def _show_phases(self, iterations: int, seconds: float) -> None:
        before, now = dataclasses.asdict(self._phases_of_first), dataclasses.asdict(self.trainer.phases)
        phases = PhaseTimes(**{name: now[name] - before[name] for name in now})
        if phases.total == 0 or seconds < _MIN_SHOWN:
            return
        shares = shares_of(phases, seconds)
        facts = Facts() if self._facts is None else self._facts(self.trainer)
        facts = dataclasses.replace(facts, iterations=iterations)
        line = ", ".join(f"{name} {percent(share)}" for name, share in shares.items() if share >= 0.005)
        if facts.device == "cpu":
            logger.info("Time: %s.", line)
        else:
            about = f"It runs ahead of the {facts.device} device: {facts.names.profile} shows both."
            logger.info("Time of the host: %s. %s", line, about)
        text = advice(shares, seconds, facts)
        subject = text.partition(" ")[0] if text else ""
        if text and subject != self._advised:
            self._advised = subject
            logger.info("Advice: %s", text)


def shares_of(phases: PhaseTimes, seconds: float) -> dict[str, float]:
    """The part of ``seconds`` that each phase took, in [0, 1]; ``hooks`` without evaluations, saves and imports.

    ``seconds`` is the time from before the first step to after the last. ``other`` is in no phase: the time before the
    first step, and a user's own loops.
    """
    rare = phases.evaluation + phases.save + phases.imports
    hooks = max(phases.hooks, rare)  # those after the step in which one of them has failed are not counted
    seconds = max(seconds, phases.step + hooks, 1e-9)
    times = dataclasses.asdict(phases)
    times["hooks"] = hooks - rare
    times |= {"other": seconds - phases.step - hooks, "compile": times.pop("compile")}
    return {name: value / seconds for name, value in times.items()}


def advice(shares: Mapping[str, float], seconds: float, facts: Facts) -> str | None:
    """One sentence about the setting that saves most time; None if none saves much, or the run is too short."""
    if seconds < _MIN_SECONDS or facts.iterations < _MIN_ITERATIONS:
        return None
    names, (evaluation, save) = facts.names, (shares["evaluation"], shares["save"])
    background = "" if facts.saves_async else f"{names.asynchronous} writes them in the background, and "
    # An estimate of the part of the time that can be saved, and how to save it.
    rules = (
        _about_data(shares, seconds, facts),
        (
            0.5 * evaluation,
            f"Evaluations take {percent(evaluation)} of the time: {names.evaluate} makes them less frequent.",
        ),
        (
            0.9 * save,
            f"Saves take {percent(save)} of the time: {background}{names.save} makes them less frequent.",
        ),
    )
    return max((rule for rule in rules if rule[0] >= _MIN_SAVING), default=(0.0, None))[1]


def _about_data(shares: Mapping[str, float], seconds: float, facts: Facts) -> tuple[float, str]:
    takes = f"Waiting for data takes {percent(shares['data'])} of the time"
    batches = facts.iterations * facts.batches
    step = sum(shares[name] for name in ("data", "forward", "backward", "waiting", "optimizer", "metrics"))
    wait, iteration = shares["data"] * seconds / batches, step * seconds / batches
    names, num_workers = facts.names, facts.num_workers
    by_workers = f"with {num_workers} worker{'' if num_workers == 1 else 's'}"
    in_batches = (
        "data in memory is read by complete batches as a ColumnDataset or a TensorDataset; so is a data set whose"
        f" __getitems__ returns the complete batch, with {names.collate}"
    )
    saving = 0.8 * shares["data"]
    if num_workers and iteration < _QUICK_ITERATION:
        fix = f"passing such small batches between processes takes longer than reading them; try {names.no_workers}"
        return saving, f"{takes}, {by_workers}: {fix}."
    if facts.is_in_memory:
        return 0.0, f"{takes}."
    if wait < _QUICK_BATCH:
        return 0.0 if facts.reads_batches else 0.6 * shares["data"], f"{takes}: {in_batches}."
    if not num_workers:  # unknown too: a user's own loader
        fix = f"{names.workers} above 0 reads in the background"
        return saving, f"{takes}: {fix}{'' if facts.reads_batches else f'; {in_batches}'}."
    if num_workers < facts.num_cpus:
        return saving, f"{takes}, {by_workers} for {facts.num_cpus} CPUs: raise {names.workers}."
    return saving, f"{takes}, with a worker for each CPU: prepare samples once, before the training."


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """With the unit that gives three digits: "253 us", "3.21 ms", "1.25 s"."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.2f} s"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if seconds >= 60 else duration(max(0.0, seconds))

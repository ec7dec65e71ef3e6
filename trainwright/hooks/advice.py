"""The time of each phase of a training, and one suggestion if a measured part of it can be saved.

Three rules: waiting for data, evaluations, saves. Each is timed separately and has a setting that changes it. Other
slow parts show in the shares and in a trace.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trainwright.events.phases import PhaseTimes

MIN_SECONDS = 2.0
MIN_ITERATIONS = 50
_MIN_SAVING = 0.15  # of the time
_QUICK_BATCH = 0.5e-3  # seconds: faster than a worker process passes a batch on
_QUICK_ITERATION = 2e-3  # seconds, with workers: a batch takes about as long to pass on as to read


def _count_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        saves_async: whether saves are written in the background.
        num_cpus: CPUs that this process may use.
        names: the names of settings.
    """

    iterations: int = 0
    batches: int = 1
    device: str = "cpu"
    num_workers: int | None = None
    reads_batches: bool = False
    saves_async: bool = True
    num_cpus: int = field(default_factory=_count_cpus)
    names: SettingNames = field(default_factory=SettingNames)


@dataclass(frozen=True, slots=True)
class Shares:
    """The part of ``seconds`` that each phase took, in [0, 1]; ``hooks`` without evaluations and saves.

    ``other`` is in no phase: the time before the first step, and a user's own loops.
    """

    data: float
    forward: float
    backward: float
    optimizer: float
    metrics: float
    hooks: float
    evaluation: float
    save: float
    other: float
    seconds: float
    compile: float = 0.0


def shares_of(phases: PhaseTimes, seconds: float) -> Shares:
    """The shares of ``seconds``, the time from before the first step to after the last."""
    seconds = max(seconds, phases.total, 1e-9)
    return Shares(
        data=phases.data / seconds,
        forward=phases.forward / seconds,
        backward=phases.backward / seconds,
        optimizer=phases.optimizer / seconds,
        metrics=phases.metrics / seconds,
        hooks=max(0.0, phases.hooks - phases.evaluation - phases.save) / seconds,
        evaluation=phases.evaluation / seconds,
        save=phases.save / seconds,
        other=1 - phases.total / seconds,
        seconds=seconds,
        compile=phases.compile / seconds,
    )


def advice(shares: Shares, facts: Facts) -> str | None:
    """One sentence about the setting that saves most time; None if none saves much, or the run is too short."""
    if shares.seconds < MIN_SECONDS or facts.iterations < MIN_ITERATIONS:
        return None
    found = [(saving, text) for rule in _RULES for saving, text in rule(shares, facts) if saving >= _MIN_SAVING]
    return max(found)[1] if found else None


# A rule yields an estimate of the part of the time that can be saved, and how to save it.


def _about_data(shares: Shares, facts: Facts) -> Iterator[tuple[float, str]]:
    takes = f"Waiting for data takes {percent(shares.data)} of the time"
    batches = facts.iterations * facts.batches
    step = shares.data + shares.forward + shares.backward + shares.optimizer + shares.metrics
    wait, iteration = shares.data * shares.seconds / batches, step * shares.seconds / batches
    names, num_workers = facts.names, facts.num_workers
    by_workers = f"with {num_workers} worker{'' if num_workers == 1 else 's'}"
    in_batches = (
        "data in memory is read by complete batches as a ColumnDataset or a TensorDataset; so is a data set whose"
        f" __getitems__ returns the complete batch, with {names.collate}"
    )
    if num_workers and iteration < _QUICK_ITERATION:
        fix = f"passing such small batches between processes takes longer than reading them; try {names.no_workers}"
        yield 0.8 * shares.data, f"{takes}, {by_workers}: {fix}."
    elif wait < _QUICK_BATCH:
        if not facts.reads_batches:
            yield 0.6 * shares.data, f"{takes}: {in_batches}."
    elif not num_workers:  # unknown too: a user's own loader
        fix = f"{names.workers} above 0 reads in the background"
        yield 0.8 * shares.data, f"{takes}: {fix}{'' if facts.reads_batches else f'; {in_batches}'}."
    elif num_workers < facts.num_cpus:
        yield 0.8 * shares.data, f"{takes}, {by_workers} for {facts.num_cpus} CPUs: raise {names.workers}."
    else:
        yield 0.8 * shares.data, f"{takes}, with a worker for each CPU: prepare samples once, before the training."


def _about_evaluation(shares: Shares, facts: Facts) -> Iterator[tuple[float, str]]:
    takes = f"Evaluations take {percent(shares.evaluation)} of the time"
    yield 0.5 * shares.evaluation, f"{takes}: {facts.names.evaluate} makes them less frequent."


def _about_saves(shares: Shares, facts: Facts) -> Iterator[tuple[float, str]]:
    takes = f"Saves take {percent(shares.save)} of the time"
    background = "" if facts.saves_async else f"{facts.names.asynchronous} writes them in the background, and "
    yield 0.9 * shares.save, f"{takes}: {background}{facts.names.save} makes them less frequent."


_RULES: tuple[Callable[[Shares, Facts], Iterator[tuple[float, str]]], ...] = (
    _about_data,
    _about_evaluation,
    _about_saves,
)


def percent(share: float) -> str:
    """``0.314`` as "31 %"."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """With the unit that gives three digits: "253 us", "3.21 ms", "1.25 s"."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.2f} s"

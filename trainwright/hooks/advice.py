"""The one piece of advice that fits where the time of a training went.

Each rule looks at one thing and tells what part of the time its cure could save, at a guess; the largest wins. No
setting is advised that is on already, and nothing at all where the rest is too little to care for.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from trainwright.events.phases import PhaseTimes

MIN_SECONDS = 2.0
MIN_ITERATIONS = 50
_WORTH_SAYING = 0.15  # of the time that could be saved
_QUICK_BATCH = 0.5e-3  # seconds: fetched sooner than a worker process hands it over
_QUICK_ITERATION = 2e-3  # seconds, with workers: what they read takes no longer than to hand it over, or not much
_SMALL_STEP = 1e-3  # seconds of forward, backward and optimizer on a CPU: mostly Python and dispatch, not arithmetic
_SMALL_STEP_OF_HOST = 5e-3  # with an accelerator: the time to launch some hundred kernels
_WORTH_COMPILING = 30.0  # seconds of small steps: it costs some tens of them to compile a step


def _count_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class SettingNames:
    """How the settings that cure are spelled where the user has them; by default in words.

    ``hooks``: for classes of hooks, what they do and what makes them cheaper.
    """

    workers: str = "num_workers of the loader"
    no_workers: str = "num_workers=0 of the loader"
    collate: str = "a collate_fn that gives back what it gets"
    metrics: str = "no metric of the training"
    graph: str = "graph mode"
    batch_size: str = "batch size"
    save: str = "a larger period"
    asynchronous: str = "a Checkpointer with asynchronous=True"
    evaluate: str = "a larger period"
    profile: str = "a ProfileHook"
    hooks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a training besides its times.

    Attributes:
        iterations: how many were timed.
        batches: how many of them each takes.
        device: the type of the device that trains, "cpu" or "cuda".
        num_workers: processes that read data; None where nobody knows.
        reads_batches: whether the data set gives whole batches at once.
        is_graph: whether the step is compiled.
        can_fuse: whether the optimizer has a fused kind and runs another.
        saves_beside: whether saves are written in the background.
        hook: the hook that took the most time, and its share of the time of all hooks, where that was measured.
        num_cpus: how many this process may use.
        names: how settings are spelled.
    """

    iterations: int = 0
    batches: int = 1
    device: str = "cpu"
    num_workers: int | None = None
    reads_batches: bool = False
    is_graph: bool = False
    can_fuse: bool = False
    saves_beside: bool = True
    hook: tuple[str, float] | None = None
    num_cpus: int = field(default_factory=_count_cpus)
    names: SettingNames = field(default_factory=SettingNames)


@dataclass(frozen=True, slots=True)
class Shares:
    """What part of ``seconds`` each phase took; ``hooks`` without evaluations and saves. In [0, 1].

    ``other`` is what no phase knows of: what comes before the first step, and loops of the user's own.
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
    """The shares of ``seconds``, the time from before the first step to behind the last."""
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
    """One sentence on what would help most; None where all is well, or the run too short to tell."""
    if shares.seconds < MIN_SECONDS or facts.iterations < MIN_ITERATIONS:
        return None
    found = [(worth, text) for rule in _RULES for worth, text in rule(shares, facts) if worth >= _WORTH_SAYING]
    return max(found)[1] if found else None


# A rule: what part of the time could be saved, and how. Each looks at one thing.


def _about_data(shares: Shares, facts: Facts) -> Iterator[tuple[float, str]]:
    takes = f"Waiting for data takes {percent(shares.data)} of the time"
    batches = facts.iterations * facts.batches
    step = shares.data + shares.forward + shares.backward + shares.optimizer + shares.metrics
    wait, whole = shares.data * shares.seconds / batches, step * shares.seconds / batches
    names, num_workers = facts.names, facts.num_workers
    by_workers = f"with {num_workers} worker{'' if num_workers == 1 else 's'}"
    in_batches = (
        "data in memory is read by whole batches as a ColumnDataset or a TensorDataset; so is a data set whose"
        f" __getitems__ gives the whole batch, with {names.collate}"
    )
    if num_workers and whole < _QUICK_ITERATION:
        cure = f"to hand over a batch that is read so soon takes longer than to read it; try {names.no_workers}"
        yield 0.8 * shares.data, f"{takes}, {by_workers}: {cure}."
    elif wait < _QUICK_BATCH:
        if not facts.reads_batches:
            yield 0.6 * shares.data, f"{takes}: {in_batches}."
    elif not num_workers:  # unknown too: it is the user's own loader
        cure = f"{names.workers} above 0 reads beside the training"
        yield 0.8 * shares.data, f"{takes}: {cure}{'' if facts.reads_batches else f'; {in_batches}'}."
    elif num_workers < facts.num_cpus:
        yield 0.8 * shares.data, f"{takes}, {by_workers} for {facts.num_cpus} CPUs: raise {names.workers}."
    else:
        yield 0.8 * shares.data, f"{takes}, with a worker for each CPU: do once, ahead of it, what samples need."


def _about_optimizer(shares: Shares, facts: Facts) -> Iterator[tuple[float, str]]:
    if facts.can_fuse and not facts.is_graph:
        takes = f"The optimizer takes {percent(shares.optimizer)} of the time"
        yield 0.6 * shares.optimizer, f"{takes}: fused=True among its arguments makes it one kernel."


def _about_metrics(shares: Shares, facts: Facts) -> Iterator[tuple[float, str]]:
    takes = f"The metric of the training, with what it imports, takes {percent(shares.metrics)} of the time"
    yield 0.95 * shares.metrics, f"{takes}: {facts.names.metrics} saves that."


def _about_small_steps(shares: Shares, facts: Facts) -> Iterator[tuple[float, str]]:
    step = shares.forward + shares.backward + shares.optimizer
    seconds = step * shares.seconds / facts.iterations
    if facts.is_graph or seconds > (_SMALL_STEP if facts.device == "cpu" else _SMALL_STEP_OF_HOST):
        return
    takes = f"Steps are small ({duration(seconds)}), so most of each is Python and dispatch"
    cures = f"{facts.names.graph} makes it one compiled call; a larger {facts.names.batch_size} makes fewer of them"
    if step * shares.seconds >= _WORTH_COMPILING:
        yield 0.5 * step, f"{takes}: {cures}."


def _about_evaluation(shares: Shares, facts: Facts) -> Iterator[tuple[float, str]]:
    takes = f"Evaluations take {percent(shares.evaluation)} of the time"
    yield 0.5 * shares.evaluation, f"{takes}: {facts.names.evaluate} makes them rarer."


def _about_saves(shares: Shares, facts: Facts) -> Iterator[tuple[float, str]]:
    takes = f"Saves hold the training up for {percent(shares.save)} of the time"
    beside = "" if facts.saves_beside else f"{facts.names.asynchronous} writes them beside it, and "
    yield 0.9 * shares.save, f"{takes}: {beside}{facts.names.save} makes them rarer."


def _about_hooks(shares: Shares, facts: Facts) -> Iterator[tuple[float, str]]:
    takes = f"Hooks and callbacks take {percent(shares.hooks)} of the time"
    if facts.hook is not None:
        name, share = facts.hook
        cure = facts.names.hooks.get(name, f"{name}: do less in it, or not at each step")
        yield 0.9 * shares.hooks, f"{takes}, {percent(share)} of that {cure}."
    else:
        yield 0.9 * shares.hooks, f"{takes}: {facts.names.profile} shows what they do."


_RULES: tuple[Callable[[Shares, Facts], Iterator[tuple[float, str]]], ...] = (
    _about_data,
    _about_optimizer,
    _about_metrics,
    _about_small_steps,
    _about_evaluation,
    _about_saves,
    _about_hooks,
)


def percent(share: float) -> str:
    """``0.314`` as "31 %"."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """In the unit that leaves three digits: "253 us", "3.21 ms", "1.25 s"."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.2f} s"

"""Runs that are killed again and again until they are over, and must have become what an undisturbed run becomes.

A chain is one run's folder with its starts. Most of them die by their own hand at an operation of a save, so that in
the end each operation that saving needs was the last one of some start. The others are killed from outside: while they
train, while they start, and where they are the installed command.
"""

import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from tests.torture import judge, reader
from tests.torture.judge import Fault, Reference, judge_end, judge_start
from tests.torture.operations import Death, is_in_save
from tests.torture.reader import Snapshot
from tests.torture.starts import CONFIG, Command, Files, Fork, Leftovers, Noted, Spoiler, kill
from tests.torture.targets import Targets

MAX_TO_KEEP = 2
HANGS_AFTER_S = 120.0
_MOST_KILLS_OF_A_CHAIN = 30
_MOST_TIMES_KILLS = 2  # how much longer it may take to hit every operation

IN_SAVE, WHILE_TRAINING, WHILE_STARTING, COMMAND = "in a save", "while training", "while starting", "command"


@dataclass
class Tally:
    """What a job has seen."""

    kills: Counter[str] = field(default_factory=Counter)
    with_group: int = 0
    chains: int = 0
    resumes: int = 0
    lines: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, str]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Tally":
        return cls(**{**plain, "kills": Counter(plain["kills"]), "operations": Counter(plain["operations"])})


def arguments(folder: Path, num_workers: int, *more: str) -> list[str]:
    """The command line of every start of a run: whether it is the first one or a later one, it is the same."""
    return [
        str(CONFIG),
        "--resume",
        f"train.output_dir={folder}",
        f"dataloader.train.num_workers={num_workers}",
        f"train.checkpointer.max_to_keep={MAX_TO_KEEP}",
        *more,
    ]


def make_reference(work: Path, spoil: Spoiler | None = None) -> Reference:
    """Train without a kill."""
    work_dir = work / "reference"
    work_dir.mkdir(parents=True)
    files, folder = Files(work_dir, 0), work_dir / "run"
    code = Fork(arguments(folder, 0), folder, files, None, spoil).wait(HANGS_AFTER_S)
    if code != 0:
        raise RuntimeError(f"the undisturbed run ended with {code}:\n{files.log.read_text()[-2000:]}")
    lines = {line["iteration"]: line for line in reader.trace(files.trace)}
    return Reference(folder, MAX_TO_KEEP, lines, operations=files.noted().done)


@dataclass
class Plan:
    """How a start shall end."""

    kind: str
    num_workers: int
    with_group: bool
    death: Death | None = None
    after_s: float | None = None  # None: it is left alone


class Job:
    """Makes chains, one after the other, until it has killed often enough."""

    def __init__(
        self,
        work: Path,
        reference: Reference,
        *,
        number: int,
        jobs: int,
        kills: int,
        seed: int,
        every_operation: bool = False,
        spoil: Spoiler | None = None,
        most_faults: int = 5,  # then it gives up
        shown: Callable[[str], None],
    ) -> None:
        self._work = work
        self._reference = reference
        self._number, self._kills, self._seed = number, kills, seed
        self._wants_every_operation = every_operation
        self._spoil, self._most_faults = spoil, most_faults
        self._rng = random.Random(f"{seed}/{number}")
        self._targets = Targets(reference.operations[number::jobs], self._rng)
        self._kinds = _kinds(12 * number)
        self._command_s = math.inf  # that the quickest command has taken from its start to its end
        self._leftovers = Leftovers()
        self._shown = shown
        self.tally = Tally()

    def run(self) -> Tally:
        for count in range(10**6):
            if self._has_enough() or len(self.tally.faults) >= self._most_faults:
                break
            self._chain(f"{self._number}-{count:03d}")
        self._report([Fault(judge.ENDED, text) for text in self._leftovers.overdue(wait=True)], "all")
        return self.tally

    def _chain(self, name: str) -> None:
        work_dir = self._work / f"chain-{name}"
        work_dir.mkdir()
        folder = work_dir / "run"
        most = self.tally.kills.total() + self._rng.randint(3, _MOST_KILLS_OF_A_CHAIN)
        self.tally.chains += 1
        before = reader.look(folder)
        for number in range(10**6):
            is_last = self.tally.kills.total() >= most or self._has_enough()
            if self.tally.kills.total() >= self._kills and not self._targets.has_left(before):
                is_last = True
            plan = Plan("alone", self._rng.choice((0, 2)), False) if is_last else self._plan(before)
            files = Files(work_dir, number)
            begun = time.monotonic()
            code, pid = self._start(plan, folder, files, f"chain {name}, start {number}")
            if plan.kind == COMMAND and code == 0:  # it was quicker than the kill: once more, and sooner
                self._command_s = min(self._command_s, time.monotonic() - begun)
                self._kinds = chain([COMMAND], self._kinds)
            noted, after = files.noted(), reader.look(folder)
            self._targets.learn(noted)
            faults = judge_start(self._reference, folder, pid, files, noted, before, after)
            if code == 0:
                faults += judge_end(self._reference, folder, after)
            elif code != -9:
                faults.append(Fault(judge.ENDED, "it hangs" if code is None else f"it ended with {code}"))
            faults += [Fault(judge.ENDED, text) for text in self._leftovers.overdue()]
            self._count(plan, code, noted, before, files)
            if self._report(faults, f"chain {name}, start {number} ({plan.kind}, {noted.died_at}), folder {work_dir}"):
                return
            if code == 0:
                shutil.rmtree(work_dir)
                return
            before = after

    def _has_enough(self) -> bool:
        done = self.tally.kills.total()
        if done < self._kills:
            return False
        return not self._wants_every_operation or self._targets.are_hit() or done >= _MOST_TIMES_KILLS * self._kills

    def _start(self, plan: Plan, folder: Path, files: Files, whose: str) -> tuple[int | None, int]:
        given = arguments(folder, plan.num_workers)
        start: Command | Fork
        if plan.kind == COMMAND and self._spoil is None:
            start = Command(given, folder, files)
        else:
            start = Fork(given, folder, files, plan.death, self._spoil)
        try:
            code = start.wait(HANGS_AFTER_S if plan.after_s is None else plan.after_s)
            if code is None and plan.after_s is not None:
                kill(start, with_group=plan.with_group)
                code = start.wait(HANGS_AFTER_S)
        finally:
            if start.wait(0) is None:
                kill(start, with_group=True)
        self._leftovers.add(start.pid, whose)
        return code, start.pid

    def _plan(self, found: Snapshot) -> Plan:
        kind = next(self._kinds)
        plan = Plan(kind, self._rng.choice((0, 2)), self._rng.random() < 0.5)
        left = 1 - (found.committed[1] + 1) / self._reference.iterations
        if kind == WHILE_TRAINING:
            plan.after_s = self._rng.uniform(0.05, 0.2 + 0.4 * left)
        elif kind == COMMAND:
            plan.after_s = self._rng.uniform(0.1, min(3.5 + 0.4 * left, 0.8 * self._command_s))
        elif kind == WHILE_STARTING and (
            self._rng.random() < 0.5 or not self._dies_at(plan, self._targets.choose_while_starting())
        ):
            plan.after_s = self._rng.uniform(0.0, 0.15)
        elif kind == IN_SAVE and not self._dies_at(plan, self._targets.choose(found)):
            plan.kind, plan.after_s = WHILE_TRAINING, self._rng.uniform(0.05, 0.3)
        return plan

    def _dies_at(self, plan: Plan, name: str | None) -> bool:
        if name is None:
            return False
        moments = ("before", "half", "after") if " | write " in name else ("before", "after")
        plan.death = Death(name, self._rng.choice(moments), plan.with_group)
        return True

    def _count(self, plan: Plan, code: int | None, noted: Noted, before: Snapshot, files: Files) -> None:
        lines = reader.trace(files.trace)
        self.tally.lines += len(lines)
        self.tally.resumes += bool(before.committed[0] and (lines or code == 0))
        if code != -9:
            return
        kind = plan.kind
        if noted.died_at is not None:
            kind = IN_SAVE if is_in_save(noted.died_at) else WHILE_STARTING
            self.tally.operations[noted.died_at] += 1
        self.tally.kills[kind] += 1
        self.tally.with_group += plan.with_group

    def _report(self, faults: list[Fault], where: str) -> bool:
        for fault in faults:
            self._shown(f"FAULT ({fault.kind}): {fault.text} [{where}; seed {self._seed}, job {self._number}]")
        self.tally.faults += [asdict(fault) for fault in faults]
        return bool(faults)


def _kinds(shift: int) -> Iterator[str]:
    """Of 25 kills one is of the installed command, two while starting, three while training; 19 are in a save."""
    number = shift
    while True:
        number += 1
        if number % 25 == 13:
            yield COMMAND
        elif number % 25 in (6, 19):
            yield WHILE_STARTING
        elif number % 25 in (3, 10, 23):
            yield WHILE_TRAINING
        else:
            yield IN_SAVE

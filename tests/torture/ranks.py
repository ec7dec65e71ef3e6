"""Two ranks under torchrun on this machine: one of them is killed, and the world may have another size afterwards."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.torture import judge, reader
from tests.torture.judge import Fault, Reference, judge_end, judge_start
from tests.torture.kills import HANGS_AFTER_S, MAX_TO_KEEP, arguments
from tests.torture.starts import Command, Files, Noted, kill, processes_of, torchrun

ENDS_WITHIN_S = 30.0
_WEIGHTS_DIFFER_BY = 2e-5  # at most: gradients of float32 are summed in another order
_BATCH = ("train.train_micro_batch_size=4", "train.num_accumulation_steps=null", "train.global_batch_size=16")

Show = Callable[[str], None]
Lines = list[dict[str, Any]]


def launch(folder: Path, files: Files, processes: int, *more: str) -> Command:
    program = torchrun(processes) if processes > 1 else ()
    return Command(arguments(folder, 0, *_BATCH, *more), folder, files, program)


def history(files: Files, rank: int) -> Lines:
    return reader.trace(files.trace if rank == 0 else files.trace.with_name(f"{files.trace.name}.rank{rank}"))


def make_reference(work_dir: Path, processes: int, *more: str) -> tuple[Reference, dict[int, Lines]]:
    """An undisturbed run, and the history of each of its ranks."""
    work_dir.mkdir()
    files, folder = Files(work_dir, 0), work_dir / "run"
    code = launch(folder, files, processes, *more).wait(HANGS_AFTER_S)
    if code != 0:
        raise RuntimeError(f"the undisturbed run of {processes} ended with {code}:\n{files.log.read_text()[-2000:]}")
    lines = {rank: history(files, rank) for rank in range(processes)}
    return Reference(folder, MAX_TO_KEEP, {line["iteration"]: line for line in lines[0]}), lines


def kill_ranks(work: Path, *, kills: int, seed: int, show: Show) -> bool:
    """Kill one of two ranks repeatedly: the complete job ends soon, and a restart continues exactly."""
    rng = random.Random(seed)
    started = time.monotonic()
    reference, theirs = make_reference(work / "reference", 2)
    faults: list[Fault] = []
    killed, chains, number, longest = 0, 0, 0, 0.0
    folder, before = Path(), reader.Snapshot()
    code: int | None = 0
    while killed < kills or code != 0:
        if code == 0:
            folder, number, before, chains = work / f"chain-{chains:03d}" / "run", 0, reader.Snapshot(), chains + 1
            folder.parent.mkdir()
        files = Files(folder.parent, number)
        job = launch(folder, files, 2)
        ended = None
        if killed < kills and _kill_one(job, files, rng, before.committed[1]):
            killed += 1
            ended = time.monotonic()
        code = job.wait(ENDS_WITHIN_S if ended else HANGS_AFTER_S)
        where = f"chain {folder.parent}, start {number}, seed {seed}"
        found = _judge(reference, theirs, folder, files, before, code, was_killed=ended is not None)
        longest = max(longest, time.monotonic() - ended) if ended else longest
        _end_all(job, files)
        for fault in found:
            show(f"FAULT ({fault.kind}): {fault.text} [{where}]")
        faults += found
        if found:
            break
        number, before = number + 1, reader.look(folder)
    show(f"ranks killed: {killed}")
    show(f"chains: {chains}")
    show(f"longest time from the kill to the end of the job: {longest:.1f} s")
    show(f"faults: {len(faults)}")
    show(f"seconds: {time.monotonic() - started:.0f}")
    return not faults


def _kill_one(job: Command, files: Files, rng: random.Random, done: int) -> bool:
    """Kill one rank, mostly when it has trained for a while; False if the job was over before."""
    rank = rng.randrange(2)
    lines = 0 if rng.random() < 0.2 else rng.randint(1, min(25, 58 - done))
    while job.wait(0) is None:
        pids = [pid for pid, its in processes_of(files).items() if its == rank]
        if pids and len(history(files, rank)) >= lines:
            time.sleep(rng.uniform(0, 1.5 if lines == 0 else 0.01))
            try:
                os.kill(pids[0], signal.SIGKILL)
            except ProcessLookupError:
                return False
            return job.wait(0) != 0
        time.sleep(0.002)
    return False


def _judge(
    reference: Reference,
    theirs: dict[int, Lines],
    folder: Path,
    files: Files,
    before: reader.Snapshot,
    code: int | None,
    *,
    was_killed: bool,
) -> list[Fault]:
    faults = []
    if was_killed and code is None:
        faults.append(Fault(judge.ENDED, f"the job has not ended {ENDS_WITHIN_S:.0f} s after the kill of a rank"))
    elif (code == 0) == was_killed:
        faults.append(Fault(judge.ENDED, f"the job ended with {code}"))
    time.sleep(0.5)  # the launcher's last child may end right behind it
    if left := processes_of(files):
        faults.append(Fault(judge.ENDED, f"processes {sorted(left)} are left"))
    after = reader.look(folder)
    faults += judge_start(reference, folder, 0, files, Noted(), before, after, was_stopped=was_killed)
    first = before.committed[1] + 1
    ours = history(files, 1)
    if ours != theirs[1][first : first + len(ours)]:
        faults.append(Fault(judge.DIFFERING, f"the history of rank 1 from iteration {first} on"))
    return faults + (judge_end(reference, folder, after) if code == 0 else [])


def _end_all(job: Command, files: Files) -> None:
    if job.wait(0) is None:
        kill(job, with_group=True)
    for pid in processes_of(files):
        os.kill(pid, signal.SIGKILL)


def change_ranks(work: Path, *, show: Show) -> bool:
    """2, then 1, then 2 ranks: at every update the samples of a run that was always 2, and nearly its weights."""
    started = time.monotonic()
    plain = ("model.is_plain=true",)
    reference, theirs = make_reference(work / "reference", 2, *plain)
    expected = _samples(theirs.values())
    folder = work / "chain" / "run"
    folder.parent.mkdir()
    found: dict[int, list[int]] = {}
    faults: list[str] = []
    for number, (processes, until) in enumerate(((2, 22), (1, 41), (2, None))):
        files = Files(folder.parent, number)
        job = launch(folder, files, processes, *plain)
        while until is not None and job.wait(0) is None:
            time.sleep(0.005)
            if any(line["iteration"] >= until for line in history(files, 0)[-1:]):
                kill(job, with_group=True)
                _end_all(job, files)
        code = job.wait(HANGS_AFTER_S)
        if code != (0 if until is None else -signal.SIGKILL):
            faults.append(f"the part of {processes} ended with {code}, see {files.log}")
            break
        part = _samples(history(files, rank) for rank in range(processes))
        whole = {iteration: numbers for iteration, numbers in part.items() if len(numbers) == 16}
        found |= whole
        show(f"on {processes}: iterations {min(whole)} to {max(whole)}")
    faults += [
        f"iteration {i}: samples {found.get(i)}, not {expected[i]}" for i in expected if found.get(i) != expected[i]
    ]
    seen: Counter[int] = Counter(dict.fromkeys(range(150), 0))
    for iteration in sorted(found):
        seen.update(found[iteration])
        if max(seen.values()) - min(seen.values()) > 1:
            faults.append(f"iteration {iteration}: a sample comes again before all others have")
    distance = _distance(folder, reference.folder) if not faults else float("inf")
    if distance > _WEIGHTS_DIFFER_BY:
        faults.append(f"the weights differ by {distance:.2g}, more than {_WEIGHTS_DIFFER_BY}")
    show(f"updates with the same samples: {sum(found.get(i) == expected[i] for i in expected)} of {len(expected)}")
    show(f"largest difference of a weight at the end: {distance:.2g}")
    for fault in faults[:5]:
        show(f"FAULT: {fault} [{folder}]")
    show(f"seconds: {time.monotonic() - started:.0f}")
    return not faults


def _samples(histories: Any) -> dict[int, list[int]]:
    """The samples of each update, all ranks together, sorted."""
    found: dict[int, list[int]] = {}
    for lines in histories:
        for line in lines:
            found.setdefault(line["iteration"], []).extend(line["samples"])
    return {iteration: sorted(numbers) for iteration, numbers in found.items()}


def _distance(ours: Path, theirs: Path) -> float:
    from safetensors.numpy import load_file  # here: NumPy starts threads, and other tests fork this process

    a, b = (load_file(folder / "model_final" / "model.safetensors") for folder in (ours, theirs))
    if a.keys() != b.keys():
        return float("inf")
    return max(float(abs(a[name].astype("float64") - b[name].astype("float64")).max()) for name in a)

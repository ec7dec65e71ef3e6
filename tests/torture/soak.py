"""A long run with many saves and evaluations: what it takes of the machine does not grow. Measured from outside."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.torture.kills import arguments
from tests.torture.starts import Command, Files, kill

_PERIOD = 200  # iterations between two saves, and between two evaluations
_LOGGED = 20  # iterations between two rows
_GROWTH_BYTES, _GROWTH_SHARE = 8 * 2**20, 0.02  # of memory: less than the larger of the two
_EVERY_S = 0.05
_GROWING_FILES = ("metrics.json", "losses.csv", "log.txt", "events.out.")
_HANGS_AFTER_S = 900.0


@dataclass(frozen=True, slots=True)
class Use:
    """What the run takes at one moment. ``entries`` and ``disk`` (bytes) without logs and metrics, which may grow."""

    iteration: int
    memory: int
    threads: int
    files: int
    entries: int
    disk: int


def soak(work: Path, *, iterations: int, show: Callable[[str], None]) -> bool:
    """Train and compare the first part behind the warm-up, a tenth of all, with the last."""
    started = time.monotonic()
    folder, files = work / "run", Files(work, 0)
    more = (
        f"train.train_iter={iterations}",
        "train.num_accumulation_steps=1",
        f"train.checkpointer.period={_PERIOD}",
        "train.checkpointer.max_to_keep=3",
        f"train.evaluation.eval_period={_PERIOD}",
        f"train.log_period={_LOGGED}",
    )
    job = Command(arguments(folder, 0, *more), folder, files, traced=False)
    uses = []
    while job.wait(_EVERY_S) is None:
        if time.monotonic() - started > _HANGS_AFTER_S:
            kill(job, with_group=True)
        elif (use := _look(job.pid, folder)) is not None:
            uses.append(use)
    if job.wait(0) != 0:
        show(f"FAULT: the run ended with {job.wait(0)}, see {files.log}")
        return False
    # Not before there are as many checkpoints as are kept, and not the end, when threads and files go.
    first = max(iterations // 10, 5 * _PERIOD)
    warm = [use for use in uses if first <= use.iteration < iterations - 1]
    part = max(1, len(warm) // 5)
    one = _sizes(folder / "model_final" / "")
    faults = _compare(warm[:part], warm[-part:], {"entries": len(one), "disk": sum(one)}, show)
    show(f"iterations: {iterations}; moments looked at: {len(uses)}")
    show(f"seconds: {time.monotonic() - started:.0f}")
    rows = [json.loads(line)["iteration"] for line in (folder / "metrics.json").read_text().splitlines()]
    if rows != [*range(_LOGGED - 1, iterations, _LOGGED), iterations]:  # the last one is the final evaluation
        faults.append(f"{len(rows)} rows, up to iteration {rows[-1]}")
    for fault in faults:
        show(f"FAULT: {fault} [{folder}]")
    return not faults


def _compare(first: list[Use], last: list[Use], checkpoint: dict[str, int], show: Callable[[str], None]) -> list[str]:
    faults = []
    memory = median(use.memory for use in first)
    growth = median(use.memory for use in last) - memory
    show(f"memory: {memory / 2**20:.1f} MB, growth {growth / 2**20:+.2f} MB")
    if growth >= max(_GROWTH_BYTES, _GROWTH_SHARE * memory):
        faults.append(f"the memory has grown by {growth / 2**20:.1f} MB")
    for name in ("threads", "files"):  # the least: a save in flight has files of its own
        before, after = (min(getattr(use, name) for use in part) for part in (first, last))
        show(f"{name}: {before}, growth {after - before:+d}")
        if after != before:
            faults.append(f"{name}: {before} at first, {after} at last")
    for name, one in checkpoint.items():
        before, after = (max(getattr(use, name) for use in part) for part in (first, last))
        show(f"{name} in the folder at most: {before:,}, growth {after - before:+,} (a checkpoint: {one:,})")
        if after > before + 2 * one:  # the best one is a folder of its own or a link, and one may be being written
            faults.append(f"{name}: {before:,} at first, {after:,} at last")
    return faults


def _look(pid: int, folder: Path) -> Use | None:
    """None while there is nothing to see, or not any more."""
    try:
        rows = (folder / "metrics.json").read_bytes().split(b"\n")
        iteration = json.loads(rows[-2])["iteration"]
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        threads, files = len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, IndexError, ValueError):
        return None
    sizes = _sizes(folder)
    return Use(iteration, pages * os.sysconf("SC_PAGE_SIZE"), threads, files, len(sizes), sum(sizes))


def _sizes(folder: Path) -> list[int]:
    sizes = []
    for parent, _, names in os.walk(folder):
        for name in names:
            if not name.startswith(_GROWING_FILES):
                try:
                    sizes.append(os.lstat(os.path.join(parent, name)).st_size)
                except FileNotFoundError:  # deleted meanwhile
                    continue
    return sizes

"""The long tests that no work is lost: ``make torture``, or from the top folder ``python -m tests.torture.run``.

A fault ends the command with 1, and the folder of the run that has it is kept.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.torture.judge import KINDS, Reference
from tests.torture.kills import IN_SAVE, Job, Tally, make_reference
from tests.torture.operations import is_in_save
from tests.torture.ranks import change_ranks, kill_ranks
from tests.torture.soak import soak
from tests.torture.spoilers import SPOILERS
from tests.torture.starts import load_library
from tests.torture.targets import is_again

_KILLS_OF_A_SPOILED_RUN = 30  # at most; most are found out by the first few


def show(line: str) -> None:
    # In one piece: where Python is unbuffered, print() writes the end of a line by itself, and several processes show
    # theirs.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def kills(args: argparse.Namespace, work: Path) -> bool:
    """Kill runs at every point of every save, and elsewhere."""
    started = time.monotonic()
    load_library()
    reference = make_reference(work)
    numbers = range(min(args.jobs, args.kills))
    shares = [args.kills // len(numbers) + (number < args.kills % len(numbers)) for number in numbers]

    def job(number: int) -> None:
        made = Job(
            work,
            reference,
            number=number,
            jobs=len(numbers),
            kills=shares[number],
            seed=args.seed,
            every_operation=args.every_operation,
            shown=show,
        )
        (work / f"tally-{number}.json").write_text(json.dumps(vars(made.run())))

    if not in_processes([partial(job, number) for number in numbers]):
        return False
    tally = Tally()
    for number in numbers:
        tally.add(Tally.from_plain(json.loads((work / f"tally-{number}.json").read_text())))
    _report(tally, reference, time.monotonic() - started)
    return not tally.faults


def _report(tally: Tally, reference: Reference, seconds: float) -> None:
    hit = {name for name in tally.operations if is_in_save(name)}
    there = {name for name in reference.operations if is_in_save(name)}
    kinds = ", ".join(f"{count} {kind}" for kind, count in tally.kills.most_common())
    show(f"kills: {tally.kills.total()} ({kinds}); {tally.with_group} with all processes of the run")
    show(f"inside a save: {tally.kills[IN_SAVE]}")
    show(f"chains: {tally.chains}")
    show(f"resumes: {tally.resumes}")
    show(f"lines of history compared: {tally.lines}")
    again = sum(is_again(name) for name in hit)
    show(
        f"operations of saving hit: {len(hit)}; {len(hit & there)} of the {len(there)} of an undisturbed run, and"
        f" {again} where a kill had left the name behind"
    )
    for kind, text in KINDS.items():
        show(f"{text}: {sum(fault['kind'] == kind for fault in tally.faults)}")
    show(f"seconds: {seconds:.0f}")


def spoiled(args: argparse.Namespace, work: Path) -> bool:
    """See that the judge finds what is wrong with libraries that lose work."""
    load_library()

    def job(name: str) -> None:
        spoil, kind = SPOILERS[name]
        work_dir = work / name
        reference = make_reference(work_dir, spoil)
        made = Job(
            work_dir,
            reference,
            number=0,
            jobs=1,
            kills=_KILLS_OF_A_SPOILED_RUN,
            seed=args.seed,
            spoil=spoil,
            most_faults=1,
            shown=lambda _: None,
        )
        tally = made.run()
        found = next((fault["text"] for fault in tally.faults if fault["kind"] == kind), None)
        show(f"{name}: {'NOT FOUND' if found is None else f'found after {tally.kills.total()} kills: {found}'}")
        if found is None:
            sys.exit(1)

    return in_processes([partial(job, name) for name in SPOILERS])


def in_processes(tasks: list[Callable[[], None]]) -> bool:
    """Do all at the same time, in forks of this process; False if one has failed."""
    running = [multiprocessing.get_context("fork").Process(target=task) for task in tasks]
    for process in running:
        process.start()
    for process in running:
        process.join()
    return all(process.exitcode == 0 for process in running)


def ranks(args: argparse.Namespace, work: Path) -> bool:
    """Kill one of two ranks, about ten times."""
    return kill_ranks(work, kills=3 if args.quick else 10, seed=args.seed, show=show)


def elastic(args: argparse.Namespace, work: Path) -> bool:
    """Continue with one rank, and then with two again."""
    return change_ranks(work, show=show)


def long_run(args: argparse.Namespace, work: Path) -> bool:
    """Train for long, saving and evaluating all the time."""
    return soak(work, iterations=2_000 if args.quick else 20_000, show=show)


TESTS: dict[str, Callable[[argparse.Namespace, Path], bool]] = {
    "kills": kills,
    "spoiled": spoiled,
    "ranks": ranks,
    "elastic": elastic,
    "soak": long_run,
}


def parse() -> argparse.Namespace:
    tests = "; ".join(f"{name}: {test.__doc__}" for name, test in TESTS.items())
    parser = argparse.ArgumentParser(prog="python -m tests.torture.run", description=__doc__, epilog=tests)
    parser.add_argument("--kills", type=int, default=500, help="how often runs are killed (default 500)")
    parser.add_argument(
        "--every-operation",
        action="store_true",
        help="continue, up to twice as often, until each operation of a save was hit",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (default 2)")
    parser.add_argument("--only", choices=TESTS, action="append", help="one of the tests; may be repeated")
    parser.add_argument("--quick", action="store_true", help="50 kills, and the other tests shortened")
    parser.add_argument("--folder", type=Path, help="where the runs are made (default: the system's temporary folder)")
    args = parser.parse_args()
    if args.kills < 1 or args.jobs < 1:
        parser.error("--kills and --jobs must be at least 1")
    args.kills = min(args.kills, 50) if args.quick else args.kills
    return args


def main() -> int:
    args = parse()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before NumPy and torch are imported, which would start threads
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    work = Path(tempfile.mkdtemp(prefix="torture-", dir=args.folder))
    failed = []
    for name in args.only or TESTS:
        show(f"== {name}: {TESTS[name].__doc__}")
        (work / name).mkdir()
        try:
            if not TESTS[name](args, work / name):
                failed.append(name)
        except RuntimeError as error:  # an undisturbed run that fails, for one: the other tests may still say more
            show(f"FAULT: {error}")
            failed.append(name)
    if failed:
        show(f"FAILED: {', '.join(failed)}. What is left of the runs is in {work}.")
        return 1
    shutil.rmtree(work)
    show("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Graph mode: ``python -m benchmarks.graph``. Time to compile, for the first time and from the cache, and the step.

Every round begins without anything compiled before: one process compiles ("cold"), a second one of the same training
finds what the first one left on the disk ("warm"). Seconds run from the start of a process to the end of its first
step; a step is that of the warm process, its ratio that to the plain loop of the same round.
"""

import tempfile
from typing import Any

from benchmarks.rounds import parser_of, print_table, run, write
from benchmarks.step import CASES

PEERS = ("plain", "plain:compile", "objects:graph", "config:graph")


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--case", choices=[name for name in CASES if "graph" not in name], default="tiny")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--peers", default=",".join(PEERS), help="separated by commas")
    args = parser.parse_args()
    job = CASES[args.case].job | ({} if args.steps is None else {"steps": args.steps})
    results: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for peer in args.peers.split(","):
            with tempfile.TemporaryDirectory() as cache:
                cold = first_step_s(run(peer, job | {"steps": 2}, TORCHINDUCTOR_CACHE_DIR=cache))
                warm = run(peer, job, TORCHINDUCTOR_CACHE_DIR=cache)
            results.append(warm | {"round": number, "cold_s": cold, "warm_s": first_step_s(warm)})
    print(f"{args.case}: {CASES[args.case].about}; {job['steps']} steps, rounds: {args.rounds}")
    columns = {
        "us": ("us a step", 0),
        "cold_s": ("s to the first step, cold", 1),
        "warm_s": ("warm", 1),
        "peak_mib": ("peak MiB", 0),
    }
    print_table(results, columns, ratio_of="us")
    write(args.json, "benchmarks.graph", args.case, results)


def first_step_s(result: dict[str, Any]) -> float:
    """Seconds from the start of the process to the end of its first step; NaN if it did not get that far."""
    ticks = result.get("first_steps_ns", ())
    return (ticks[1] - result["spawned_ns"]) / 1e9 if len(ticks) == 2 else float("nan")


if __name__ == "__main__":
    main()

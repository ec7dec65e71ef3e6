"""A training step: a plain PyTorch loop, our two APIs, and the other installed trainers.

    python -m benchmarks.step                       # the tiny model, all peers
    python -m benchmarks.step --case gpt --peers plain,objects
    python -m benchmarks.step --case quick          # what `make bench` runs

Each training runs in a process of its own, and the processes alternate in every round. A step is timed from the first
sample of a batch to the first sample of the next, so it includes fetching, forward, backward, update and hooks. One
thread. Compare the ratios to the plain loop of the same round; microseconds depend on the machine and its load. The
cost of a trainer is the ratio to the plain loop with the same optimizer: torch's Adam, which the peers get, or the
fused one, which our trainers build by default. Peak memory is that of the process.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rounds import (
    FUSED,
    OURS,
    PASSED,
    installed_peers,
    parser_of,
    print_table,
    say_missing,
    take_turns,
    write,
)


@dataclass(frozen=True)
class Case:
    """What is trained (fields of a Job), by whom besides the plain loop and us, and what it is about."""

    about: str
    job: dict[str, Any]
    peers: tuple[str, ...] = ("plain", *PASSED, FUSED, *OURS)  # EQUAL
    with_others: bool = False


TINY = {"model": "mlp", "steps": 3000}
LARGE = {"model": "gpt", "steps": 40, "batch": 8, "log_every": 10}
GRAPH = (FUSED, "objects:graph", "config:graph")
EQUAL = ("plain", *PASSED, FUSED, *OURS)  # each trainer beside the loop with its optimizer
ALL_FUSED = (FUSED, *OURS)
CASES = {
    "quick": Case("a tiny MLP, any data set, fewer steps", TINY | {"steps": 1500}, (*EQUAL, *GRAPH[1:]), True),
    "tiny": Case("a tiny MLP (32-64-10), batches of 32, any data set with __getitem__", TINY, with_others=True),
    "batches": Case("its data set has __getitems__", TINY | {"data": "batches"}, ("plain:fetch", *ALL_FUSED)),
    "tensors": Case("its data are a TensorDataset", TINY | {"data": "tensors"}, ("plain", PASSED[0], FUSED, OURS[0])),
    "columns": Case("its data are tensors by name", TINY | {"data": "columns"}, ("plain:fetch", *ALL_FUSED)),
    "own_step": Case(
        "own train_step, a callback, a metric of the training; the plain loop has that metric",
        TINY | {"own_step": True},
        ("plain", PASSED[0], FUSED, OURS[0]),
    ),
    "features": Case("progress bar, logger and checkpoints on", TINY | {"features": True}, with_others=True),
    "accumulation": Case("4 micro-batches an update; times of one", TINY | {"accumulation": 4}, ALL_FUSED),
    "bf16": Case("bfloat16 autocast", TINY | {"precision": "bf16"}, ALL_FUSED),
    "ranks": Case("two processes (gloo)", TINY | {"steps": 1000, "ranks": 2}),
    "graph": Case("graph mode", TINY, GRAPH),
    "graph_columns": Case("graph mode, tensors by name", TINY | {"data": "columns"}, GRAPH),
    "gpt": Case("a GPT of 10 million parameters, 8 x 128 tokens, float32", LARGE, with_others=True),
    "gpt_bf16": Case("the same, bfloat16 autocast", LARGE | {"precision": "bf16"}, ALL_FUSED),
    "gpt_medium": Case(
        "the same, float32 with bfloat16 matrix products",
        LARGE | {"precision": "medium"},
        ("plain:medium", *ALL_FUSED),
    ),
}
COLUMNS = {
    "us": ("us a step", 0),
    "cpu_us": ("CPU us a step", 0),
    "mean_us": ("mean us a step", 0),
    "peak_mib": ("peak MiB", 0),
}


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument(
        "--case", choices=CASES, default="tiny", help="; ".join(f"{n}: {c.about}" for n, c in CASES.items())
    )
    parser.add_argument("--steps", type=int, help="batches of the loader")
    parser.add_argument(
        "--peers", help="the peers to run, separated by commas: plain, objects, config:graph, lightning …"
    )
    args = parser.parse_args()
    case = CASES[args.case]
    job = case.job | ({} if args.steps is None else {"steps": args.steps})
    peers = [*case.peers, *(installed_peers() if case.with_others else [])]
    if args.peers:
        peers = args.peers.split(",")
        known = sorted(path.stem for path in Path(__file__).parent.glob("peers/[a-z]*.py") if path.stem != "ours")
        for peer in peers:
            if peer.partition(":")[0] not in known:
                parser.error(f"--peers: {peer!r} is not known; choose from {', '.join(known)}")
    elif case.with_others:
        say_missing()
    results = take_turns(peers, job, rounds=args.rounds)
    print(f"{args.case}: {case.about}; {job['steps']} steps, rounds: {args.rounds}")
    print_table(results, COLUMNS, ratio_of="us")
    write(args.json, "benchmarks.step", args.case, results)


if __name__ == "__main__":
    main()

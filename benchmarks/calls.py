"""Python calls per step: ``python -m benchmarks.calls``. A count, so it is the same in each run and on each machine.

It includes the calls of torch and of the dataset. The plain loop is the baseline.
"""

import sys

from benchmarks.rounds import OURS, TITLES, installed_peers, parser_of, run, say_missing, write

MODES = {
    "any data set": ("samples", ("plain", "plain:fused", *OURS)),
    "data set with __getitems__": ("batches", ("plain:fetch", *OURS)),
    "TensorDataset": ("tensors", ("plain", "objects")),
    "columns": ("columns", OURS),
    "graph mode, columns": ("columns", ("objects:graph", "config:graph")),
}


def main() -> None:
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--data", choices=MODES, action="append", help="only these rows; may be repeated")
    parser.add_argument("--ours", action="store_true", help="skip the other trainers")
    args = parser.parse_args()
    results = []
    for title in args.data or MODES:
        data, peers = MODES[title]
        others = installed_peers() if data == "samples" and not args.ours else []
        print(f"\n{title}")
        for peer in [*peers, *others]:
            result = run(peer, {"model": "mlp", "data": data, "steps": args.steps, "counts": "calls"})
            results.append(result | {"round": 0, "data": data, "mode": title})
            print(f"  {TITLES.get(peer, peer):40}{_format(result)}")
            sys.stdout.flush()
    if not args.ours:
        say_missing()
    write(args.json, "benchmarks.calls", "", results)


def _format(result: dict[str, object]) -> str:
    if "calls" not in result:
        return f"failed: {result.get('error')}"
    packages = result["packages"]
    assert isinstance(packages, dict)
    parts = ", ".join(f"{name} {count:.0f}" for name, count in packages.items() if count >= 3)
    return f"{result['calls']:6.0f}   {parts}"


if __name__ == "__main__":
    main()

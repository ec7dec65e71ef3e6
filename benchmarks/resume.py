"""The cost of a resume within an epoch: ``python -m benchmarks.resume``.

A training is stopped at three quarters of an epoch of 2 million samples. Another process resumes it: measured are the
seconds from the start of building the objects (after the imports) to the first new forward pass, and the number of
samples read until then. A batch is 64 samples.
"""

import os
import tempfile
from typing import Any

from benchmarks.rounds import OURS, installed_peers, parser_of, print_table, run, write

BATCH = 64
ABLE = (
    "accelerate",
    "transformers",
    "lightning",
)  # peers with an adapter that can resume within an epoch


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--samples", type=int, default=2_000_000)
    parser.add_argument("--peers", help="separated by commas")
    args = parser.parse_args()
    steps = args.samples // BATCH
    job: dict[str, Any] = {"model": "mlp", "batch": BATCH, "samples": args.samples, "steps": steps, "log_every": 1000}
    peers = args.peers.split(",") if args.peers else [*OURS, *(peer for peer in installed_peers() if peer in ABLE)]
    results = []
    with tempfile.TemporaryDirectory() as root:
        folders = {peer: f"{root}/{number}" for number, peer in enumerate(peers)}
        for peer, folder in folders.items():
            os.makedirs(folder)
            stopped = run(peer, job | {"folder": folder, "stop_at": steps * 3 // 4})
            if "error" in stopped:
                print(f"{peer}: {stopped['error']}")
        for number in range(args.rounds):
            for peer, folder in folders.items():
                result = run(peer, job | {"resume": folder, "ends_at_first_step": True})
                results.append(result | {"name": peer, "round": number})
    print(f"{args.samples:,} samples, stopped at three quarters of the epoch")
    print_table(results, {"s": ("seconds", 2), "read": ("samples read", 0)}, ratio_of="s", base=peers[0])
    write(args.json, "benchmarks.resume", "", results)


if __name__ == "__main__":
    main()

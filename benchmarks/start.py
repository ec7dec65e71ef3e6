"""Startup times: ``python -m benchmarks.start``.

Each row is a process of its own, timed from its start to its end, or to the end of its first step; the processes
alternate. An extra first round, which is not counted, reads the files of all packages into the page cache.
"""

import subprocess
import sys
import time
from typing import Any

from benchmarks.graph import first_step_s
from benchmarks.rounds import OURS, environment, installed_peers, parser_of, print_table, run, say_missing, write

HELP = "import sys; sys.argv = ['trainwright', '--help']; from trainwright.cli.main import main; main()"
IMPORTS = {
    "import torch": "import torch",
    "import trainwright": "import trainwright",
    "from trainwright import Trainer": "from trainwright import Trainer",
    "from trainwright import DefaultTrainer": "from trainwright import DefaultTrainer",
    "trainwright --help": HELP,
}
OTHERS = {
    "accelerate": "from accelerate import Accelerator",
    "transformers": "from transformers import Trainer",
    "lightning": "from lightning import Trainer",
    "composer": "from composer import Trainer",
    "mmengine": "from mmengine.runner import Runner",
    "ignite": "from ignite.engine import create_supervised_trainer",
    "keras": "import keras",
}
FIRST_STEP = {"model": "mlp", "steps": 2}


def seconds_of(program: str) -> float:
    """From the start of a process to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], env=environment(), stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def first_step(peer: str) -> dict[str, Any]:
    """From the start of a process to the end of its first step, which is when the second one reads its first sample."""
    result = run(peer, FIRST_STEP)
    return result if "error" in result else result | {"s": first_step_s(result)}


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--ours", action="store_true", help="skip the other trainers")
    args = parser.parse_args()
    others = [] if args.ours else installed_peers()
    programs = IMPORTS | {OTHERS[name]: OTHERS[name] for name in others if name in OTHERS}
    trainers = ["plain", *OURS, *others]
    imports: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for number in range(-1, args.rounds):
        done = [{"name": name, "round": number, "s": seconds_of(program)} for name, program in programs.items()]
        reached = [first_step(peer) | {"round": number} for peer in trainers]
        if number >= 0:
            imports, steps = imports + done, steps + reached
    print("From the start of a process to its end")
    print_table(imports, {"s": ("seconds", 2)}, ratio_of="s", base="import torch")
    print("\nFrom the start of a process to the end of its first step")
    print_table(steps, {"s": ("seconds", 2), "peak_mib": ("peak MiB", 0)}, ratio_of="s")
    if not args.ours:
        say_missing()
    steps = [result | {"name": f"first step: {result['name']}"} for result in steps]
    write(args.json, "benchmarks.start", "", [*imports, *steps])


if __name__ == "__main__":
    main()

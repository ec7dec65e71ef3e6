"""The cost of the hardest samples: an evaluation with and without them.

    python -m benchmarks.hardest
    python -m benchmarks.hardest --rounds 100 --json bench-out/hardest.json

Both run in one process and take turns, so that a slowdown of the machine affects both. The CPU time of the process is
read. One thread. The tiny model shows the overhead of a batch, the ResNet-18 what it is worth in practice.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.models import MLP, resnet18
from trainwright import Trainer, TrainingConfig
from trainwright.evaluation.hardest_samples.search import HardestSamples

BATCH = 32
CASES = {  # model, shape of a sample, batches of an evaluation
    "tiny MLP": (MLP, (32,), 200),
    "MLP of 3 million": (
        lambda: nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10)),
        (1024,),
        20,
    ),
    "ResNet-18": (resnet18, (3, 32, 32), 4),
}


def measured(case: str, rounds: int, folder: str) -> dict[str, float]:
    """CPU microseconds of a batch without and with the hardest samples, and quartiles of the ratio."""
    build, shape, batches = CASES[case]
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCH * batches, *shape), torch.randint(10, (BATCH * batches,)))
    config = TrainingConfig(output_dir=folder, batch_size=BATCH, early_stopping=None, tensorboard=None)
    trainer = Trainer(build(), config, data, data)
    hardest = HardestSamples(20, lambda rows, data: None)

    def cpu_us(around: AbstractContextManager[Any]) -> float:
        start = time.process_time()
        with around:
            trainer.evaluate()
        return (time.process_time() - start) * 1e6 / batches

    pairs = []
    for number in range(rounds + 1):
        kinds = [nullcontext(), hardest.watching()]
        times = [cpu_us(kind) for kind in (reversed(kinds) if number % 2 else kinds)]
        pairs.append(times[::-1] if number % 2 else times)
    pairs = pairs[1:]  # the first one warms up
    low, middle, high = statistics.quantiles([after / before for before, after in pairs], n=4)
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {"without_us": before, "with_us": after, "ratio": middle, "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("trainwright").setLevel(logging.WARNING)
    found = {}
    print(f"{'CPU us a batch':20} {'without':>9} {'with':>9} {'ratio (quartiles)':>22}")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            row = found[case] = measured(case, arguments.rounds, folder)
        ratio = f"{row['ratio']:.3f} ({row['low']:.3f}-{row['high']:.3f})"
        print(f"{case:20} {row['without_us']:9.0f} {row['with_us']:9.0f} {ratio:>22}", flush=True)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

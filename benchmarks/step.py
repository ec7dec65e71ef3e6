"""Microseconds per step of a tiny model: a hand-written PyTorch loop and our trainers, in turn, in one run.

    python -m benchmarks.step [--steps 1000] [--rounds 5]

The time of a step is the time between two calls of the collate function, so it holds everything a step does: fetching,
forward, backward, update, hooks. All run on one thread. Read the ratio; the microseconds are those of this machine now.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from trainwright import DefaultTrainer, LazyCall
from trainwright.engine import EagerTrainer
from trainwright.engine.setup import log_to_console

BATCH, FEATURES, HIDDEN, CLASSES = 32, 32, 64, 10
LOG_EVERY = 50


class Samples(Dataset):
    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, FEATURES, generator=generator)
        self.y = torch.randint(CLASSES, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(x), labels)}


class Clock:
    """A collate function that notes when it is called."""

    def __init__(self) -> None:
        self.times: list[int] = []

    def __call__(self, samples: list[Any]) -> Any:
        self.times.append(time.perf_counter_ns())
        return default_collate(samples)

    def steps_us(self, warm: int) -> list[float]:
        gaps = [(b - a) / 1e3 for a, b in zip(self.times, self.times[1:], strict=False)]
        return gaps[warm:]


def parts(steps: int) -> tuple[MLP, DataLoader, torch.optim.Optimizer, Clock]:
    torch.manual_seed(0)
    model, clock = MLP(), Clock()
    loader = DataLoader(Samples(steps * BATCH), BATCH, shuffle=True, collate_fn=clock)
    return model, loader, torch.optim.Adam(model.parameters(), lr=1e-3), clock


def plain_loop(steps: int, folder: Path) -> Clock:
    model, loader, optimizer, clock = parts(steps)
    with open(folder / "log.txt", "w") as log:
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            if step % LOG_EVERY == 0:
                log.write(f"{step} {loss.item()}\n")
    return clock


def eager_trainer(steps: int, folder: Path) -> Clock:
    model, loader, optimizer, clock = parts(steps)
    EagerTrainer(model, loader, optimizer).train(0, steps)
    return clock


def config_door(steps: int, folder: Path) -> Clock:
    """With its default hooks: timer, schedule, checkpoints, metrics.json, TensorBoard, console."""
    model, loader, optimizer, clock = parts(steps)
    cfg = OmegaConf.create(flags={"allow_objects": True})
    cfg.model, cfg.optim, cfg.dataloader = model, optimizer, LazyCall(dict)(train=loader)
    cfg.train = {"output_dir": str(folder), "train_iter": steps, "log_period": LOG_EVERY}
    DefaultTrainer(cfg).train()
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    log_to_console()
    import logging

    logging.getLogger("trainwright").setLevel(logging.WARNING)

    cases: dict[str, Callable[[int, Path], Clock]] = {
        "plain loop": plain_loop,
        "EagerTrainer, no hooks": eager_trainer,
        "config door, default hooks": config_door,
    }
    medians: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, run in cases.items():
            with tempfile.TemporaryDirectory() as folder:
                clock = run(args.steps, Path(folder))
            medians[name].append(statistics.median(clock.steps_us(warm=args.steps // 10)))
    plain = medians["plain loop"]
    print(f"{'':28} us a step (min - max)      ratio to the plain loop of the same round")
    for name, values in medians.items():
        ratios = [ours / theirs for ours, theirs in zip(values, plain, strict=True)]
        print(
            f"{name:28} {statistics.median(values):6.0f} ({min(values):.0f} - {max(values):.0f})"
            f"          {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()

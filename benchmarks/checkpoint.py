"""What a save costs a training: ``python -m benchmarks.checkpoint``.

A model of 100.7 million parameters with Adam state, 1.21 GB, steps of some 0.3 s on one thread. Three ways take turns
in one run: `torch.save`, our save, our save without the background. For each: how long the step that saves is longer
than the others (the stall), how much slower the steps are while the save is being written, and the peak memory.
"""

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from trainwright.checkpoint import Checkpointer

WIDTH, LAYERS = 1024, 96  # 96 x (1024 x 1024 + 1024) = 100.8 million parameters
BATCH = 64


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> float:
    start = time.perf_counter()
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


class PeakMemory:
    """The highest resident memory, in MiB, sampled beside the training (a process has only one peak otherwise)."""

    def __enter__(self) -> "PeakMemory":
        self.mib = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        page = resource.getpagesize()
        while not self._end.wait(0.005):
            self.mib = max(self.mib, int(Path("/proc/self/statm").read_text().split()[1]) * page / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where checkpoints go; by default a temporary folder")
    args = parser.parse_args()
    root = Path(args.folder or tempfile.mkdtemp())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    model, optimizer = make()
    inputs = torch.randn(BATCH, WIDTH)
    for _ in range(3):
        step(model, optimizer, inputs)

    beside = Checkpointer(model, root / "beside", optimizer=optimizer)
    waiting = Checkpointer(model, root / "waiting", asynchronous=False, optimizer=optimizer)
    beside.prepare()
    beside.wait()
    number = 0

    def torch_save() -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, root / "torch.pt")

    def save(checkpointer: Checkpointer) -> Callable[[], None]:
        def call() -> None:
            nonlocal number
            number += 1
            checkpointer.save("model_0000001", iteration=number)

        return call

    ways = {"torch.save": torch_save, "asynchronous": save(beside), "synchronous": save(waiting)}
    held: dict[str, list[float]] = {name: [] for name in ways}
    stalls: dict[str, list[float]] = {name: [] for name in ways}
    slower: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, way in ways.items():
            alone = statistics.median(step(model, optimizer, inputs) for _ in range(5))
            with PeakMemory() as peak:
                start = time.perf_counter()
                way()
                held[name].append(time.perf_counter() - start)
                step(model, optimizer, inputs)
                stalls[name].append(time.perf_counter() - start - alone)
                after = [step(model, optimizer, inputs) for _ in range(5)]
            slower[name].append(statistics.median(after) / alone)
            beside.wait()
            peaks[name] = max(peaks.get(name, 0.0), peak.mib)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, a step of {alone:.3f} s, {args.rounds} rounds")
    print(f"{'':14}{'call holds':>12}{'stall':>12}{'worst stall':>14}{'steps after':>14}{'peak MiB':>10}")
    for name in ways:
        print(
            f"{name:14}{statistics.median(held[name]):10.3f} s{statistics.median(stalls[name]):10.3f} s"
            f"{max(stalls[name]):12.3f} s{statistics.median(slower[name]):13.2f}x{peaks[name]:10.0f}"
        )
    ratio = statistics.median(stalls["torch.save"]) / statistics.median(stalls["asynchronous"])
    print(f"asynchronous stall: 1/{ratio:.0f} of torch.save's")
    if args.folder is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()

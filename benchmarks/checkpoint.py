"""The cost of saves and loads: ``python -m benchmarks.checkpoint``.

A model of 100.7 million parameters with Adam state, 1.21 GB, steps of about 0.3 s on one thread. Three methods
alternate in one run: `torch.save`, our asynchronous save, our synchronous save. For each: how much longer the step that
saves takes (the stall), how much slower the steps are during the write, and the peak memory. Then methods to load, into
the existing model and optimizer, with files in the page cache. ``--device cuda`` runs on a GPU, where the copy to
pinned memory overlaps the next step.
"""

import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rounds import parser_of, write
from trainwright.checkpoint import Checkpointer, verify

WIDTH = 1024
BATCH = 64


class Training:
    """Layers of 1024 x 1024 + 1024 parameters, and Adam; 96 of them have 100.8 million."""

    def __init__(self, layers: int, device: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        self.inputs: Tensor = torch.randn(BATCH, WIDTH, device=device)
        self._wait = torch.cuda.synchronize if device.startswith("cuda") else _nothing

    def step(self) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - start

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def take(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._wait()


class PeakMemory:
    """Peak resident memory in MiB, sampled in a thread (the system has only one peak for a process)."""

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
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--folder", help="where checkpoints go; by default a temporary folder")
    parser.add_argument("--layers", type=int, default=96, help="1.05 million parameters each")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    root = Path(args.folder or tempfile.mkdtemp())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    try:
        training = Training(args.layers, args.device)
        saves = measure_saves(training, root, args.rounds)
        results = saves + measure_loads(training, root, args.rounds)
    finally:
        if args.folder is None:
            shutil.rmtree(root)
    print_saves(saves)
    print_loads(results[len(saves) :])
    write(args.json, "benchmarks.checkpoint", args.device, results)


def measure_saves(training: Training, root: Path, rounds: int) -> list[dict[str, Any]]:
    for _ in range(3):
        training.step()
    beside = Checkpointer(training.model, root / "beside", optimizer=training.optimizer)
    waiting = Checkpointer(training.model, root / "waiting", asynchronous=False, optimizer=training.optimizer)
    beside.prepare()
    beside.wait()
    number = 0

    def save(checkpointer: Checkpointer) -> Callable[[], None]:
        def call() -> None:
            nonlocal number
            number += 1
            checkpointer.save("model_0000001", iteration=number)

        return call

    ways: dict[str, Callable[[], None]] = {
        "torch.save": lambda: torch.save(training.state(), root / "torch.pt"),
        "asynchronous": save(beside),
        "synchronous": save(waiting),
    }
    results = []
    for round_number in range(rounds):
        for name, way in ways.items():
            alone = statistics.median(training.step() for _ in range(5))
            with PeakMemory() as peak:
                start = time.perf_counter()
                way()
                held = time.perf_counter() - start
                training.step()
                stall = time.perf_counter() - start - alone
                after = [training.step() for _ in range(5)]
            beside.wait()
            metrics = {"held_s": held, "stall_s": stall, "slower": statistics.median(after) / alone}
            results.append({"name": name, "round": round_number, "step_s": alone, "peak_mib": peak.mib, **metrics})
    return results


def measure_loads(training: Training, root: Path, rounds: int) -> list[dict[str, Any]]:
    ours = Checkpointer(training.model, root / "beside", optimizer=training.optimizer)
    folder = root / "beside" / "model_0000001"
    ways: dict[str, Callable[[], object]] = {
        "torch.load": lambda: training.take(torch.load(root / "torch.pt")),
        "torch.load, mmap": lambda: training.take(torch.load(root / "torch.pt", mmap=True)),
        "ours: verify and load": lambda: ours.load(folder),
        "ours: verify": lambda: verify(folder),
        "ours: verify --deep": lambda: verify(folder, deep=True),
    }
    results = []
    for round_number in range(-1, rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if round_number >= 0:
                results.append({"name": name, "round": round_number, "load_s": time.perf_counter() - start})
    return results


def print_saves(results: list[dict[str, Any]]) -> None:
    def middle(name: str, metric: str) -> float:
        return statistics.median(_of(results, name, metric))

    print(f"a step of {statistics.median(result['step_s'] for result in results):.3f} s")
    print(f"{'':14}{'call holds':>12}{'stall':>12}{'worst stall':>14}{'steps after':>14}{'peak MiB':>10}")
    for name in dict.fromkeys(result["name"] for result in results):
        print(
            f"{name:14}{middle(name, 'held_s'):10.3f} s{middle(name, 'stall_s'):10.3f} s"
            f"{max(_of(results, name, 'stall_s')):12.3f} s{middle(name, 'slower'):13.2f}x"
            f"{max(_of(results, name, 'peak_mib')):10.0f}"
        )
    stall = middle("asynchronous", "stall_s")
    if stall > 0:
        print(f"asynchronous stall: 1/{middle('torch.save', 'stall_s') / stall:.0f} of torch.save's")
    else:
        print("asynchronous stall: below the noise of a step; use more --rounds")


def print_loads(results: list[dict[str, Any]]) -> None:
    print(f"\n{'':24}{'seconds':>10}{'longest':>10}")
    for name in dict.fromkeys(result["name"] for result in results):
        seconds = _of(results, name, "load_s")
        print(f"{name:24}{statistics.median(seconds):10.3f}{max(seconds):10.3f}")


def _of(results: list[dict[str, Any]], name: str, metric: str) -> list[float]:
    return [result[metric] for result in results if result["name"] == name]


def _nothing() -> None:
    """Do nothing: operations on a CPU are synchronous."""


if __name__ == "__main__":
    main()

"""A step of several processes against a plain torch script of the same layout.

    python -m benchmarks.ranks                                # two processes (gloo), a tiny model and one of 10 M
    python -m benchmarks.ranks --case tiny --apis objects --rounds 3

Both run in the same processes: after each block of our iterations, a hook runs as many steps of the plain script, so
the load of the machine affects both. The ratio is that of the median step of each block and of its neighbor; the table
shows the median over all blocks, with the smallest and the largest. ``mean`` is the ratio of complete blocks, with
their log lines. Every layout of ``LAYOUTS`` is a plain script (a function that returns its step) and the settings of
our two APIs for it.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.rounds import parser_of, print_table, run, write
from benchmarks.worker import print_result

CASES: dict[str, dict[str, Any]] = {
    "tiny": {"model": "mlp", "steps": 2000, "batch": 32, "log_every": 50},
    "10m": {"model": "gpt", "steps": 60, "batch": 8, "log_every": 10},
}
COLUMNS = {"ratio": ("ratio of a step", 3), "mean_ratio": ("ratio of the mean", 3), "us": ("us a step", 0)}


def ddp(job: Any) -> Callable[[], None]:
    """Data parallelism as a user writes it: DistributedSampler, DistributedDataParallel, fused Adam, a log line."""
    import torch

    dataset = job.dataset()
    loader = job.loader(dataset=dataset, sampler=torch.utils.data.DistributedSampler(dataset))
    model = torch.nn.parallel.DistributedDataParallel(job.model_with_loss())
    return _step_of(job, model, job.optimizer(model.parameters(), fused=True), loader)


def zero(job: Any, stage: int) -> Callable[[], None]:
    """FSDP2 as a user writes it: each layer and the rest are sharded; stages 1 and 2 keep the weights gathered."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DistributedSampler

    dataset = job.dataset()
    loader, model = job.loader(dataset=dataset, sampler=DistributedSampler(dataset)), job.model_with_loss()
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in [layer for layers in lists for layer in layers]:
        fully_shard(layer, reshard_after_forward=stage == 3)
    fully_shard(model, reshard_after_forward=stage == 3)
    return _step_of(job, model, job.optimizer(model.parameters(), fused=True), loader)


def _step_of(job: Any, model: Any, optimizer: Any, loader: Any) -> Callable[[], None]:
    batches, step = iter(loader), 0

    def run_step() -> None:
        nonlocal step
        loss = model(**next(batches))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % job.log_every == 0:
            job.log(step, loss.item())

    return run_step


@dataclass(frozen=True)
class Layout:
    """A plain script, and the settings of TrainingConfig and of ``cfg.train`` for the same layout."""

    ranks: int
    build: Callable[[Any], Callable[[], None]]
    objects: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def _zero(stage: int) -> Layout:
    settings = {"zero_optimization": {"enabled": True, "stage": stage}}
    return Layout(2, partial(zero, stage=stage), {"zero_stage": stage}, settings)


LAYOUTS = {"ddp": Layout(2, ddp), "zero1": _zero(1), "zero3": _zero(3)}


def alternate(job: Any, plain: Callable[[], Callable[[], None]]) -> tuple[Any, dict[str, list[list[float]]]]:
    """A hook that times our steps and runs blocks of the plain script, and the times of both: blocks of seconds."""
    from trainwright.hooks import HookBase

    times: dict[str, list[list[float]]] = {"ours": [], "plain": []}

    class Alternate(HookBase):
        def before_train(self) -> None:
            self.run_plain, self.block, self.last = plain(), list[float](), 0.0

        def after_step(self) -> None:
            now = time.perf_counter()
            if self.last:
                self.block.append(now - self.last)
            if len(self.block) == job.log_every:
                times["ours"].append(self.block)
                times["plain"].append([timed(self.run_plain) for _ in range(job.log_every)])
                self.block = []
            self.last = time.perf_counter()

    return Alternate(), times


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(api: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with one of our APIs, and the plain script between its blocks."""
    import importlib
    import tempfile

    from benchmarks.job import Job

    layout = LAYOUTS[settings.pop("layout")]
    with tempfile.TemporaryDirectory() as own:
        # One folder for all processes, which share a checkpoint.
        folder = own if layout.build is ddp else f"{tempfile.gettempdir()}/ranks-{os.environ['MASTER_PORT']}"
        job = Job(folder=folder, settings=layout.objects if api == "objects" else layout.config, **settings)
        hook, times = alternate(job, lambda: layout.build(job))
        job.hooks.append(hook)
        importlib.import_module(f"benchmarks.peers.{api}").train(job, "")
    blocks = [*zip(times["ours"], times["plain"], strict=True)][1:]  # the first block warms up
    return {
        "name": api,
        "ratio": statistics.median(statistics.median(ours) / statistics.median(plain) for ours, plain in blocks),
        "mean_ratio": statistics.median(sum(ours) / sum(plain) for ours, plain in blocks),
        "us": statistics.median(second for ours, _ in blocks for second in ours) * 1e6,
        "plain_us": statistics.median(second for _, plain in blocks for second in plain) * 1e6,
    }


def main() -> None:
    parser = parser_of(__doc__, rounds=2)
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp", help="the plain script to compare with")
    parser.add_argument("--case", choices=CASES, help="by default all of them")
    parser.add_argument("--steps", type=int, help="iterations of each training")
    parser.add_argument("--apis", default="objects,config", help="objects (Trainer), config (DefaultTrainer)")
    args = parser.parse_args()
    for case in [args.case] if args.case else CASES:
        settings = CASES[case] | {"layout": args.layout, "ranks": LAYOUTS[args.layout].ranks}
        settings |= {"steps": args.steps} if args.steps else {}
        results: list[dict[str, Any]] = []
        for number in range(args.rounds):
            for api in args.apis.split(","):
                result = run(api, settings, module="benchmarks.ranks") | {"round": number}
                results.append(result)
                if "plain_us" in result:
                    results.append({"name": "plain", "round": number, "us": result["plain_us"]})
        print(f"{args.layout}, {case}: {settings['ranks']} processes, {settings['steps']} steps")
        print_table(results, COLUMNS, ratio_of="us")
        write(args.json, "benchmarks.ranks", f"{args.layout}_{case}", results)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].startswith("{"):
        print_result(measure(sys.argv[1], json.loads(sys.argv[2])))
    else:
        main()

"""A step of several processes against a plain torch script of the same layout.

    python -m benchmarks.ranks                                # two processes (gloo), a tiny model and one of 10 M
    python -m benchmarks.ranks --layout tp2 --case tiny --apis objects --rounds 3

Both run in the same processes: after each block of our iterations, a hook runs as many steps of the plain script, so
the load of the machine affects both. The ratio is that of the median step of each block and of its neighbor; the table
shows the median over all blocks, with the smallest and the largest. ``mean`` is the ratio of complete blocks, with
their log lines; ``CPU`` that of the CPU time of this process, which the load of the machine affects less.

Every layout of ``LAYOUTS`` is a plain script (a function that returns its step) and the settings of our two APIs for
it. Tensor and pipeline parallel have a GPT of their own that can be split; their steps with a pipeline have 4
micro-batches.
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

import torch

from benchmarks.models import SplitGPT, loss_of
from benchmarks.rounds import parser_of, print_table, run, write
from benchmarks.worker import folder_of_run, print_result

CASES: dict[str, dict[str, Any]] = {
    "tiny": {"model": "mlp", "steps": 2000, "batch": 32, "log_every": 50},
    "10m": {"model": "gpt", "steps": 60, "batch": 8, "log_every": 10},
}
SPLIT_MODELS = {"tiny": "gpt_split_tiny", "10m": "gpt_split"}
MICRO_BATCHES = 4  # of a step of a pipeline
COLUMNS = {
    "ratio": ("ratio of a step", 3),
    "mean_ratio": ("ratio of the mean", 3),
    "cpu_ratio": ("ratio of CPU time", 3),
    "us": ("us a step", 0),
}


def ddp(job: Any) -> Callable[[], None]:
    """Data parallelism as a user writes it: DistributedSampler, DistributedDataParallel, fused Adam, a log line."""
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


def tensor_parallel(job: Any) -> Callable[[], None]:
    """``parallelize_module`` as a user writes it: both processes read the same batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = job.model_with_loss(), init_device_mesh("cpu", (2,))
    words = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    parallelize_module(model, mesh, {name: words[word]() for name, word in model.tensor_plan.items()})
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    others = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    # The fused kernel takes no list of both.
    optimizer = job.optimizer([{"params": split}, {"params": others}], fused=True)
    return _step_of(job, model, optimizer, job.loader(generator=torch.Generator().manual_seed(0)))


class Stage(torch.nn.Module):
    """Half of the layers of a `SplitGPT`, with what is before or after them."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        half, self.rank = len(model.layers) // 2, rank
        self.layers = model.layers[:half] if rank == 0 else model.layers[half:]
        names = ("words", "places") if rank == 0 else ("norm", "head")
        for name in names:
            setattr(self, name, getattr(model, name))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = SplitGPT.before_layers(self, x) if self.rank == 0 else x  # type: ignore[arg-type]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden if self.rank == 0 else SplitGPT.after_layers(self, hidden, None)  # type: ignore[arg-type]


def pipeline_parallel(job: Any) -> Callable[[], None]:
    """A 1F1B schedule as a user writes it: a step is the micro-batches of one update."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, loader = int(os.environ["RANK"]), job.loader(generator=torch.Generator().manual_seed(0))
    model = Stage(job.model_with_loss(), rank)
    schedule = Schedule1F1B(PipelineStage(model, rank, 2, torch.device("cpu")), job.accumulation, loss_of)
    optimizer, batches, step = job.optimizer(model.parameters(), fused=True), iter(loader), 0

    def run_step() -> None:
        nonlocal step
        read = [next(batches) for _ in range(job.accumulation)]
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(torch.cat([batch["x"] for batch in read]))
        else:
            schedule.step(target=torch.cat([batch["labels"] for batch in read]), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 1 and step % job.log_every == 0:
            job.log(step, torch.stack(losses).mean().item())

    return run_step


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
    micro_batches: int = 1  # of a step
    is_split: bool = False  # all processes read the same batches

    def job(self, case: str, steps: int | None) -> dict[str, Any]:
        """The settings of a `Job`."""
        settings = CASES[case] | {"ranks": self.ranks, "accumulation": self.micro_batches}
        settings["steps"] = (steps or settings["steps"]) * self.micro_batches
        if self.is_split:
            settings |= {"model": SPLIT_MODELS[case], "samples": settings["steps"] * settings["batch"]}
            settings["log_every"] = 20  # as train.log_period; steps of DTensors take ten times as long
        return settings


def _zero(stage: int) -> Layout:
    settings = {"zero_optimization": {"enabled": True, "stage": stage}}
    return Layout(2, partial(zero, stage=stage), {"zero_stage": stage}, settings)


def _split(build: Callable[[Any], Callable[[], None]], name: str, micro_batches: int = 1) -> Layout:
    return Layout(2, build, {name: 2}, {"dist": {name: 2}}, micro_batches, is_split=True)


LAYOUTS = {
    "ddp": Layout(2, ddp),
    "zero1": _zero(1),
    "zero3": _zero(3),
    "tp2": _split(tensor_parallel, "tensor_parallel_size"),
    "pp2": _split(pipeline_parallel, "pipeline_parallel_size", MICRO_BATCHES),
}


def alternate(job: Any, plain: Callable[[], Callable[[], None]]) -> tuple[Any, dict[str, list[list[float]]]]:
    """A hook that times our steps and runs blocks of the plain script, and the times of both: blocks of seconds."""
    from trainwright.hooks import HookBase

    times: dict[str, list[list[float]]] = {"ours": [], "plain": [], "cpu": []}

    class Alternate(HookBase):
        def before_train(self) -> None:
            self.run_plain, self.block, self.last, self.cpu = plain(), list[float](), 0.0, 0.0

        def after_step(self) -> None:
            now = time.perf_counter()
            if self.last:
                self.block.append(now - self.last)
            if len(self.block) == job.log_every:
                cpu = time.process_time()
                times["ours"].append(self.block)
                times["plain"].append([timed(self.run_plain) for _ in range(job.log_every)])
                times["cpu"].append([cpu - self.cpu, time.process_time() - cpu])
                self.block = []
            if not self.block:
                self.cpu = time.process_time()
            self.last = time.perf_counter()

    return Alternate(), times


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(api: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with one of our APIs, and the plain script between its blocks."""
    import importlib

    from benchmarks.job import Job

    layout = LAYOUTS[settings.pop("layout")]
    given = layout.config
    if api == "objects":  # whose periods count micro-batches
        given = layout.objects | {"log_steps": settings["log_every"] * layout.micro_batches}
    with folder_of_run() as folder:
        job = Job(folder=folder, settings=given, **settings)
        hook, times = alternate(job, lambda: layout.build(job))
        job.hooks.append(hook)
        importlib.import_module(f"benchmarks.peers.{api}").train(job, "")
    blocks = [*zip(times["ours"], times["plain"], strict=True)][1:]  # the first block warms up
    return {
        "name": api,
        "ratio": statistics.median(statistics.median(ours) / statistics.median(plain) for ours, plain in blocks),
        "mean_ratio": statistics.median(sum(ours) / sum(plain) for ours, plain in blocks),
        "cpu_ratio": statistics.median(ours / plain for ours, plain in times["cpu"][1:]),
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
        settings = LAYOUTS[args.layout].job(case, args.steps) | {"layout": args.layout}
        results: list[dict[str, Any]] = []
        for number in range(args.rounds):
            for api in args.apis.split(","):
                result = run(api, settings, module="benchmarks.ranks") | {"round": number}
                results.append(result)
                if "plain_us" in result:
                    results.append({"name": "plain", "round": number, "us": result["plain_us"]})
        print(f"{args.layout}, {case}: {settings['ranks']} processes, {args.steps or CASES[case]['steps']} steps")
        print_table(results, COLUMNS, ratio_of="us")
        write(args.json, "benchmarks.ranks", f"{args.layout}_{case}", results)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].startswith("{"):
        print_result(measure(sys.argv[1], json.loads(sys.argv[2])))
    else:
        main()

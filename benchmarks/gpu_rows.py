"""A row of ``benchmarks.gpu_table`` in a process of its own: ``python -m benchmarks.gpu_rows saves '{"tiny": false}'``.

Each function takes the settings, measures on their device, and returns a ``Found``. In rows of several processes, each
process runs the function.
"""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.checkpoint import Training, measure_saves
from benchmarks.models import MLP, WithLoss, random_data
from benchmarks.worker import folder_of_run, print_result
from trainwright import Trainer, TrainingConfig
from trainwright.checkpoint import Checkpointer
from trainwright.data import ColumnDataset
from trainwright.data.prefetch import ahead
from trainwright.hooks import HookBase
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig
from trainwright.parallel import setup_dist_util
from trainwright.parallel.data_parallel import shut_down

# Of a GPT, by whether it is tiny: words, length of a text, width, layers, steps, texts in a batch.
SIZES = {True: (32, 12, 16, 4, 5, 8), False: (8192, 512, 768, 12, 24, 32)}
LOSS_TOLERANCE = 1e-4  # of float32 losses on one device, computed in another order


@dataclass(frozen=True)
class Settings:
    """``tiny``: sizes for a test of the program itself, which are too small to measure speed.

    ``layout``: settings of ``TrainingConfig``; ``expected``: losses of the same training in one process.
    """

    device: str = "cuda"
    tiny: bool = False
    ranks: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    expected: Sequence[float] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Found:
    """``result``: what was measured; ``expected``: what it must be; ``losses``: for rows that are compared with it."""

    result: str
    expected: str
    passed: bool
    losses: Sequence[float] = ()


def collectives(settings: Settings) -> Found:
    """Sum, gather, scatter and broadcast tensors between the processes; time the sum."""
    backend = "nccl" if settings.on_gpu else "gloo"
    if settings.ranks == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        device = torch.device(settings.device)
    else:
        device = setup_dist_util({"device_type": settings.device})
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(1.0, ranks + 1)
    summed = torch.full((2**10 if settings.tiny else 2**24,), rank + 1.0, device=device)
    dist.all_reduce(summed)
    gathered, scattered = torch.empty(ranks, device=device), torch.empty(1, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather(gathered, torch.full((1,), rank + 1.0, device=device))
    scatter(scattered, gathered)
    sent = torch.full((3,), float(rank), device=device)
    dist.broadcast(sent, 0)
    right = [
        bool((summed == numbers.sum()).all()),
        torch.equal(gathered.cpu(), numbers),
        scattered.item() == ranks * (rank + 1),
        not sent.any(),
    ]
    calls = 3 if settings.tiny else 20
    settings.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(summed)
    settings.synchronize()
    seconds = (time.perf_counter() - start) / calls
    speed = 2 * (ranks - 1) / ranks * summed.nbytes / seconds / 1e9
    shut_down()
    return Found(
        f"{backend}, processes: {ranks}; sum of {summed.nbytes / 2**20:.3g} MiB in {seconds * 1e3:.3f} ms"
        + (f", {speed:.1f} GB/s" if ranks > 1 else ""),
        "exact results of all_reduce, all_gather, reduce_scatter and broadcast",
        all(right),
    )


def prefetch(settings: Settings) -> Found:
    """Copy batches from pinned memory on a second stream while the previous one is used."""
    length, width, steps = (64, 64, 4) if settings.tiny else (4096, 4096, 30)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(length, width, generator=generator) for _ in range(4)]
    if settings.on_gpu:
        batches = [batch.pin_memory() for batch in batches]
    weight = torch.eye(width, device=settings.device)

    def run(read: Callable[[Sequence[Tensor]], Any]) -> tuple[list[Tensor], float]:
        sums, start = [], 0.0
        for number, batch in enumerate(read([batches[number % 4] for number in range(steps + 2)])):
            if number == 2:
                settings.synchronize()
                start = time.perf_counter()
            hidden = batch
            for _ in range(8):
                hidden = hidden @ weight
            sums.append(hidden.sum())
        settings.synchronize()
        return sums, (time.perf_counter() - start) / steps * 1e3

    device = torch.device(settings.device)
    plain, plain_ms = run(lambda items: (item.to(device) for item in items))
    ours, ours_ms = run(lambda items: ahead(items, device))
    return Found(
        f"{ours_ms:.3f} ms a step; {plain_ms:.3f} with copies before each step",
        "the same batches",
        torch.equal(torch.stack(plain), torch.stack(ours)),
    )


def saves(settings: Settings) -> Found:
    """Save asynchronously during the training, and load: the values are those at the time of the save."""
    training = Training(2 if settings.tiny else 96, settings.device)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "measured").mkdir()
        measured = {row["name"]: row for row in measure_saves(training, Path(folder, "measured"), 1)}
        checkpointer = Checkpointer(training.model, Path(folder, "compared"), optimizer=training.optimizer)
        checkpointer.prepare()
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        checkpointer.save("model_0000001", iteration=1)
        for _ in range(3):
            training.step()
        checkpointer.wait()
        checkpointer.load(Path(folder, "compared", "model_0000001"))
        is_equal = all(map(torch.equal, before, training.model.parameters()))
    stalls = {name: row["stall_s"] for name, row in measured.items()}
    size = sum(parameter.nbytes for parameter in training.model.parameters()) * 3 / 2**30
    return Found(
        f"{size:.3g} GiB: the step with the save takes {stalls['asynchronous']:.3f} s longer;"
        f" {stalls['torch.save']:.3f} s with torch.save",
        "the file holds the values before the next step, bitwise",
        is_equal,
    )


class LargeLoss(WithLoss):
    """Its scaled gradients are too large for float16 until the scaler has reduced its scale."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": 100 * super().forward(x, labels)["loss"]}


def fp16(settings: Settings) -> Found:
    """Train in float16: the scaler skips updates whose gradients overflow, and the others update the weights."""
    batch = _features(1).columns
    data = ColumnDataset(**{name: value.repeat(40, *[1] * (value.dim() - 1)) for name, value in batch.items()})
    losses, trainer = losses_of(LargeLoss(MLP()), settings, data, mixed_precision="fp16", learning_rate=1e-2)
    scale = trainer.run.grad_scaler.get_scale()
    return Found(
        f"scale 65536 → {scale:g}; loss {losses[0]:.1f} → {losses[-1]:.1f}",
        "a smaller scale, a finite and smaller loss",
        0 < scale < 65536 and losses[-1] < losses[0],
    )


def graph(settings: Settings) -> Found:
    """Graph mode and eager steps give the same losses."""
    steps = 12 if settings.tiny else 200
    torch.manual_seed(0)
    weights = MLP().state_dict()
    found = []
    for is_graph in (False, True):
        net = MLP()
        net.load_state_dict(weights)
        found.append(losses_of(WithLoss(net), settings, _features(steps), graph=is_graph)[0])
    worst = difference(*found)
    return Found(
        f"largest difference of {steps} losses: {worst:.1e}", f"<= {LOSS_TOLERANCE:g}", worst <= LOSS_TOLERANCE
    )


def trained_gpt(
    settings: Settings, *, hooks: Sequence[HookBase] = (), dropout: float = 0.0, **config: Any
) -> tuple[list[float], Any]:
    """The loss of each step of a GPT under ``settings.layout``, and the trainer."""
    with folder_of_run() as folder:
        return trained(build_gpt(gpt_config(settings, folder, **config), settings, dropout), settings, hooks)


def gpt_config(settings: Settings, folder: str, **config: Any) -> TrainingConfig:
    batch = SIZES[settings.tiny][5]
    shards = settings.layout.get("tensor_parallel_size", 1) * settings.layout.get("pipeline_parallel_size", 1)
    return config_of(settings, folder, batch_size=batch // (settings.ranks // shards), **settings.layout, **config)


def build_gpt(config: TrainingConfig, settings: Settings, dropout: float = 0.0) -> Any:
    words, length, width, layers, steps, batch = SIZES[settings.tiny]
    torch.manual_seed(0)
    model = GPTTextGeneration(
        GPTTextGenerationConfig(
            vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(2, width // 64),
            hidden_dropout_prob=dropout, max_position_embeddings=length,
        )
    )  # fmt: skip
    rows = torch.randint(words, (batch * steps, length))
    data = ColumnDataset(token_ids=rows, labels=rows)
    return Trainer(model, config, data, ColumnDataset(token_ids=rows[:batch], labels=rows[:batch]))


def layout(settings: Settings) -> Found:
    """Train a GPT under a layout of the processes."""
    losses, trainer = trained_gpt(settings)
    ms = trainer.record.ms_per_step
    mib = torch.cuda.max_memory_allocated() / 2**20 if settings.on_gpu else 0.0
    if settings.ranks > 1:
        largest = torch.tensor([mib, ms], device=trainer.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        mib, ms = largest.tolist()
        shut_down()
    return compared(settings, losses, f"{ms:.1f} ms a step" + (f", {mib:.0f} MiB a GPU" if settings.on_gpu else ""))


def compared(settings: Settings, losses: list[float], result: str) -> Found:
    """``result`` with the difference from the losses of one process, if these are known."""
    if not settings.expected:
        return Found(result, "trains", len(losses) == SIZES[settings.tiny][4], losses)
    worst, tolerance = difference(losses, settings.expected), 1e-3  # of matrix products in parts, over all updates
    return Found(f"{result}; losses differ by {worst:.1e}", f"losses within {tolerance:g}", worst <= tolerance, losses)


class Record(HookBase):
    """The loss of each step, on the device until the end, and milliseconds per step after the first ones."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self.losses, self._starts = settings, list[float](), list[float]()

    def after_step(self) -> None:
        storage = self.trainer.storage
        storage.reduce()
        self.losses.append(float(storage.latest()["total_loss"][0]))
        self._settings.synchronize()
        self._starts.append(time.perf_counter())

    @property
    def ms_per_step(self) -> float:
        counted = self._starts[len(self._starts) // 3 :]
        return (counted[-1] - counted[0]) / (len(counted) - 1) * 1e3


def _features(steps: int) -> ColumnDataset:
    x, labels = random_data("mlp", 32 * steps)
    return ColumnDataset(x=x, labels=labels)


def losses_of(model: nn.Module, settings: Settings, data: ColumnDataset, **config: Any) -> tuple[list[float], Any]:
    """The loss of each step of a training by ``Trainer``, and the trainer."""
    with folder_of_run() as folder:
        return trained(Trainer(model, config_of(settings, folder, **config), train_dataset=data), settings)


def config_of(settings: Settings, folder: str, **config: Any) -> TrainingConfig:
    fixed: dict[str, Any] = {"num_epochs": 1, "batch_size": 32, "optimizer": "adam", "learning_rate": 1e-3}
    quiet = {
        "save_enabled": False,
        "eval_strategy": "no",
        "metrics": [],
        "dataloader_shuffle": False,
        "log_steps": 10_000,
    }
    return TrainingConfig(**(fixed | quiet | {"device_str": settings.device, "output_dir": folder} | config))


def trained(trainer: Any, settings: Settings, hooks: Sequence[HookBase] = ()) -> tuple[list[float], Any]:
    trainer.record = Record(settings)
    trainer.register_hooks([*hooks, trainer.record])
    trainer.train()
    return trainer.record.losses, trainer


def difference(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    settings = Settings(**json.loads(sys.argv[2]))
    if sys.argv[1] in globals():
        measure = globals()[sys.argv[1]]
    else:
        from benchmarks import gpu_needs

        measure = getattr(gpu_needs, sys.argv[1])
    print_result(dataclasses.asdict(measure(settings)))


if __name__ == "__main__":
    main()

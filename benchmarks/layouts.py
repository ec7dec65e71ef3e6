"""Layouts of one model: difference of the losses to one process, and peak of tensors, estimated and measured.

    python -m benchmarks.layouts                                # all layouts, up to 8 processes (gloo)
    python -m benchmarks.layouts --updates 4 --layouts "2 data" "2 tensor"

Prints a Markdown table. Losses are those of 20 updates in float32 with the same global batches; each run on several
processes starts its own. The peak is counted on every process (``benchmarks.counted_peak``).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH, VOCABULARY, GLOBAL_BATCH = 64, 512, 16
PIPELINE = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4}

# Processes, and settings of TrainingConfig.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 data": (2, {}),
    "4 data, accumulation 2": (4, {"gradient_accumulation_steps": 2}),
    "2 data, ZeRO 1": (2, {"zero_stage": 1}),
    "2 data, ZeRO 2": (2, {"zero_stage": 2}),
    "2 data, ZeRO 3": (2, {"zero_stage": 3}),
    "4 data, ZeRO 3 in 2 copies": (4, {"zero_stage": 3, "replicate_size": 2}),
    "4 data, ZeRO 2 in 2 copies": (4, {"zero_stage": 2, "replicate_size": 2}),
    "2 tensor": (2, {"tensor_parallel_size": 2}),
    "2 tensor, sequence parallel": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "2 pipeline, 1F1B": (2, PIPELINE),
    "2 pipeline, GPipe": (2, PIPELINE | {"pipeline_schedule": "GPipe"}),
    "2 pipeline, interleaved 1F1B": (2, PIPELINE | {"pipeline_schedule": "Interleaved1F1B"}),
    "2 data (ZeRO 3) x 2 tensor": (4, {"zero_stage": 3, "tensor_parallel_size": 2}),
    "2 data (ZeRO 2) x 2 pipeline": (4, PIPELINE | {"zero_stage": 2}),
    "2 data x 2 tensor x 2 pipeline": (8, PIPELINE | {"tensor_parallel_size": 2}),
    "2 data (ZeRO 3) x 2 tensor x 2 pipeline": (8, PIPELINE | {"tensor_parallel_size": 2, "zero_stage": 3}),
}
ONE_PROCESS: tuple[int, dict[str, Any]] = (1, {})


class Tokens(Dataset[dict[str, Tensor]]):
    """Rows that can be predicted in part; no tensors, which would count as those of a step."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        steps = torch.randint(1, 8, (length, LENGTH), generator=generator)
        self._rows = (steps.cumsum(1) % VOCABULARY).numpy()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.from_numpy(self._rows[index])
        return {"token_ids": row, "labels": row}


def language_model() -> nn.Module:
    from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    return GPTTextGeneration(GPTTextGenerationConfig(vocab_size=VOCABULARY, hidden_dropout_prob=0.0, **sizes))


def config_of(layout: tuple[int, dict[str, Any]], updates: int, folder: str) -> Any:
    from trainwright import TrainingConfig
    from trainwright.parallel.layout import Layout

    world_size, settings = layout
    accumulation = settings.get("gradient_accumulation_steps", 1)
    batch = GLOBAL_BATCH // Layout.of(settings, world_size).data // accumulation
    common = {"learning_rate": 1e-3, "max_grad_norm": 1.0, "log_steps": 1000, "device_str": "cpu", "num_epochs": 1}
    quiet = {"save_enabled": False, "progress_bar": False, "eval_strategy": "no"}
    settings = {"batch_size": batch, "max_steps": updates * accumulation, **common, **quiet, **settings}
    return TrainingConfig(output_dir=folder, **settings)


def train(layout: tuple[int, dict[str, Any]], updates: int, folder: str) -> dict[str, Any]:
    """The losses and the peak of a run; each process calls this."""
    from benchmarks.counted_peak import counted_peak
    from trainwright import Trainer
    from trainwright.hooks import HookBase

    losses: list[float] = []

    class Losses(HookBase):
        def after_step(self) -> None:
            self.trainer.storage.reduce()
            losses.append(float(self.trainer.storage.latest()["total_loss"][0]))

    def build() -> Trainer:
        data = Tokens(GLOBAL_BATCH * updates)
        trainer = Trainer(language_model(), config_of(layout, updates, folder), train_dataset=data)
        trainer.register_hooks([Losses()])
        return trainer

    return {"peak": counted_peak(build), "losses": losses}


def run_processes(name: str, updates: int) -> list[dict[str, Any]]:
    """What ``train`` returns, by rank."""
    world_size = LAYOUTS.get(name, ONE_PROCESS)[0]
    with tempfile.TemporaryDirectory() as folder:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        module = ["-m", "benchmarks.layouts", "--worker", folder, "--layouts", name, "--updates", str(updates)]
        command = [sys.executable, *(launch if world_size > 1 else []), *module]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def estimated(name: str, updates: int) -> dict[int, int]:
    """The peak by rank, of those that an estimate distinguishes."""
    from trainwright import Trainer
    from trainwright.engine import estimate

    layout = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        data, config = Tokens(GLOBAL_BATCH * updates), config_of(layout, updates, folder)
        build = lambda config: Trainer(language_model(), config, train_dataset=data)  # noqa: E731
        costs = estimate(build, config, world_size=layout[0]).costs
    return {rank: cost.peak for rank, cost in costs.items()}


def row_of(name: str, updates: int, found: Sequence[dict[str, Any]], losses: Sequence[float]) -> list[str]:
    """Of a layout, from what ``train`` has returned on each rank, and the losses of one process."""
    expected = estimated(name, updates)
    difference = max(abs(a - b) for a, b in zip(found[-1]["losses"], losses, strict=True))
    stages = [*expected] if len(expected) > 1 else [max(range(len(found)), key=lambda rank: found[rank]["peak"])]
    measured = [found[rank]["peak"] for rank in stages]
    pairs = [*zip(expected.values(), measured, strict=True)]
    return [
        name,
        str(len(found)),
        f"{difference:.1e}",
        ", ".join(f"{peak / 2**20:.2f}" for peak in measured),
        ", ".join(f"{peak / 2**20:.2f}" for peak in expected.values()),
        ", ".join(f"{a / b - 1:+.1%}" for a, b in pairs),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), metavar="NAME", help="default: all")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the folder for results of a started process
    args = parser.parse_args(argv)
    if args.worker:
        from trainwright.parallel import setup_dist_util

        setup_dist_util({"device_type": "cpu"})
        result = train(LAYOUTS.get(args.layouts[0], ONE_PROCESS), args.updates, args.worker)
        Path(args.worker, f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(result))
        return
    [single] = run_processes("one process", args.updates)
    print("| layout | processes | largest difference of a loss | peak measured, MiB | estimated, MiB | difference |")
    print("|---|---|---|---|---|---|")
    for name in args.layouts:
        row = row_of(name, args.updates, run_processes(name, args.updates), single["losses"])
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()

"""Peak memory of a GPU and losses of a training by its settings that need less memory: ``python benchmarks/memory.py``.

A GPT of 319 million parameters, 6 updates of ``--batch`` texts of 1,024 tokens, in bfloat16. Each row trains in its own
process and is printed when it ends, or with its error. ``--device cpu`` tests this program with a tiny GPT.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.hooks import HookBase
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig

ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient_checkpointing=True": {"gradient_checkpointing": True},
    "gradient_checkpointing='selective'": {"gradient_checkpointing": "selective"},
    "gradient_checkpointing='offload'": {"gradient_checkpointing": "offload"},
    "zero_stage=3, zero_offload=True": {"zero_stage": 3, "zero_offload": True},
    "both offloads": {"zero_stage": 3, "zero_offload": True, "gradient_checkpointing": "offload"},
}
UPDATES = 6


class Record(HookBase):
    """Losses and ends of updates; the peak is that of all but the first."""

    def __init__(self) -> None:
        self.losses, self.ends = list[float](), list[float]()

    def after_step(self) -> None:
        self.losses.append(round(self.trainer.storage.latest()["total_loss"][0], 5))
        self.ends.append(time.perf_counter())
        if len(self.ends) == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


def measure(name: str, device: str, batch: int) -> dict[str, Any]:
    is_small = device == "cpu"
    words, length, width, layers = (256, 32, 64, 2) if is_small else (16384, 1024, 1024, 24)
    settings = GPTTextGenerationConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        max_position_embeddings=length, hidden_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPTTextGeneration(settings)
    tokens = torch.randint(256, (UPDATES * batch, length))
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            output_dir=folder, num_epochs=1, batch_size=batch, optimizer="AdamW", learning_rate=1e-4, device_str=device,
            max_grad_norm=1.0, mixed_precision="bf16", metrics=None, save_enabled=False, eval_strategy="no",
            tensorboard=None, log_steps=1000, **ROWS[name],
        )  # fmt: skip
        trainer, record = Trainer(model, config, train_dataset=TensorDataset(tokens, tokens)), Record()
        trainer.register_hooks([record])
        trainer.train()
    peak = None if is_small else round(torch.cuda.max_memory_allocated() / 2**20)
    ms = 1e3 * (record.ends[-1] - record.ends[1]) / (UPDATES - 2)
    return {"row": name, "peak_mib": peak, "ms": round(ms, 1), "losses": record.losses}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in (("device", "cuda"), ("batch", 8), ("row", "")):
        parser.add_argument(f"--{option}", type=type(default), default=default)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.row, args.device, args.batch)))
    for name in () if args.row else ROWS:
        command = [sys.executable, __file__, "--device", args.device, "--batch", str(args.batch), "--row", name]
        found = subprocess.run(["timeout", "300", *command], capture_output=True, text=True)
        line = next((line for line in found.stdout.splitlines() if line.startswith('{"row"')), None)
        print(line or f"{name}: exit code {found.returncode}: {found.stderr.strip()[-600:]}", flush=True)

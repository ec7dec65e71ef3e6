"""Tokens and operations per second, against the formula of a linear layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.toys import Samples, file_config
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.hooks import CallbackHook
from trainwright.hooks.throughput import peak_tflops


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 11))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        scores = self.blocks(self.embed(input_ids))
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), input_ids.flatten())}


SAMPLES = Samples(input_ids=torch.arange(48).reshape(8, 6) % 11)
TFLOP = 3 * 2 * 4 * 6 * (8 * 8 + 8 * 11) / 1e12  # of a batch of 4 samples; backward: twice as many


@pytest.mark.parametrize("api", ["objects", "accumulated", "recomputed", "files"])
def test_operations_and_tokens_of_an_iteration(api: str, tmp_path: Path) -> None:
    batches = 2 if api == "accumulated" else 1
    if api == "files":
        cfg = file_config(tmp_path, Words, SAMPLES, train_micro_batch_size=4, train_iter=4, log_throughput=True)
        trainer: Any = DefaultTrainer(cfg)
    else:
        settings = TrainingConfig(
            output_dir=str(tmp_path), batch_size=4, num_epochs=4, log_throughput=True, metrics=[], save_enabled=False,
            gradient_accumulation_steps=batches, gradient_checkpointing=api == "recomputed", device_str="cpu",
        )  # fmt: skip
        trainer = Trainer(Words(), settings, SAMPLES)
    found: list[Any] = []

    def see(one: Any) -> None:
        latest = one.storage.latest()
        if "tflops" in latest:
            found.append([float(latest[name][0]) * one.step_seconds for name in ("tflops", "tokens_per_s")])

    trainer.register_hooks([CallbackHook(after_step=see)])
    trainer.train()
    assert len(found) == trainer.max_iter - 1  # not of the first, which counts
    for tflop, tokens in found:
        assert tflop == pytest.approx(batches * TFLOP)
        assert tokens == pytest.approx(batches * 24)
    assert "peak_share" not in trainer.storage.latest()


def test_the_peak_of_a_known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A10G": 70,
        "NVIDIA L40S": 362, "NVIDIA L40": 181, "NVIDIA GH200 480GB": 989, "NVIDIA RTX A1000": None,
        "NVIDIA TITAN": None,
    }  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_tflops(torch.device("cuda")) == peak
    assert peak_tflops(torch.device("cpu")) is None

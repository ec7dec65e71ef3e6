"""float32_matmul_precision holds for a training, in both APIs, and no longer."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fork_server import python
from tests.toys import Classifier, file_config, points
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.engine import TrainerBase
from trainwright.hooks import CallbackHook, Float32MatmulPrecision


@pytest.mark.parametrize("api", ["python", "config"])
def test_it_holds_for_a_training(api: str, tmp_path: Path) -> None:
    seen = []

    class Model(Classifier):
        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            seen.append(torch.get_float32_matmul_precision())
            return super().forward(inputs, labels)

    if api == "python":
        config = TrainingConfig(output_dir=str(tmp_path), num_epochs=1, batch_size=4, float32_matmul_precision="high")
        Trainer(Model(), config, points(8)).train()
    else:
        settings = {"train_iter": 2, "train_micro_batch_size": 4, "float32_matmul_precision": "high"}
        DefaultTrainer(file_config(tmp_path, Model, points, **settings)).train()
    assert seen == ["high", "high"]
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("wrong", ["low", 16, True])
def test_other_words_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"float32_matmul_precision.*'highest', 'high'.*'medium'"):
        TrainingConfig(output_dir="o", float32_matmul_precision=wrong)


class Fails(TrainerBase):
    def run_step(self) -> None:
        raise ValueError("no step")


def test_put_back_after_a_failure() -> None:
    trainer = Fails()
    during: list[str] = []
    note = CallbackHook(before_step=lambda _: during.append(torch.get_float32_matmul_precision()))
    trainer.register_hooks([Float32MatmulPrecision("medium"), note])
    with pytest.raises(ValueError, match="no step"):
        trainer.train(0, 1)
    assert during == ["medium"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_beside_torchs_newer_settings_it_is_refused() -> None:
    """In a process of its own: torch has no way back from them."""
    program = (
        "import torch\n"
        "from trainwright.hooks import Float32MatmulPrecision\n"
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'\n"
        "Float32MatmulPrecision('high').before_train()\n"
    )
    done = subprocess.run([python(), "-c", program], capture_output=True, text=True)
    assert (
        "float32_matmul_precision: got 'high', but this program has set torch.backends' fp32_precision" in done.stderr
    )

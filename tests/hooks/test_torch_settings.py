"""float32_matmul_precision holds for a training, in both APIs, and no longer."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fork_server import python
from tests.toys import Samples, file_config
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.config.errors import ConfigError
from trainwright.engine import TrainerBase
from trainwright.hooks import CallbackHook, Float32MatmulPrecision

SEEN: list[str] = []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        SEEN.append(torch.get_float32_matmul_precision())
        return {"loss": nn.functional.cross_entropy(self.layer(inputs), labels)}


def data() -> Samples:
    return Samples(inputs=torch.ones(8, 2), labels=lambda index: index % 2)


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def test_in_the_python_api(tmp_path: Path) -> None:
    config = TrainingConfig(output_dir=str(tmp_path), num_epochs=1, batch_size=4, float32_matmul_precision="medium")
    Trainer(Model(), config, train_dataset=data()).train()
    assert set(SEEN) == {"medium"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_in_config_files(tmp_path: Path) -> None:
    settings = {"train_iter": 2, "train_micro_batch_size": 4, "float32_matmul_precision": "high"}
    cfg = file_config(tmp_path, Model, data, **settings)
    DefaultTrainer(cfg).train()
    assert SEEN == ["high", "high"]
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

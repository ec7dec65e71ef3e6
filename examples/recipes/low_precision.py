"""Low precision by the libraries that have it: float8 and int8 products, 8-bit states of the optimizer, a fused loss.

    python low_precision.py float8

trains a small classifier. ``float8`` and ``int8`` are of torchao, ``adamw8bit`` is of bitsandbytes: all of them run on
a CPU, too, where float8 is emulated and nothing is faster. ``liger`` is a loss of Liger kernels, which needs Triton and
a GPU. The trainer gets a changed model or an optimizer; nothing else changes.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig

KINDS = {"float8": "torchao", "int8": "torchao", "adamw8bit": "bitsandbytes", "liger": "liger_kernel"}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.loss: nn.Module = nn.CrossEntropyLoss()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.layers(inputs), labels)}


def changed(model: Classifier, kind: str) -> Classifier:
    """The model with what ``kind`` replaces in it. Before the Trainer is built, and before the optimizer is."""
    if kind == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        has_float8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
        convert_to_float8_training(model.layers, config=Float8LinearConfig(emulate=not has_float8))
    elif kind == "int8":
        from torchao import quantize_
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig

        quantize_(model.layers, Int8MixedPrecisionTrainingConfig(module_swap=True))
    elif kind == "liger":
        from liger_kernel.transformers import LigerCrossEntropyLoss

        model.loss = LigerCrossEntropyLoss()
    return model


def optimizer_of(model: nn.Module, kind: str) -> Any:
    if kind != "adamw8bit":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=1024)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 64, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(64, 16, generator=generator)).argmax(1))


class Pairs(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.data = data()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(zip(("inputs", "labels"), self.data[index], strict=True))

    def __len__(self) -> int:
        return len(self.data)


def build(kind: str, folder: Path, num_epochs: int = 4, *, resume: bool = False) -> Trainer:
    torch.manual_seed(0)
    model = changed(Classifier(), kind)
    config = TrainingConfig(
        output_dir=folder, num_epochs=num_epochs, batch_size=32, lr_scheduler_type=None, max_grad_norm=None,
        dataloader_shuffle=False, early_stopping=None, metrics=[], resume_from_checkpoint=resume,
    )  # fmt: skip
    return Trainer(model, config, Pairs(), optimizer=optimizer_of(model, kind))


if __name__ == "__main__":
    build(sys.argv[1] if len(sys.argv) > 1 else "float8", Path("output/low_precision")).train()

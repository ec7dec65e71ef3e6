"""Ten set-ups of each API that are wrong, and the same one without the fault: handwritten digits in 64 pixels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.data import ColumnDataset, build_image_test_loader, build_image_train_loader
from trainwright.hooks import Callback, HookBase

TRAINED = 700  # samples


def digits(part: slice, *, labels: Callable[[Tensor], Tensor] = lambda labels: labels) -> tuple[Tensor, Tensor]:
    data = load_digits()
    images, targets = torch.as_tensor(data.data, dtype=torch.float32) / 16, torch.as_tensor(data.target)
    return images[part], labels(targets)[part]


def shuffled(labels: Tensor) -> Tensor:
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]


class Net(nn.Sequential):
    """``dropout``: in evaluations, too. ``factor``: of the loss."""

    def __init__(self, *, dropout: bool = False, freeze: bool = False, factor: float = 1.0) -> None:
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
        self.dropout, self.factor = dropout, factor
        self[0].requires_grad_(not freeze)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Any:  # with labels: in config files
        scores = super().forward(F.dropout(images, 0.1) if self.dropout else images)
        if labels is None:
            return scores
        return {"loss": self.factor * F.cross_entropy(scores, labels), "prediction_scores": scores}


class Rotated(Dataset):
    """Samples with noise of its own generator, which each worker gets a copy of."""

    def __init__(self) -> None:
        self.images, self.labels = digits(slice(TRAINED))
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.as_tensor(self.generator.normal(size=64), dtype=torch.float32)
        return {"images": self.images[index] + 0.01 * noise, "labels": self.labels[index]}


# Objects.


class WithoutZeroGrad(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Tensor]:
        loss = F.cross_entropy(model(inputs[0]), inputs[1])
        loss.backward()
        self.optimizer.step()
        return {"step_loss": loss.detach()}


class WithFactor(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return 1e-3 * F.cross_entropy(model(inputs[0]), inputs[1])


class LeftInEval(Trainer):
    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        results = super().evaluate(*arguments, **named)
        self.model.eval()
        return results


class Eval(Callback):
    def on_train_batch_begin(self, batch: Any, logs: Any) -> None:
        self.model.eval()


def objects(folder: Path, fault: str = "") -> Trainer:
    torch.manual_seed(0)
    labels = shuffled if fault == "shuffled labels" else lambda labels: labels
    train = TensorDataset(*digits(slice(TRAINED), labels=labels))
    first = TRAINED - 100 if fault == "training data in the test set" else TRAINED
    test = TensorDataset(*digits(slice(first, TRAINED + 200)))
    model = Net(freeze=fault == "frozen layer", dropout=fault == "forgotten eval mode")
    settings: dict[str, Any] = {"output_dir": str(folder), "num_epochs": 20, "batch_size": 32, "learning_rate": 1e-2}
    options: dict[str, Any] = {}
    kind: type[Trainer] = {"missing zero_grad": WithoutZeroGrad, "wrong loss scale": WithFactor}.get(fault, Trainer)
    if fault == "dropout off":
        options["callbacks"] = [Eval()]
    if fault == "lr 0":
        options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.0)
    if fault == "dead worker seed":
        settings["dataloader_num_workers"] = 2
        return Trainer(Net(), TrainingConfig(**settings), Rotated(), collate_to_pairs(test), data_collator=pairs)
    if fault == "unused samples":
        loader = DataLoader(train, batch_size=32, sampler=range(600))
        return Trainer(model, TrainingConfig(**settings), train_dataloader=loader, eval_dataset=test)
    return kind(model, TrainingConfig(**settings), train, test, **options)


def collate_to_pairs(data: TensorDataset) -> list[dict[str, Tensor]]:
    return [{"images": image, "labels": label} for image, label in data]


def pairs(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([one["images"] for one in samples]), torch.stack([one["labels"] for one in samples])


# Config files.


def columns(first: int, last: int, *, is_shuffled: bool = False) -> ColumnDataset:
    images, labels = digits(slice(first, last), labels=shuffled if is_shuffled else lambda labels: labels)
    return ColumnDataset(images=images, labels=labels)


class StepWithoutZeroGrad(DefaultTrainer):
    def train_step(self, model: Any, inputs: Any) -> Any:
        outputs = model(**inputs)
        outputs["loss"].backward()
        self.optimizer.step()
        return {"loss": outputs["loss"].detach()}


class EvalHook(HookBase):
    def before_step(self) -> None:
        self.trainer.model.eval()


class InEval(DefaultTrainer):
    def build_hooks(self) -> list[HookBase | None]:
        return [*super().build_hooks(), EvalHook()]


def limited_loader(dataset: Any, train_batch_size: int = 32) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=train_batch_size, sampler=range(600))


def config(folder: Path, fault: str = "") -> Any:
    cfg: Any = {
        "model": LazyCall(Net)(freeze=fault == "frozen layer", dropout=fault == "forgotten eval mode"),
        "optim": get_config("common/optim.py").optim,
        "train": get_config("common/train.py").train,
    }
    cfg["model"].factor = 1e-3 if fault == "wrong loss scale" else 1.0
    train = LazyCall(columns)(first=0, last=TRAINED, is_shuffled=fault == "shuffled labels")
    first = TRAINED - 100 if fault == "training data in the test set" else TRAINED
    test = LazyCall(columns)(first=first, last=TRAINED + 200)
    loader = LazyCall(build_image_train_loader)(dataset=train, num_workers=0)
    if fault == "dead worker seed":
        loader = LazyCall(build_image_train_loader)(dataset=LazyCall(Rotated)(), num_workers=2)
    if fault == "unused samples":
        loader = LazyCall(limited_loader)(dataset=train)
    cfg["dataloader"] = {"train": loader, "test": [LazyCall(build_image_test_loader)(dataset=test, num_workers=0)]}
    cfg["optim"].lr = 0.0 if fault == "lr 0" else 1e-2
    cfg["train"].update(output_dir=str(folder), train_epoch=20, train_micro_batch_size=32, warmup_ratio=0.01)
    from omegaconf import OmegaConf

    return OmegaConf.create(cfg, flags={"allow_objects": True})


def config_files(folder: Path, fault: str = "") -> DefaultTrainer:
    kinds = {"missing zero_grad": StepWithoutZeroGrad, "dropout off": InEval}
    return kinds.get(fault, DefaultTrainer)(config(folder, fault))


BUGS = {  # the check that finds it
    "frozen layer": "parameters",
    "missing zero_grad": "zero_grad",
    "shuffled labels": "labels",
    "forgotten eval mode": "evaluation",
    "training data in the test set": "test_data",
    "dropout off": "modes",
    "wrong loss scale": "loss_scale",
    "dead worker seed": "workers",
    "lr 0": "learning_rate",
    "unused samples": "samples",
}

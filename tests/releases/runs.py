"""The runs that each release keeps, in both APIs: how they are made, and how they are continued.

Up to the kept checkpoint all values are multiples of a small power of two: the gradients of an absolute error are
whole numbers, and the rates, the momentum and the average have few digits. So every machine computes the same bits,
and a kept run that is continued ends with those of an uninterrupted one.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.config import LazyConfig
from trainwright.config.lazy.allowlist import allow_module
from trainwright.data import build_image_test_loader, build_image_train_loader
from trainwright.evaluation import RegEvaluator
from trainwright.hooks import CallbackHook
from trainwright.optim import WarmupPolynomialLR, get_default_optimizer_params

STOP = 5  # updates that are kept: within the second epoch, after an evaluation
UPDATES = 16


class Integers(Dataset[dict[str, Tensor]]):
    """16 samples of whole numbers."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = torch.tensor([index % 3 - 1, index % 4 - 2, index % 5 - 2], dtype=torch.float32)
        return {"inputs": inputs, "labels": inputs.sum(0, keepdim=True) + index % 2}


class Line(nn.Module):
    """A linear layer with an absolute error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        predictions = self.layer(inputs)
        outputs = {"prediction_scores": predictions, "logits": predictions}
        return outputs if labels is None else outputs | {"loss": (predictions - labels).abs().mean()}


def python(*, resume: bool) -> Trainer:
    """With accumulation, an average of the weights, a schedule and early stopping."""
    config = TrainingConfig(
        output_dir="python", num_epochs=4, batch_size=2, gradient_accumulation_steps=2, seed=3, learning_rate=0.5,
        optimizer={"name_": "SGD", "momentum": 0.5}, lr_scheduler_type="linear", ema={"decay": 0.5}, metrics=None,
        early_stopping={"monitor": "eval_loss", "patience": 3, "mode": "min"}, log_steps=2, save_steps=2,
        model_checkpoint=None, max_to_keep=1, tensorboard=None, progress_bar=False, device_str="cpu",
        resume_from_checkpoint=resume,
    )  # fmt: skip
    return Trainer(Line(), config, Integers(), Integers())


def config_file(*, resume: bool) -> DefaultTrainer:
    """The same from a config file, of a saved one if it resumes."""
    if resume:
        allow_module(__name__)
        cfg = LazyConfig.load("config_file/config.yaml")
        cfg.train.resume = True
        return DefaultTrainer(cfg)
    cfg = get_config("common/defaults.py")
    cfg.model = LazyCall(Line)()
    data = LazyCall(Integers)()
    cfg.dataloader = {
        "train": LazyCall(build_image_train_loader)(dataset=data, num_workers=0),
        "test": [LazyCall(build_image_test_loader)(dataset=data, num_workers=0)],
    }
    cfg.optim = LazyCall(torch.optim.SGD)(params=LazyCall(get_default_optimizer_params)(), lr=0.5, momentum=0.5)
    cfg.train.update(
        {
            "output_dir": "config_file", "train_iter": UPDATES, "train_micro_batch_size": 2, "log_period": 2, "seed": 3,
            "num_accumulation_steps": 2, "ema": {"decay": 0.5}, "input_placement_device": "cpu", "progress_bar": False,
            "scheduler": LazyCall(WarmupPolynomialLR)(warmup_factor=0.0, end_learning_rate=0.0),
        }
    )  # fmt: skip
    cfg.train.checkpointer.update({"period": 1, "max_to_keep": 1})
    cfg.train.evaluation.update(
        {"eval_period": 4, "evaluator": LazyCall(RegEvaluator)(), "eval_metric": "pearson", "eval_mode": "max"}
    )
    return DefaultTrainer(cfg)


RUNS: dict[str, Callable[..., Any]] = {"python": python, "config_file": config_file}


class StoppedError(Exception):
    """Ends a run in the middle."""


def stop_within(name: str) -> None:
    """Make a run up to update ``STOP``, whose checkpoint is the newest."""

    def stop(trainer: Any) -> None:
        if trainer.iter == STOP:
            trainer.checkpointer.wait()
            raise StoppedError

    trainer = RUNS[name](resume=False)
    trainer.register_hooks([CallbackHook(before_step=stop)])
    try:
        trainer.train()
    except StoppedError:
        return
    raise AssertionError(f"{name}: the run has not stopped")


def ended(trainer: Any) -> dict[str, Any]:
    """What a run ends with."""
    average = trainer.run.saved_model()
    return {
        "weights": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
        "average": {name: value.tolist() for name, value in average.state_dict().items()},
        "momentum": [state["momentum_buffer"].tolist() for state in trainer.optimizer.state.values()],
        "rate": trainer.optimizer.param_groups[0]["lr"],
        "iterations": trainer.iterations_done,
    }


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)

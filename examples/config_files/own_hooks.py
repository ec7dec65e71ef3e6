"""Shows a callback and a hook of your own in a config file, and early stopping.

    trainwright train examples/config_files/own_hooks.py

The callback counts epochs and asks for an evaluation every third one; the hook logs the norm of the weights.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright import LazyCall, get_config
from trainwright.data import ColumnDataset, build_image_test_loader, build_image_train_loader
from trainwright.hooks import Callback, HookBase


class EvaluateEachThird(Callback):
    """``self.trainercontrol`` requests what the trainer does next."""

    def on_epoch_end(self, epochs: int, logs: Any) -> None:
        self.trainercontrol.should_evaluate = epochs % 3 == 0


class WeightNorm(HookBase):
    """What a hook puts into ``self.trainer.storage`` is in each line of the log and in ``metrics.json``."""

    def __init__(self, each: int = 20) -> None:
        self.each = each

    def after_step(self) -> None:
        if self.trainer.iterations_done % self.each == 0:
            weights = [weight.detach().square().sum() for weight in self.trainer.model.parameters()]
            self.trainer.storage.put_scalar("weight_norm", torch.stack(weights).sum().sqrt())


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(points)
        return {"loss": F.cross_entropy(scores, labels), "prediction_scores": scores}


def ring(number: int, seed: int) -> ColumnDataset:
    """Points inside and outside of a circle."""
    points = torch.randn(number, 2, generator=torch.Generator().manual_seed(seed))
    return ColumnDataset(points=points, labels=(points.square().sum(1) > 1.4).long())


model = LazyCall(Net)(width=32)
dataloader = {
    "train": LazyCall(build_image_train_loader)(dataset=LazyCall(ring)(number=640, seed=0), num_workers=0),
    "test": [LazyCall(build_image_test_loader)(dataset=LazyCall(ring)(number=160, seed=1), num_workers=0)],
}
optim = get_config("common/optim.py").optim
optim.lr = 0.01
train = get_config("common/train.py").train
train.update({"output_dir": "output/own_hooks", "train_epoch": 12, "train_micro_batch_size": 32, "log_period": 20})
train.evaluation.update({"evaluator": {"topk": [1]}, "eval_period": 1000})
train.callbacks = [LazyCall(EvaluateEachThird)()]
train.hooks = [LazyCall(WeightNorm)(each=20)]
train.early_stopping = {"monitor": "epoch_loss", "patience": 3}

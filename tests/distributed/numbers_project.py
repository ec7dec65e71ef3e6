"""Read by the tests as a configuration file: faults planted on rank 1 alone."""

import torch
from torch import Tensor

from tests.toys import Classifier, NanGradient, points
from trainwright.config import LazyCall, get_config
from trainwright.data import build_image_train_loader
from trainwright.events import get_event_storage
from trainwright.parallel import get_rank


class Spoilt(Classifier):
    """``spoils``: what is spoilt in the forward pass number ``at``."""

    def __init__(self, spoils: str = "", at: int = -1) -> None:
        super().__init__()
        self.spoils, self.at = spoils, at
        self.passes = 0

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.passes += 1
        loss = super().forward(inputs, labels)["loss"]
        is_spoilt = get_rank() == 1 and self.passes - 1 == self.at
        if self.spoils == "own metric":
            get_event_storage().put_scalar("aux_loss", torch.nan if is_spoilt else 0.0)
        elif is_spoilt:
            loss = loss + torch.nan if self.spoils == "loss" else NanGradient.apply(loss)
        return {"loss": loss}


model = LazyCall(Spoilt)(spoils="", at=-1)
dataloader = {"train": LazyCall(build_image_train_loader)(dataset=LazyCall(points)(length=50), num_workers=0)}
optim = LazyCall(torch.optim.SGD)(lr=0.3, momentum=0.9)
train = get_config("common/train.py").train
train.update({"train_iter": 12, "log_period": 5, "train_micro_batch_size": 2, "checkpointer": {"period": 4}})
train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)

"""A training of which rank 1 fails in the iteration ``AT``: ``python faults_script.py FOLDER raise|hang|kill``.

``unused``: from then on a layer takes no part, in both APIs, without and with the setting for it.
"""

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.config.errors import ConfigError
from trainwright.data import ColumnDataset, build_image_train_loader

AT = 6
folder, how = sys.argv[1:3]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 1), 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls == AT:
            print(f"failing at {time.time()}", flush=True)
            if how == "raise":
                raise ValueError("the data of this rank are bad")
            if how == "hang":
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": (self.layer(x) - labels).square().mean()}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra, self.calls = nn.Linear(4, 1), nn.Linear(4, 1), 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        self.calls += 1
        scores = self.layer(x) + (self.extra(x) if self.calls < AT else 0)
        return {"loss": (scores - labels).square().mean()}


def objects(finds: bool = False) -> None:
    config = TrainingConfig(
        output_dir=folder, batch_size=4, num_epochs=1, device_str="cpu", tensorboard=None, log_steps=1,
        hang_timeout_s=3, find_unused_parameters=finds,
    )  # fmt: skip
    Trainer(Branches() if how == "unused" else Net(), config, train_dataset=data).train()


def config_files(finds: bool = False) -> None:
    cfg: Any = get_config("common/defaults.py")
    cfg.model, cfg.optim = LazyCall(Branches)(), LazyCall(torch.optim.SGD)(lr=0.01)
    cfg.dataloader = LazyCall(dict)(train=build_image_train_loader(data, 4, num_workers=0)[0])
    cfg.train.update({"output_dir": f"{folder}-config", "train_iter": 10, "train_micro_batch_size": 4})
    cfg.train.dist.find_unused_parameters = finds
    DefaultTrainer(cfg).train()


data = ColumnDataset(x=torch.ones(400, 4), labels=torch.ones(400, 1))
if how != "unused":
    objects()
else:
    for train in (objects, config_files):
        for finds in (False, True):
            try:
                train(finds)
                print(f"{train.__name__}, {finds}: trained", flush=True)
            except ConfigError as error:
                print(f"{train.__name__}, {finds}: {error}", flush=True)

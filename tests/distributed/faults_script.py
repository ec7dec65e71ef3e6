"""A training of which rank 1 fails in the iteration ``AT``: ``python faults_script.py FOLDER raise|hang|kill``."""

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from trainwright import Trainer, TrainingConfig
from trainwright.data import ColumnDataset

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


config = TrainingConfig(
    output_dir=folder, batch_size=4, num_epochs=1, device_str="cpu", tensorboard=None, log_steps=1, hang_timeout_s=3
)
Trainer(Net(), config, train_dataset=ColumnDataset(x=torch.ones(400, 4), labels=torch.ones(400, 1))).train()

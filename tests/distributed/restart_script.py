"""``restart_script.py FOLDER [kill]``: a training whose rank 1 kills itself in the first attempt, after a save."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwright import Trainer, TrainingConfig
from trainwright.data import ColumnDataset

folder, attempt, rank = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(1, 1), 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        self.calls += 1
        with Path(f"{folder}-seen-{attempt}-{rank}").open("a") as file:
            file.write(json.dumps([int(number) for number in x.flatten()]) + "\n")
        if "kill" in sys.argv and attempt == "0" and rank == "1" and self.calls == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": (self.layer(x / 100) - labels).square().mean()}


data = ColumnDataset(x=torch.arange(64.0).reshape(64, 1), labels=torch.ones(64, 1))
config = TrainingConfig(
    output_dir=folder, batch_size=4, num_epochs=2, device_str="cpu", tensorboard=None, log_steps=1, save_steps=5
)
Trainer(Net(), config, train_dataset=data).train()

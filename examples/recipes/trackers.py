"""Trackers for Comet, Neptune, ClearML, SwanLab and Aim: each is a class of three methods.

    python trackers.py aim

trains a model whose metrics go to one of them, without an account or a network: in a folder ``output/trackers``. What
``Tracker`` adds: settings become hyperparameters, each iteration is sent once, a resumed run continues the run of the
tracker, and a tracker that fails does not end the training.
"""

import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.events import EventWriter, Tracker

Rows = Mapping[int, Mapping[str, float]]  # the metrics of iterations, in order


class CometTracker(Tracker):
    """``arguments``: of ``comet_ml.start``, such as ``project_name``."""

    name = "comet_ml"

    def begin_run(self, run_id: str | None) -> str:
        import comet_ml

        self.experiment: Any = comet_ml.start(experiment_key=run_id, **self.arguments)
        self.experiment.log_parameters(self.settings)
        return str(self.experiment.get_key())

    def send(self, rows: Rows) -> None:
        for iteration, row in rows.items():
            self.experiment.log_metrics(dict(row), step=iteration)

    def end_run(self, run_id: str) -> None:
        self.experiment.end()


class NeptuneTracker(Tracker):
    """``arguments``: of ``neptune.init_run``, such as ``project``."""

    name = "neptune"

    def begin_run(self, run_id: str | None) -> str:
        import neptune

        own_id = run_id or uuid.uuid4().hex
        self.run: Any = neptune.init_run(custom_run_id=own_id, **self.arguments)
        self.run["parameters"] = {key: str(value) for key, value in self.settings.items()}
        return own_id

    def send(self, rows: Rows) -> None:
        for iteration, row in rows.items():
            for name, value in row.items():
                self.run[f"metrics/{name}"].append(value, step=iteration)

    def end_run(self, run_id: str) -> None:
        self.run.stop()


class ClearMLTracker(Tracker):
    """``arguments``: of ``Task.init``, such as ``project_name``."""

    name = "clearml"

    def begin_run(self, run_id: str | None) -> str:
        from clearml import Task

        defaults = {
            "task_name": self.folder.name,
            "auto_connect_frameworks": False,
            "continue_last_task": run_id or False,
        }
        self.task: Any = Task.init(**{**defaults, **self.arguments})
        self.task.set_initial_iteration(0)  # ours count from the start of the run
        self.task.connect(dict(self.settings))
        return str(self.task.id)

    def send(self, rows: Rows) -> None:
        for iteration, row in rows.items():
            for name, value in row.items():
                self.task.get_logger().report_scalar(name, name, value, iteration)

    def end_run(self, run_id: str) -> None:
        self.task.close()


class SwanLabTracker(Tracker):
    """``arguments``: of ``swanlab.init``, such as ``project`` and ``mode="offline"``."""

    name = "swanlab"

    def begin_run(self, run_id: str | None) -> str:
        import swanlab

        defaults = {"experiment_name": self.folder.name, "config": self.settings, "resume": "allow", "id": run_id}
        self.run: Any = swanlab.init(**{**defaults, **self.arguments})
        return str(self.run.id)

    def send(self, rows: Rows) -> None:
        for iteration, row in rows.items():
            self.run.log(dict(row), step=iteration)

    def end_run(self, run_id: str) -> None:
        self.run.finish()


class AimTracker(Tracker):
    """``arguments``: of ``aim.Run``, such as ``repo`` and ``experiment``."""

    name = "aim"

    def begin_run(self, run_id: str | None) -> str:
        from aim import Run

        self.run: Any = Run(run_hash=run_id, **self.arguments)
        self.run["settings"] = self.settings
        return str(self.run.hash)

    def send(self, rows: Rows) -> None:
        for iteration, row in rows.items():
            self.run.track(dict(row), step=iteration)

    def end_run(self, run_id: str) -> None:
        self.run.close()


# What makes each of them work without a network.
OFFLINE: dict[str, tuple[type[Tracker], dict[str, Any]]] = {
    "comet": (CometTracker, {"online": False, "api_key": "none", "project_name": "digits"}),
    "neptune": (NeptuneTracker, {"mode": "offline", "project": "me/digits", "capture_hardware_metrics": False}),
    "clearml": (ClearMLTracker, {"project_name": "digits"}),
    "swanlab": (SwanLabTracker, {"mode": "offline", "project": "digits"}),
    "aim": (AimTracker, {}),
}


class Tracked(Trainer):
    """A trainer with a tracker; in a config file the same method of a ``DefaultTrainer``."""

    tracker = "aim"

    def build_writers(self) -> list[EventWriter]:
        kind, arguments = OFFLINE[self.tracker]
        return [*super().build_writers(), kind(self.output_dir, self.config.to_dict(), arguments)]


def train(tracker: str, folder: Path, num_epochs: int, *, resume: bool = False) -> Trainer:
    torch.manual_seed(0)
    config = TrainingConfig(
        output_dir=folder, num_epochs=num_epochs, batch_size=8, loss="MSELoss", metrics=[], log_steps=1,
        resume_from_checkpoint=resume,
    )  # fmt: skip
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    kind = type("Tracked", (Tracked,), {"tracker": tracker})
    trainer: Trainer = kind(nn.Linear(4, 1), config, data)
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "aim", Path("output/trackers"), num_epochs=2)

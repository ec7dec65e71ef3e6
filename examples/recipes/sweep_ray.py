"""The sweep of ``sweep_optuna.py`` with Ray Tune: trials run in parallel processes, ASHA ends the bad ones early."""

from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.hooks import Callback, Logs

EPOCHS, TRIALS = 4, 8


class ReportToRay(Callback):
    """Report each evaluation; Ray ends the process of a trial that is worse than the others."""

    def on_eval_end(self, logs: Logs) -> None:
        tune.report({"loss": logs["eval_epoch_loss"], "accuracy": logs["eval_epoch_metric"]})


def train(params: dict[str, Any], folder: str) -> None:
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    config = TrainingConfig(
        output_dir=f"{folder}/{tune.get_context().get_trial_name()}",
        num_epochs=EPOCHS, batch_size=50, device="cpu", learning_rate=params["learning_rate"], optimizer="AdamW",
        loss="CrossEntropyLoss", metrics=["accuracy"], save_enabled=False, progress_bar=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Trainer(
        nn.Sequential(nn.Linear(64, params["width"]), nn.ReLU(), nn.Linear(params["width"], 10)),
        config,
        train_dataset=TensorDataset(images[:1000], labels[:1000]),
        eval_dataset=TensorDataset(images[1000:1500], labels[1000:1500]),
        callbacks=[ReportToRay()],
    ).train()


def main(folder: str = "output/recipes/sweep_ray") -> tune.ResultGrid:
    folder = str(Path(folder).absolute())  # a trial has a working directory of its own
    tuner = tune.Tuner(
        tune.with_parameters(train, folder=f"{folder}/runs"),
        param_space={"width": tune.choice([16, 64]), "learning_rate": tune.loguniform(1e-4, 1e-1)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=TRIALS, scheduler=ASHAScheduler()),
        run_config=tune.RunConfig(storage_path=folder, name="digits"),
    )
    results = tuner.fit()
    best = results.get_best_result()
    print(f"Best: {best.config}, loss {best.metrics['loss']:.4f}")
    return results


if __name__ == "__main__":
    main()

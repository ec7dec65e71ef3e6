"""A sweep with Optuna: the learning rate and the width of a classifier of digits; bad trials end after an epoch."""

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.hooks import Callback, Logs

EPOCHS, TRIALS = 4, 8


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,000 digits to train on, 500 to evaluate on."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    return TensorDataset(images[:1000], labels[:1000]), TensorDataset(images[1000:1500], labels[1000:1500])


class ReportToOptuna(Callback):
    """Report each evaluation, and end the run of a trial that is worse than the others."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_eval_end(self, logs: Logs) -> None:
        self.trial.report(logs["eval_epoch_loss"], step=logs["epoch"])
        if self.trial.should_prune():
            raise optuna.TrialPruned


def objective(trial: optuna.Trial, folder: str) -> float:
    width = trial.suggest_categorical("width", [16, 64])
    config = TrainingConfig(
        output_dir=f"{folder}/trial_{trial.number}", num_epochs=EPOCHS, batch_size=50, device="cpu",
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True), optimizer="AdamW",
        loss="CrossEntropyLoss", metrics=["accuracy"], save_enabled=False, progress_bar=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    train, test = digits()
    trainer = Trainer(model, config, train_dataset=train, eval_dataset=test, callbacks=[ReportToOptuna(trial)])
    trainer.train()
    return trainer.evaluate()["loss"]


def main(folder: str = "output/recipes/sweep_optuna") -> optuna.Study:
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.optimize(lambda trial: objective(trial, folder), n_trials=TRIALS)
    print(f"Best: {study.best_params}, loss {study.best_value:.4f}")
    return study


if __name__ == "__main__":
    main()

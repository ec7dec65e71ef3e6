"""Facts of a run for advice about its speed, and the names of settings in each API."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from trainwright.data.columns import ColumnDataset
from trainwright.hooks.timer import Facts, SettingNames

_OF_OBJECTS = SettingNames(
    workers="dataloader_num_workers",
    no_workers="dataloader_num_workers=0",
    collate="data_collator=lambda batch: batch",
    profile="TrainingConfig(profile=True)",
)
_OF_FILES = SettingNames(
    workers="num_workers of dataloader.train",
    no_workers="num_workers=0 of dataloader.train",
    asynchronous="train.checkpointer.asynchronous=True",
    profile="train.profile=True",
)


def facts_of_objects(trainer: Any) -> Facts:
    """Facts of a :class:`~trainwright.Trainer`."""
    config = trainer.config
    save = _saves_of(config, trainer._plan.steps_per_epoch)
    names = replace(_OF_OBJECTS, save=save, evaluate=_evaluations_of(config))
    return _facts(trainer, trainer.train_dataloader, names, batches=config.gradient_accumulation_steps)


def facts_of_files(trainer: Any) -> Facts:
    """Facts of a :class:`~trainwright.DefaultTrainer`."""
    train = trainer.cfg.train
    by_epochs, by_period = "train.checkpointer.save_model_after_n_epoch", "train.checkpointer.period"
    save = by_epochs if train.checkpointer.get("save_model_after_n_epoch") else by_period
    by_epochs, by_period = "train.evaluation.eval_after_n_epoch", "train.evaluation.eval_period"
    evaluate = by_epochs if train.evaluation.get("eval_after_n_epoch") else by_period
    names = replace(_OF_FILES, save=f"a larger {save}", evaluate=f"a larger {evaluate}")
    return _facts(trainer, trainer.train_loader, names, batches=int(train.get("num_accumulation_steps") or 1))


def _facts(trainer: Any, loader: Any, names: SettingNames, *, batches: int) -> Facts:
    return Facts(
        batches=batches,
        device=torch.device(trainer.device).type,
        num_workers=getattr(loader, "num_workers", None),
        reads_batches=_reads_batches(getattr(loader, "dataset", None)),
        saves_async=bool(getattr(trainer.checkpointer, "asynchronous", True)),
        names=names,
    )


def _saves_of(config: Any, steps_per_epoch: int) -> str:
    """The setting that saves most often; the period of evaluations, which save the best, if there is no other."""
    found: list[tuple[float, str]] = []
    periods = config.model_checkpoint or {}
    for name, steps in (("every_n_epoch", steps_per_epoch), ("every_n_iteration", 1)):
        if period := periods.get(name):
            found.append((period * steps, f"a larger {name} of model_checkpoint (now {period})"))
    if config.save_steps:
        share = steps_per_epoch * config.num_epochs if isinstance(config.save_steps, float) else 1
        found.append((config.save_steps * share, f"a larger save_steps (now {config.save_steps})"))
    return min(found)[1] if found else _evaluations_of(config)


def _evaluations_of(config: Any) -> str:
    if config.eval_steps:
        return f"a larger eval_steps (now {config.eval_steps})"
    return "eval_strategy='step' with eval_steps of more than an epoch"


def _reads_batches(dataset: Any) -> bool:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, TensorDataset | ColumnDataset) or hasattr(dataset, "__getitems__")

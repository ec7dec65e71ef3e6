"""What advice about time has to know of a run, and how each door spells the settings that cure."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from trainwright.hooks.advice import Facts, SettingNames

OF_OBJECTS = SettingNames(
    workers="dataloader_num_workers",
    graph="TrainingConfig(graph=True)",
    batch_size="batch_size",
    save="a larger save_steps, or every_n_epoch of model_checkpoint,",
    evaluate="eval_strategy='step' with larger eval_steps",
    profile="TrainingConfig(profile=True)",
)
OF_FILES = SettingNames(
    workers="num_workers of dataloader.train",
    graph="graph.enabled=True",
    batch_size="train.train_micro_batch_size",
    save="a larger train.checkpointer.period",
    asynchronous="train.checkpointer.asynchronous=True",
    evaluate="a larger train.evaluation.eval_period",
    profile="train.profile=True",
)
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def facts_of_objects(trainer: Any) -> Facts:
    """Those of a :class:`~trainwright.Trainer`."""
    return _facts(trainer, trainer.train_dataloader, OF_OBJECTS, is_graph=bool(trainer.config.graph))


def facts_of_files(trainer: Any) -> Facts:
    """Those of a :class:`~trainwright.DefaultTrainer`."""
    return _facts(trainer, trainer.train_loader, OF_FILES, is_graph=bool(trainer.cfg.graph.enabled))


def _facts(trainer: Any, loader: Any, names: SettingNames, *, is_graph: bool) -> Facts:
    return Facts(
        device=torch.device(trainer.device).type,
        num_workers=getattr(loader, "num_workers", None),
        reads_batches=_reads_batches(getattr(loader, "dataset", None)),
        is_graph=is_graph,
        can_fuse=_can_fuse(trainer.optimizer),
        saves_beside=bool(getattr(trainer.checkpointer, "asynchronous", True)),
        names=names,
    )


def _reads_batches(dataset: Any) -> bool:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, TensorDataset) or hasattr(dataset, "__getitems__")


def _can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    kinds: list[Callable[..., Any]] = [getattr(torch.optim, name) for name in _FUSED]
    return type(optimizer) in kinds and not any(group.get("fused") for group in optimizer.param_groups)

"""Resolve what depends on the data: iterations, warm-up, milestones, periods in epochs."""

import inspect
import logging
from typing import Any

from omegaconf import DictConfig

from trainwright.config.errors import ConfigError
from trainwright.config.lazy.instantiation import locate_target
from trainwright.config.lazy.lazy_config import try_get_key
from trainwright.config.schema.sections import (
    iterations_of_epochs,
    milestone_iterations,
    total_iterations,
    warmup_iterations,
)
from trainwright.parallel.dist import get_data_parallel_size

logger = logging.getLogger("trainwright.engine")


def scale_to_data(cfg: DictConfig, data_loader: Any) -> None:
    """Write the number of iterations, and the settings that depend on it, into ``cfg.train``.

    Raises:
        ConfigError: one update takes more samples than the training set has.
    """
    train = cfg.train
    length = num_samples(data_loader, train.train_micro_batch_size)
    if length is not None and length < train.global_batch_size:
        raise ConfigError(
            f"train.global_batch_size: got {train.global_batch_size}, but the training set has {length} samples; it"
            f" must be at most {length}. ({train.train_micro_batch_size} train_micro_batch_size x"
            f" {train.num_accumulation_steps} num_accumulation_steps x {get_data_parallel_size()} processes)"
        )
    asked_for, by_epochs = train.train_iter, iterations_of_epochs(train, length, train.global_batch_size)
    train.train_iter = total_iterations(train, length, train.global_batch_size)
    if asked_for and by_epochs:
        logger.info(
            "train.train_iter=%d and train.train_epoch=%g (%d iterations) are both set: the larger counts, %d.",
            asked_for, train.train_epoch, by_epochs, train.train_iter,
        )  # fmt: skip
    train.warmup_iter = warmup_iterations(train.train_iter, train.warmup_ratio)
    _scale_scheduler(train)
    if length is not None:
        _scale_periods(train, max(1, length // train.global_batch_size))


def num_samples(data_loader: Any, batch_size: int) -> int | None:
    """The number of samples of a loader's data set; None if unknown (an iterable data set)."""
    dataset = getattr(data_loader, "dataset", None)
    if hasattr(dataset, "__len__"):
        return len(dataset)  # type: ignore[arg-type]
    if dataset is None and hasattr(data_loader, "__len__"):
        return len(data_loader) * batch_size
    return None


def _scale_scheduler(train: DictConfig) -> None:
    scheduler = train.scheduler
    if not (isinstance(scheduler, DictConfig) and "_target_" in scheduler):
        return
    taken = inspect.signature(locate_target(scheduler)).parameters  # torch's schedulers take neither
    for name, value in (("max_iter", train.train_iter), ("warmup_iter", train.warmup_iter)):
        if name in taken:
            scheduler[name] = value
    if (milestones := try_get_key(scheduler, "milestones")) is not None:
        scheduler.milestones = milestone_iterations(milestones, train.train_iter)


def _scale_periods(train: DictConfig, iter_per_epoch: int) -> None:
    if (epochs := try_get_key(train, "evaluation.eval_after_n_epoch")) is not None:
        train.evaluation.eval_period = epochs * iter_per_epoch
    if (epochs := try_get_key(train, "checkpointer.save_model_after_n_epoch")) is not None:
        train.checkpointer.period = epochs * iter_per_epoch

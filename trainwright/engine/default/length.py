"""The length of a run: its iterations, and the settings of a configuration that depend on them and on the data."""

import copy
import inspect
import logging
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from omegaconf import DictConfig

from trainwright.config.errors import ConfigError
from trainwright.config.lazy.instantiation import locate_target
from trainwright.config.lazy.lazy_config import try_get_key
from trainwright.config.lazy.provenance import are_several, is_set
from trainwright.config.schema.sections import (
    exact,
    iterations_of_epochs,
    milestone_iterations,
    total_iterations,
    warmup_iterations,
)
from trainwright.data.sampler import CyclicSampler
from trainwright.engine.run import Run
from trainwright.optim.schedules import extend_schedule
from trainwright.parallel.dist import get_data_parallel_size

logger = logging.getLogger("trainwright.engine")

BATCH_SIZES = ("train_micro_batch_size", "global_batch_size", "num_accumulation_steps")


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
    if train.train_epoch == 0 and is_set(train, "train_epoch") and not is_set(train, "train_iter"):
        logger.warning(
            "train.train_epoch=0: the length of the run is the default train.train_iter=%d. Set train.train_iter,"
            " or a train_epoch above 0.", train.train_iter,
        )  # fmt: skip
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
    dataset, sampler = getattr(data_loader, "dataset", None), getattr(data_loader, "batch_sampler", None)
    if isinstance(sampler, CyclicSampler):
        return sampler.num_used
    if hasattr(dataset, "__len__"):
        return len(dataset)  # type: ignore[arg-type]
    if dataset is None and hasattr(data_loader, "__len__"):
        return len(data_loader) * batch_size
    return None


def iterations_per_epoch(train: DictConfig, num_samples: int | None) -> int | Fraction | None:
    """None: unknown. A fraction where an epoch ends within an iteration."""
    if length := train.get("iter_per_epoch"):
        return int(length)
    return max(Fraction(num_samples, train.global_batch_size), Fraction(1)) if num_samples else None


def scale_shares(train: DictConfig) -> None:
    """Write periods that are shares of all iterations as iterations."""
    for section, key in ((train, "log_period"), (train.checkpointer, "period"), (train.evaluation, "eval_period")):
        if isinstance(section[key], float):
            section[key] = math.ceil(exact(section[key]) * train.train_iter)


def _scale_scheduler(train: DictConfig) -> None:
    several = train.scheduler.values() if are_several(train.scheduler) else [train.scheduler]
    for scheduler in several:
        if isinstance(scheduler, DictConfig) and "_target_" in scheduler:
            _scale_one(train, scheduler)


def _scale_one(train: DictConfig, scheduler: DictConfig) -> None:
    taken = inspect.signature(locate_target(scheduler)).parameters  # torch's schedulers take neither
    for name, value in (("max_iter", train.train_iter), ("warmup_iter", train.warmup_iter)):
        if name in taken:
            scheduler[name] = value
    if (milestones := try_get_key(scheduler, "milestones")) is not None:
        scheduler.milestones = milestone_iterations(milestones, train.train_iter)


def _scale_periods(train: DictConfig, iter_per_epoch: int) -> None:
    """Write periods in epochs as whole iterations, for what is shown; the hooks count the epochs themselves."""
    if (epochs := try_get_key(train, "evaluation.eval_after_n_epoch")) is not None:
        train.evaluation.eval_period = epochs * iter_per_epoch
    if (epochs := try_get_key(train, "checkpointer.save_model_after_n_epoch")) is not None:
        train.checkpointer.period = epochs * iter_per_epoch


def longer_cfg(given: DictConfig, train: DictConfig, length: int) -> DictConfig:
    """The configuration ``given`` by the user, of a run of ``length`` iterations with the batch sizes of ``train``."""
    longer = copy.deepcopy(given)
    longer.train.update({"train_iter": length, "train_epoch": 0})
    longer.train.update({name: train[name] for name in BATCH_SIZES})
    return longer


def extend_schedules(run: Run, build: Callable[[Any], Any]) -> None:
    """Make the schedules those of a longer run, at their positions; ``build`` builds them for an optimizer."""
    if run.lr_scheduler is not None:
        extend_schedule(run.lr_scheduler, build)
        return
    rates = [group["lr"] for group in run.optimizer.param_groups]
    longer = build(run.optimizer)  # sets the first rates of all of them
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for name, schedule in run.lr_schedulers.items():
        extend_schedule(schedule, partial(_built, longer[name]))


def _built(schedule: Any, optimizer: Any) -> Any:
    return schedule

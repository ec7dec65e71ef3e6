"""The learning-rate schedule."""

from collections import Counter

import torch

from trainwright.config.errors import ConfigError
from trainwright.hooks.base import HookBase


class LRScheduler(HookBase):
    """Record the learning rate of each iteration as ``lr``, and step the schedule.

    With several parameter groups, records the rate of the largest one. Uses the trainer's ``optimizer`` and
    ``lr_scheduler`` by default.

    Raises:
        ConfigError: before the training, if the schedule is a ReduceLROnPlateau.
    """

    _leaves_plateaus = False  # steps of ReduceLROnPlateau are made by another hook

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._group = 0

    def before_train(self) -> None:
        optimizer = self._optimizer or self.trainer.optimizer
        self._scheduler = self._scheduler or self.trainer.lr_scheduler
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and not self._leaves_plateaus:
            raise ConfigError(
                "LRScheduler: got a ReduceLROnPlateau, which is stepped with a metric; this hook steps a schedule after"
                " each iteration. Use another schedule, or remove this hook and step the schedule in your own hook."
            )
        self._group = _representative_group(optimizer)

    def after_step(self) -> None:
        assert self._scheduler is not None  # set in before_train
        self.trainer.storage.put_scalar("lr", self._scheduler.get_last_lr()[self._group], smoothing_hint=False)
        self._scheduler.step()


def _representative_group(optimizer: torch.optim.Optimizer) -> int:
    """The group whose rate is recorded: the largest; the most common rate if every group has one parameter."""
    groups = optimizer.param_groups
    largest = max(len(group["params"]) for group in groups)
    if largest > 1:
        return next(i for i, group in enumerate(groups) if len(group["params"]) == largest)
    commonest, _ = Counter(float(group["lr"]) for group in groups).most_common(1)[0]
    return next(i for i, group in enumerate(groups) if float(group["lr"]) == commonest)

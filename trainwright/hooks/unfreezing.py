"""Gradual unfreezing: layers that are frozen at first, and trained from a step on."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from trainwright.base.dist import gather_over_pipeline
from trainwright.base.errors import ConfigError, ConfigKeyError
from trainwright.hooks.base import HookBase
from trainwright.optim.freeze import LayerFreezer

logger = logging.getLogger("trainwright.hooks")


class Unfreezing(HookBase):
    """Freezes all layers of ``stages`` and unfreezes those of each stage at its step.

    What is frozen depends on the number of steps only, so a checkpoint needs no state of it. The optimizer must hold
    the parameters of all layers; frozen ones have no gradient and do not change.

    Args:
        stages: the number of steps before the layers are trained, and their names (as of ``LayerFreezer.by_names``).
        steps_done: returns the number of steps so far.

    Raises:
        ConfigKeyError: the model has no layer of a name.
        ConfigError: nothing would be trained before the first stage.
    """

    slot = "prepare"

    def __init__(
        self, model: nn.Module, stages: Iterable[tuple[int, Sequence[str]]], steps_done: Callable[[], int]
    ) -> None:
        self._freezer, self._steps_done = LayerFreezer(model), steps_done
        self._stages = sorted(stages, key=lambda stage: stage[0])
        self._next = 0
        trainable = [parameter.requires_grad for parameter in model.parameters()]
        try:
            self._freeze_all()
        except ConfigKeyError as error:
            raise ConfigKeyError(str(error).replace("LayerFreezer.by_names", "unfreeze")) from None
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        for parameter, was_trainable in zip(model.parameters(), trainable, strict=True):
            parameter.requires_grad = was_trainable  # the optimizer may not be built yet
        if not any(gather_over_pipeline(is_trained)):  # a stage may have only frozen layers
            raise ConfigError(
                f"unfreeze: every parameter of {type(model).__name__} would be frozen until step {self._stages[0][0]}."
                " Leave out the layers that are trained from the start."
            )

    def before_train(self) -> None:
        self._freeze_all()
        self._next = 0
        self.before_step()

    def before_step(self) -> None:
        while self._next < len(self._stages) and self._stages[self._next][0] <= self._steps_done():
            step, names = self._stages[self._next]
            self._next += 1
            self._freezer.by_names(names, freeze=False)
            logger.info("Step %d: trained from now on: %s.", step, _quoted(names))

    def described(self) -> str:
        """The layers that are frozen now or from the start of the training on, each until its step."""
        return ", ".join(
            f"{_quoted(names)} until step {step}" for step, names in self._stages if step > self._steps_done()
        )

    def _freeze_all(self) -> None:
        for _, names in self._stages:
            self._freezer.by_names(names)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))  # the name of a layer may be a number


def unfreezing_hook(
    model: nn.Module,
    settings: Sequence[Mapping[str, Any]] | None,
    steps_done: Callable[[], int],
    *,
    total_steps: int,
    steps_per_epoch: int | None,
) -> Unfreezing | None:
    """The hook for the setting ``unfreeze`` of a run; None without one."""
    if not settings:
        return None
    stages = []
    for stage in settings:
        step, names = stage.get("step"), stage["layers"]
        if step is None and steps_per_epoch is None:
            raise ConfigError("unfreeze: got an epoch, but the length of an epoch is unknown, or changes. Give a step.")
        if step is None:
            step = math.ceil(stage["epoch"] * (steps_per_epoch or 0))
        step = math.ceil(step * total_steps) if isinstance(step, float) else step
        if step >= total_steps:
            are = "is" if len(names) == 1 else "are"
            logger.warning("unfreeze: %s %s never trained, step %d is after the end.", _quoted(names), are, step)
        stages.append((step, list(names)))
    return Unfreezing(model, stages, steps_done)

"""Step the learning-rate schedule."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, ReduceLROnPlateau
from torch.optim.lr_scheduler import LRScheduler as Scheduler

from trainwright._torch_compat.optimizer_import import mark_stepped
from trainwright.base.dist import get_world_size
from trainwright.base.errors import ConfigError
from trainwright.hooks.base import HookBase, has_failed
from trainwright.hooks.due import Condition, Moment, Period
from trainwright.optim.named import NamedOptimizers
from trainwright.parallel.pipeline import pipeline_of

logger = logging.getLogger("trainwright.hooks")


class LRScheduler(HookBase):
    """Record the learning rate of each iteration as ``lr``, and step the schedule when ``period`` is over.

    With several parameter groups, records the rate of the largest one. Uses the trainer's current ``optimizer`` and
    ``lr_scheduler`` by default; without a schedule it only records. A schedule that the step has stepped itself is not
    stepped again. A :class:`ReduceOnPlateau` hook steps a ReduceLROnPlateau.

    With several optimizers (``trainer.optimizers``) the rates are ``lr/g``, ``lr/d``, and each of
    ``trainer.lr_schedulers`` is stepped. ``name``: one optimizer of several; its rate is recorded as ``lr/name``.

    Raises:
        ConfigError: before the training, if the schedule is a ReduceLROnPlateau and no hook steps it.
    """

    slot = "step"
    steps_schedule = True

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        *,
        period: Period = 1,
        name: str = "",
    ) -> None:
        self._period, self._key = period, f"lr/{name}" if name else "lr"
        self._is_named, self._is_own = bool(name), bool(name) or scheduler is not None
        self._each: list[LRScheduler] = []  # one for each of several optimizers
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._num_due = None if period == 1 else Condition(period)  # None: one step in each iteration
        self._current: Any = None  # the schedule, and
        self._position: int | None = None  # where it is
        self._steps = False  # whether it is one that this hook steps
        self._group, self._has_rate = 0, False
        # The rates of the latest update by name, if other processes have to have the same.
        self._rates: Callable[[], dict[str, float]] | None = None
        self._used: dict[str, float] = {}
        # Of a schedule that does not continue from a rate that others set: where they set it, it soon changes it again.
        self._watches, self._written, self._base = False, 0.0, list[Any]()  # its latest rate, and its base rates
        self._set_to: float | None = None  # by others
        self._is_lost = False  # by a step of the schedule since then

    def before_train(self) -> None:
        several = self.trainer.optimizer if self._optimizer is None and self._scheduler is None else None
        self._each = []
        if isinstance(several, NamedOptimizers):
            schedules = self.trainer.lr_schedulers
            for name, optimizer in several.optimizers.items():
                hook = LRScheduler(optimizer, schedules.get(name), period=self._period, name=name)
                hook.trainer = self.trainer
                hook.before_train()
                self._each.append(hook)
            return
        self._use(self.schedule)
        is_plateau = isinstance(self._current, ReduceLROnPlateau)
        if is_plateau and not any(hook.uses_results for hook in self.trainer.hooks):
            raise ConfigError(
                "LRScheduler: got a ReduceLROnPlateau, which is stepped with a metric, and no hook does so. In a config"
                " file it takes dataloader.test, and as train.evaluation.eval_metric a result of the evaluation. The"
                " hook ReduceOnPlateau steps by a metric of yours."
            )

    def after_step(self) -> None:
        if self._each:
            for hook in self._each:
                hook.after_step()
            return
        scheduler = self._scheduler if self._is_own else self.trainer.lr_scheduler
        if scheduler is not self._current:  # a callback has set another optimizer
            self._use(scheduler)
        if not self._has_rate:
            return
        optimizer = self._optimizer or self.trainer.optimizer
        group, position = optimizer.param_groups[self._group], getattr(scheduler, "last_epoch", None)
        rate, is_ours = group["lr"], self._steps and position == self._position
        self.trainer.storage.put_scalar(self._key, rate, smoothing_hint=False)
        if self._rates is not None:
            self._used = self._rates()
        # No tensor: to compare it, a device would be read.
        if self._watches and is_ours and isinstance(rate, float) and (self._is_lost or rate != self._written):
            self._see(rate)
        if self._num_due is not None:
            self.step(self._num_due(self.trainer))
        elif is_ours and scheduler is not None:
            scheduler.step()
        self._position = getattr(scheduler, "last_epoch", None)
        if self._watches:
            self._is_lost, self._written = self._set_to is not None and self._position != position, group["lr"]

    def step(self, number: int) -> int:
        """Step the schedule ``number`` times, if it is this hook that steps it; returns how often it did."""
        scheduler = self._current
        if not self._steps or getattr(scheduler, "last_epoch", None) != self._position:
            return 0
        for _ in range(number):
            scheduler.step()
        self._position = getattr(scheduler, "last_epoch", None)
        if self._watches:
            self._written = (self._optimizer or self.trainer.optimizer).param_groups[self._group]["lr"]
        return number

    def _watch(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Watch from now on whether others set a rate that the schedule computes from its base rate."""
        scheduler = self._current
        is_computed = self._steps and isinstance(scheduler, LambdaLR | CosineAnnealingWarmRestarts)
        self._watches = is_computed and self._has_rate and not getattr(self.trainer, "is_copy", False)
        self._set_to, self._is_lost = None, False
        if self._watches:
            self._written, self._base = groups[self._group]["lr"], [*scheduler.base_lrs]

    def _see(self, rate: float) -> None:
        """Others have set the rate since the latest step of the schedule, or have not set it again after that."""
        is_set = rate != self._written
        if is_set and not self._is_lost:
            self._set_to = rate
            return
        self._watches = False
        is_near = self._set_to is None or abs(rate - self._set_to) <= 0.1 * abs(self._set_to)  # also of a rate of 0
        # Else it is set again after each step, or with them, or the schedule computes it in another way now.
        if not is_set and not is_near and self._set_to and self._current.base_lrs == self._base:
            name = getattr(self._current, "name", type(self._current).__name__)
            logger.warning(
                "The learning rate was set to %g and lost with the next step of %s, which computes it from its base"
                " rate. To set it yourself, write lr_scheduler_type=None (in a config file"
                " train.scheduler = LazyCall(ConstantLR)(factor=1.0)); or set base_lrs of the schedule.",
                self._set_to, name,
            )  # fmt: skip

    @property
    def schedule(self) -> Any:
        return self._scheduler if self._is_own else self.trainer.lr_scheduler

    def _use(self, scheduler: Any) -> None:
        self._current = scheduler
        self._steps = scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau)
        optimizer = self._optimizer or getattr(self.trainer, "optimizer", None)
        groups = getattr(optimizer, "param_groups", ())
        self._has_rate = len(groups) > 0 and all("lr" in group for group in groups)
        if optimizer is not None and self._has_rate:
            self._group = _representative_group(optimizer)
            names = [f"{self._key} of group {place}" for place in range(len(groups))]
            names[self._group] = self._key
            if pipeline_of(getattr(self.trainer, "model", None)) is not None:  # each stage has the groups of its layers
                names = [f"{self._key} of the group with {_settings(group)}" for group in groups]
            if get_world_size() > 1:
                self._rates = partial(_rates, optimizer, names)
                self._used = self._rates()
                self.trainer.storage.alike[self._key] = lambda: self._used
            self._position = getattr(scheduler, "last_epoch", None)
            if self._is_named:  # a step of the user's own may leave it out for some iterations: torch would warn
                mark_stepped(optimizer)
        self._watch(groups)


class ReduceOnPlateau(HookBase):
    """Step each ``ReduceLROnPlateau`` of the trainer with ``read_metric()``, which returns None to skip a step.

    By default after each evaluation; with ``period`` when that is over.
    """

    slot = "evaluate"
    steps_schedule = uses_results = True

    def __init__(self, read_metric: Callable[[], float | None], period: Period | None = None) -> None:
        self._read_metric = read_metric
        self._is_due = None if period is None else Condition(period)
        self.due = (Moment.RESULTS if self._is_due is None else self._is_due,)
        self._seen: object = None  # results

    def before_first_step(self) -> None:
        self._seen = self.trainer.last_eval_results  # not that of the initial weights

    def after_step(self) -> None:
        seen, self._seen = self._seen, self.trainer.last_eval_results
        if not (self._seen is not seen if self._is_due is None else self._is_due(self.trainer)):
            return
        several = getattr(self.trainer, "lr_schedulers", None) or {}
        schedulers = [s for s in (self.trainer.lr_scheduler, *several.values()) if isinstance(s, ReduceLROnPlateau)]
        value = self._read_metric() if schedulers else None
        if value is not None:
            for scheduler in schedulers:
                scheduler.step(value)

    def use_results(self) -> None:
        if self._is_due is None:
            self.after_step()

    def after_train(self) -> None:
        # Use the final evaluation, as a longer run would at this point.
        if self._is_due is None and not has_failed(self.trainer):
            self.after_step()


def _settings(group: Mapping[str, Any]) -> str:
    """What tells a group from others, whose rates may be others: its first rate and all that is set."""
    first = {} if "initial_lr" in group else {"first lr": group["lr"]}
    rest = {key: value for key, value in group.items() if key not in ("params", "lr")}
    shown = sorted({**rest, **first}.items())
    return ", ".join(f"{key}={value}" for key, value in shown if not (value is None or value is False))


def _rates(optimizer: Optimizer, names: Sequence[str]) -> dict[str, float]:
    """The rates of the groups by name, without those of a name that means several rates."""
    rates: dict[str, set[float]] = {}
    for name, group in zip(names, optimizer.param_groups, strict=False):  # groups may have been added
        rates.setdefault(name, set()).add(float(group["lr"]))
    return {name: found.pop() for name, found in rates.items() if len(found) == 1}


def _representative_group(optimizer: Optimizer) -> int:
    """The group whose rate is recorded: the largest; the most common rate if every group has one parameter.

    With learning rates by layer, the first one, which is of the last layer.
    """
    groups = optimizer.param_groups
    if "layer" in groups[0]:
        return 0
    largest = max(len(group["params"]) for group in groups)
    if largest > 1:
        return next(i for i, group in enumerate(groups) if len(group["params"]) == largest)
    commonest, _ = Counter(float(group["lr"]) for group in groups).most_common(1)[0]
    return next(i for i, group in enumerate(groups) if float(group["lr"]) == commonest)

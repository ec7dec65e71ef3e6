"""Build what changes the weights from a TrainingConfig: precision, criterion, optimizer and schedule."""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainwright._torch_compat.optimizer_import import mark_stepped, without_compiler
from trainwright.base.dist import gather_over_pipeline, get_tensor_parallel_size
from trainwright.base.errors import ConfigError
from trainwright.base.signatures import read_signature
from trainwright.config.spec import RunSpec
from trainwright.config.torch_names import CUSTOM
from trainwright.engine.run import TrainerRun
from trainwright.engine.step_plan import steps_of
from trainwright.hooks import HookBase
from trainwright.hooks import LRScheduler as ScheduleHook
from trainwright.optim import schedules as configured
from trainwright.optim.freeze import NO_PARAMETERS
from trainwright.optim.fused import run_fused
from trainwright.optim.muon import Muon
from trainwright.optim.named import NamedOptimizers, by_name
from trainwright.optim.schedules import FormulaLR, check_cycle, extend_schedule, warn_of_unit

logger = logging.getLogger("trainwright.engine")

Autocast = Callable[[], torch.autocast]  # builds the context of one call: contexts may be nested


def build_criterion(spec: RunSpec, device: torch.device) -> nn.Module | None:
    """``spec.loss`` on the device; None if it is not set. Weights without a dtype get that of the outputs."""
    from trainwright.config.torch_names import LOSS_DTYPE, split_name, torch_dtype

    if spec.loss is None or spec.loss == CUSTOM:
        return None
    _, named = split_name(spec.loss)
    has_dtype = LOSS_DTYPE in named
    dtype = torch_dtype(named.pop(LOSS_DTYPE, "float32"))
    lists = {name: values for name, values in named.items() if isinstance(values, list)}
    arguments = named | {name: torch.tensor(values, dtype=dtype) for name, values in lists.items()}
    criterion: nn.Module = _built(_class_of("loss", spec.loss), "loss", **arguments).to(device)
    if lists and not has_dtype:
        criterion.register_forward_pre_hook(partial(_use_dtype_of_outputs, lists))
    return criterion


def _use_dtype_of_outputs(lists: Mapping[str, list[float]], criterion: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Give a loss its weights in the dtype of the outputs, as torch asks; autocast computes losses in float32."""
    outputs = inputs[0]
    dtype = torch.float32 if torch.is_autocast_enabled(outputs.device.type) else outputs.dtype
    for name, values in lists.items():
        weight = getattr(criterion, name, None)
        if isinstance(weight, Tensor) and dtype.is_floating_point and weight.dtype != dtype:
            setattr(criterion, name, torch.tensor(values, dtype=dtype, device=outputs.device))


def _class_of(kind: str, named: Any) -> type[Any]:
    """The class of torch that a setting names."""
    from trainwright.config.torch_names import find_torch_class

    found, _ = find_torch_class(kind, named)
    assert found is not None, "checked when the settings were made"
    return found


def _built(found: type[Any], setting: str, *arguments: Any, **more: Any) -> Any:
    try:
        return found(*arguments, **more)
    except ConfigError as error:  # of an optimizer of trainwright, which names itself and the value
        raise ConfigError(f"TrainingConfig.{setting}: {error}") from error
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"TrainingConfig.{setting}: {found.__name__} does not accept {more}: {error}.") from error


@without_compiler()
def build_optimizer(spec: RunSpec, model: nn.Module) -> Optimizer:
    """``spec.optimizer`` over the parameters of ``model``.

    Includes frozen parameters: they have no gradient and do not change, and a resumed run may freeze others.
    """
    from trainwright.config.torch_names import split_name

    found = _class_of("optimizer", spec.optimizer)
    _, arguments = split_name(spec.optimizer)
    if not any(gather_over_pipeline(any(parameter.requires_grad for parameter in model.parameters()))):
        fix = "has no trainable parameter; set requires_grad=True on some."
        if not any(gather_over_pipeline(any(True for _ in model.parameters()))):
            fix = NO_PARAMETERS
        raise ConfigError(f"Trainer.model: {type(model).__name__} {fix}")
    settings = {"lr": spec.learning_rate, **arguments}
    if "weight_decay" in read_signature(found).parameters or spec.weight_decay:
        settings.setdefault("weight_decay", spec.weight_decay)
    parameters: list[Any] = list(model.parameters())
    is_muon = found is torch.optim.Muon
    if spec.layer_decay is not None or not spec.decay_norm_and_bias or is_muon:
        parameters = _parameter_groups(spec, model, settings, is_muon=is_muon)
    kind = Muon if is_muon else found
    optimizer: Optimizer = _built(kind, "optimizer", parameters, **settings)
    run_fused(optimizer, model)
    return optimizer


def _parameter_groups(
    spec: RunSpec, model: nn.Module, settings: Mapping[str, Any], *, is_muon: bool
) -> list[dict[str, Any]]:
    """Groups by layer, and without weight decay of norm layers and biases, as configured."""
    off = None if spec.decay_norm_and_bias else 0.0
    if off is not None and not settings.get("weight_decay"):
        logger.warning("TrainingConfig.decay_norm_and_bias=False has no effect without weight_decay.")
    from trainwright.optim.build import get_default_optimizer_params  # here: loads omegaconf

    return get_default_optimizer_params(
        model,
        base_lr=settings["lr"],
        weight_decay_norm=off,
        weight_decay_bias=off,
        layer_decay=spec.layer_decay,
        include_frozen=True,
        hidden_matrices=is_muon,
    )


def losses(
    criterion: Callable[..., Tensor] | None, own_loss: Callable[..., Tensor] | None, autocast: Autocast | None
) -> tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]:
    """The criterion, and the model's own ``compute_loss`` if it has one, in the run's precision."""
    if get_tensor_parallel_size() > 1:
        from trainwright.parallel.tensor import with_local_loss

        criterion, own_loss = criterion and with_local_loss(criterion), own_loss and with_local_loss(own_loss)
    if autocast is None:
        return criterion, own_loss
    return criterion and autocast()(criterion), own_loss and autocast()(own_loss)


class Schedules:
    """Builds and steps the schedules of a run.

    Args:
        given: the user's schedules, by the names of their optimizers; None: those of the configuration.
        plateau_mode: returns the mode of a ReduceLROnPlateau whose arguments do not set it.
    """

    def __init__(
        self, run: TrainerRun, given: Mapping[str, LRScheduler] | None, plateau_mode: Callable[[], str]
    ) -> None:
        self._run, self._given, self._state, self._plateau_mode = weakref.proxy(run), given, run.state, plateau_mode
        self._first = self._planned = 0  # the update that the schedules start at, and the length they have
        self._hooks: list[ScheduleHook] = []
        self._known: set[LRScheduler] = set()  # built, passed, or checked before
        self._built: set[LRScheduler | None] = set()
        self._num_within: dict[Any, tuple[int, int]] = {}  # the steps before the update that ended at a global step
        every = run.spec.lr_scheduling_steps
        for one in (given or {}).values():
            if not isinstance(one, FormulaLR | ReduceLROnPlateau):
                often = f"every {every} steps" if every else "once an epoch"
                logger.info("The passed %s is stepped %s; lr_scheduling_steps changes that.", type(one).__name__, often)

    def of(self, optimizer: Optimizer) -> tuple[LRScheduler | None, dict[str, LRScheduler]]:
        """The schedule of one optimizer, and those of several by name."""
        found = dict(self._given or {})
        self._planned = self._state.plan.num_updates
        if self._given is None:
            built = {name: self._build(one, self._state.plan.num_updates) for name, one in by_name(optimizer).items()}
            found = {name: schedule for name, schedule in built.items() if schedule is not None}
            self._built |= set(found.values())
        self._known |= set(found.values())
        return (None, found) if isinstance(optimizer, NamedOptimizers) else (found.get("optimizer"), {})

    def replace(self, optimizer: Optimizer) -> LRScheduler | None:
        """A schedule of the configuration over the updates that are left, also in place of the user's."""
        self._given, self._first = None, self._state.updates_done
        built = self._build(optimizer, self._num_updates())
        self._known |= set() if built is None else {built}
        self._built.add(built)
        return built

    def follow(self, schedules: Iterable[LRScheduler | None]) -> None:
        """Let those that the configuration has set follow the current length of the run, if it has changed."""
        before, self._planned = self._planned, self._state.plan.num_updates
        if before == self._planned:
            return
        for schedule in filter(None, self._built.intersection(schedules)):
            extend_schedule(schedule, lambda optimizer: self._build(optimizer, self._num_updates()))

    def _num_updates(self) -> int:
        return max(1, self._state.plan.num_updates - self._first)

    def hooks(self, optimizer: Optimizer, schedules: Mapping[str, LRScheduler]) -> list[HookBase]:
        """The hooks that step them: the run's one, whichever it is then, or those of several optimizers by name."""
        is_torchs = bool(self._run.spec.lr_scheduler or self._given is not None)
        if not isinstance(optimizer, NamedOptimizers):
            self._hooks = [ScheduleHook(period=self._num_due if is_torchs else 1)]
            return [*self._hooks]
        self._hooks = []
        for name, one in optimizer.optimizers.items():
            schedule = schedules.get(name)
            period = partial(self._num_due, schedule) if is_torchs else 1
            self._hooks.append(ScheduleHook(one, schedule, period=period, name=name))
        return [*self._hooks]

    def length(self, schedule: LRScheduler) -> int:
        """The number of steps of a schedule in the run."""
        plan, every = self._state.plan, self._every(schedule)
        return plan.total_steps // every if every else plan.num_updates

    def _num_left(self, schedule: LRScheduler) -> int:
        """The number of its steps that are still to come."""
        every, state = self._every(schedule), self._state
        return self.length(schedule) - (state.global_step // every if every else state.updates_done)

    def check(self, schedules: Iterable[LRScheduler]) -> None:
        """Before a training: refuse what does not fit its length, and say when one is stepped that was assigned."""
        for schedule in schedules:
            every, planned = self._every(schedule), getattr(schedule, "last_epoch", 0) + self._num_left(schedule)
            often, fix = f"every {every} steps" if every else "after each update", f"Set total_steps={planned}"
            if every not in (None, 1):
                fix += f", or lr_scheduling_steps=1 and total_steps={self._state.plan.total_steps}"
            plan, spec = self._state.plan, self._run.spec
            has_epochs = plan.max_steps is None and not spec.may_end_early
            is_declared = spec.lr_scheduling_steps is not None  # what a step is
            check_cycle(schedule, planned, often, fix, epochs=plan.num_epochs if has_epochs and not is_declared else 0)
            # Only where lr_scheduling_steps counts for it, may it be meant in batches.
            warn_of_unit(schedule, planned, often, plan.total_steps if every else 0, plan.steps_per_epoch)
            if schedule not in self._known and not isinstance(schedule, FormulaLR | ReduceLROnPlateau):
                instead = (
                    "; passed to the Trainer as lr_scheduler=, it is stepped once an epoch" if every is None else ""
                )
                logger.info("The assigned %s is stepped %s%s.", type(schedule).__name__, often, instead)
            self._known.add(schedule)

    def step_within_window(self) -> None:
        """Before an update of several batches: the steps that are due before its last batch."""
        for hook in self._hooks:
            every = self._every(hook.schedule)
            within = (self._state.global_step - 1) // every - self._state.step_before // every if every else 0
            if within and hook.schedule is not None:  # one of several optimizers may have none
                mark_stepped(hook.schedule.optimizer)  # torch would warn: the first update comes later
                self._num_within[hook.schedule] = self._state.global_step, hook.step(within)

    def _num_due(self, schedule: LRScheduler | None = None) -> int:
        """The steps of a schedule of torch or the user: by default one an epoch. Others step after each update."""
        schedule = schedule or self._run.lr_scheduler
        every, (at, done) = self._every(schedule), self._num_within.get(schedule, (0, 0))
        return self._state.num_passed(every) - (done if at == self._state.global_step else 0) if every else 1

    def _every(self, schedule: LRScheduler | None) -> int | None:
        """Steps between two steps of a schedule; None: it is stepped after each update."""
        spec, plan = self._run.spec, self._state.plan
        if not (spec.lr_scheduler or self._given is not None):
            return None
        own = steps_of(spec.lr_scheduling_steps, plan.total_steps)
        return own or (None if isinstance(schedule, FormulaLR) else plan.steps_per_epoch)

    def _build(self, optimizer: Optimizer, num_updates: int) -> LRScheduler | None:
        return build_lr_scheduler(self._run.spec, optimizer, num_updates, self._plateau_mode)


def build_lr_scheduler(
    spec: RunSpec, optimizer: Optimizer, num_updates: int, plateau_mode: Callable[[], str]
) -> LRScheduler | None:
    """The schedule over ``num_updates`` updates: ``spec.lr_scheduler`` (torch's) or ``lr_scheduler_type`` (warm-up).

    None if neither is set, and for an optimizer whose groups have no learning rate. ``plateau_mode`` returns the mode
    of a ReduceLROnPlateau, "min" or "max", if its arguments do not set it.
    """
    if not all("lr" in group for group in optimizer.param_groups):
        return None
    if spec.lr_scheduler is not None:
        return _torch_scheduler(spec.lr_scheduler, spec.lr_scheduler_kwargs or {}, optimizer, plateau_mode)
    if isinstance(spec.lr_scheduler_type, Mapping):
        return _torch_scheduler(spec.lr_scheduler_type, {}, optimizer, plateau_mode)
    share, steps = spec.warmup_ratio, spec.warmup_steps
    if isinstance(steps, float):
        share, steps = steps, 0
    warmup = steps or math.ceil(num_updates * share)
    if warmup >= num_updates > 1 and spec.lr_scheduler_type not in (None, "constant") and not spec.fast_dev_run:
        logger.warning(
            "TrainingConfig.warmup_steps: the warm-up takes %d updates, and there are %d: the learning rate is never"
            " reached. A share of all updates is a float, such as 0.1.", warmup, num_updates,
        )  # fmt: skip
    kind: Any = spec.lr_scheduler_type
    if kind is None:
        return None
    counts: dict[str, tuple[int, ...]] = {"constant": (), "constant_with_warmup": (warmup,)}
    return _CONFIGURED[kind](optimizer, *counts.get(kind, (warmup, num_updates)))


_CONFIGURED: dict[str, Callable[..., LRScheduler]] = {
    "constant": configured.configure_constant_scheduler,
    "constant_with_warmup": configured.configure_constant_scheduler_with_warmup,
    "linear": configured.configure_linear_scheduler_with_warmup,
    "cosine": configured.configure_cosine_scheduler_with_warmup,
    "cosine_with_restarts": configured.configure_cosine_with_hard_restarts_scheduler_with_warmup,
    "polynomial": configured.configure_polynomial_decay_scheduler_with_warmup,
}


def _torch_scheduler(
    named: Any, arguments: Mapping[str, Any], optimizer: Optimizer, plateau_mode: Callable[[], str]
) -> LRScheduler:
    from trainwright.config.torch_names import find_torch_class, split_name

    name, inner = split_name(named)
    found, _ = find_torch_class("lr_scheduler", named)
    arguments = {**inner, **arguments}
    if found is torch.optim.lr_scheduler.ReduceLROnPlateau and "mode" not in arguments:
        arguments["mode"] = plateau_mode()
    if name == "constant":  # torch's ConstantLR starts with a third of the rate
        arguments = {"factor": 1.0, **arguments}
    scheduler: LRScheduler = _built(_class_of("lr_scheduler", named), "lr_scheduler_kwargs", optimizer, **arguments)
    return scheduler

"""Several optimizers by name, as one: ``{"g": Adam(...), "d": Adam(...)}``."""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.base.errors import ConfigError, ConfigTypeError, did_you_mean

# What torch's base class sets on an optimizer.
_OF_BASE = {
    "state", "param_groups", "defaults", "step", "_opt_called", "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused", "_step_supports_amp_scaling",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_patch_step_function",
    "_optimizer_load_state_dict_post_hooks",
}  # fmt: skip
CLIPPING = "clip_grad_"  # the beginning of the names under which a group has its clipping


class NamedOptimizers(Optimizer):
    """Optimizers of disjoint parameters. ``step`` and ``zero_grad`` call all of them, in the order of their names.

    Attributes:
        optimizers: by name.

    Raises:
        ConfigError: there is none, a name has odd characters, or two optimizers hold the same parameter.
        ConfigTypeError: a value is not an optimizer.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], *, where: str = "optimizers") -> None:
        # Without the base class's constructor: the parameter groups are those of the optimizers.
        check_names(optimizers, where)
        for name, optimizer in optimizers.items():
            if not (hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")):
                raise ConfigTypeError(
                    f"{where}[{name!r}]: got {optimizer!r:.60} ({type(optimizer).__name__}); it must be a"
                    " torch.optim.Optimizer."
                )
        self.optimizers = dict(optimizers)
        owner: dict[int, str] = {}
        for name, optimizer in optimizers.items():
            for parameter in parameters_of(optimizer):
                if (other := owner.setdefault(id(parameter), name)) != name:
                    raise ConfigError(
                        f"{where}: {other!r} and {name!r} hold the same parameter, of shape {tuple(parameter.shape)};"
                        " each parameter belongs to one optimizer."
                    )

    @property  # a load replaces the groups of an optimizer
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: state for optimizer in self.optimizers.values() for key, state in optimizer.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each optimizer; ``closure`` is not used."""
        for optimizer in self.optimizers.values():
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, optimizer in self.optimizers.items():
            load_state(optimizer, state_dict[name])

    def __repr__(self) -> str:
        parts = ", ".join(f"{name!r}: {type(optimizer).__name__}" for name, optimizer in self.optimizers.items())
        return f"NamedOptimizers({{{parts}}})"


def load_state(optimizer: Optimizer, state: Any) -> None:
    """``optimizer.load_state_dict(state)``, without torch's cast of its tensors to the dtypes of the parameters.

    A momentum in bfloat16, or float32 copies of bfloat16 weights, stay what they were. States are laid out in memory
    like their parameters, unless they were saved with a layout of their own. Groups keep how they are clipped, which is
    a setting of the run and not state.
    """
    is_torchs = type(optimizer).load_state_dict is Optimizer.load_state_dict  # another may take other groups
    sizes = _group_sizes(state) if is_torchs else None
    here = [len(group["params"]) for group in optimizer.param_groups]
    if sizes not in (None, here):
        raise ConfigError(
            f"The checkpoint has the state of {type(optimizer).__name__} for groups of {_listed(sizes)} parameters;"
            f" this run has groups of {_listed(here)}. Build the same groups in the same order, or start a new run with"
            " the weights only."
        )
    clipping = [{key: group[key] for key in group if key.startswith(CLIPPING)} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, clipping, strict=False):
        for key in [key for key in group if key.startswith(CLIPPING) and key not in own]:
            del group[key]
        group.update(own)
    saved: Any = state.get("state") if isinstance(state, Mapping) else None
    if not isinstance(saved, Mapping):
        return  # a format of its own
    for number, parameter in enumerate(parameters_of(optimizer)):
        loaded, values = optimizer.state.get(parameter, {}), saved.get(number)
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, Tensor) and isinstance(loaded.get(key), Tensor) and value.dtype != loaded[key].dtype:
                loaded[key] = value.to(loaded[key].device, copy=True)
    _lay_out_as_parameters(optimizer)


def _group_sizes(state: Any) -> list[int] | None:
    """The numbers of parameters of the groups in a saved state; None: it has a format of its own."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) and "params" in group for group in groups):
        return None
    return [len(group["params"]) for group in groups]


def _listed(sizes: Sequence[int] | None) -> str:
    return " and ".join(map(str, sizes or ()))


def laid_out_as_parameters(optimizer: Optimizer) -> set[int]:
    """The ids of the tensors of an optimizer's state that are laid out in memory like their parameters."""
    return {
        id(value)
        for parameter in parameters_of(optimizer)
        for value in _alike(optimizer, parameter).values()
        if value.stride() == parameter.stride()
    }


def _lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Give an optimizer's loaded states the memory layout of their parameters.

    A checkpoint has numbers in order of their indices. torch's fused kernels read parameter and state side by side in
    memory, without a look at strides: with one in ``channels_last`` and the other not they would pair wrong numbers.
    """
    is_torchs = type(optimizer).__module__.startswith("torch.")  # others may keep a state in a layout of its own
    for parameter in parameters_of(optimizer):
        for name, value in _alike(optimizer, parameter).items():
            if value.stride() != parameter.stride() and (is_torchs or value.is_contiguous()):
                laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
                optimizer.state[parameter][name] = laid_out.copy_(value)


def _alike(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The tensors of a parameter's state that have its shape."""
    state = optimizer.state.get(parameter, {})
    values = state.items() if isinstance(state, Mapping) else ()
    return {name: value for name, value in values if isinstance(value, Tensor) and value.shape == parameter.shape}


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that a class of the user's own gives to an optimizer, apart from its parameters."""
    parameters = set(map(id, parameters_of(optimizer)))
    return {name: one for name, one in vars(optimizer).items() if name not in _OF_BASE and id(one) not in parameters}


def deep_copied(optimizer: Optimizer, memo: dict[int, Any]) -> None:
    """Put a copy into the memo of ``copy.deepcopy``, with the attributes that torch leaves out of it."""
    new = copy.deepcopy(optimizer, memo)
    vars(new).update(copy.deepcopy({n: v for n, v in own_attributes(optimizer).items() if n not in vars(new)}, memo))


def each_optimizer(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers of a :class:`NamedOptimizers`, or the one optimizer."""
    return [*optimizer.optimizers.values()] if isinstance(optimizer, NamedOptimizers) else [optimizer]


def by_name(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers of a :class:`NamedOptimizers`; a single one is ``{"optimizer": ...}``."""
    return optimizer.optimizers if isinstance(optimizer, NamedOptimizers) else {"optimizer": optimizer}


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_names(optimizers: Any, where: str) -> None:
    """Names are parts of file names and of metrics."""
    if not isinstance(optimizers, Mapping) or not optimizers:
        hint = " A pair (optimizer, scheduler) is passed as optimizer= and lr_scheduler=."
        raise ConfigTypeError(
            f'{where}: got {optimizers!r:.60}; it must be a dict of optimizers by name, {{"g": ..., "d": ...}}.'
            f"{hint if isinstance(optimizers, tuple) else ''}"
        )
    wrong = [name for name in optimizers if not (isinstance(name, str) and re.fullmatch(r"\w+", name))]
    if wrong:
        raise ConfigError(f"{where}: got the names {wrong}; a name consists of letters, digits and underscores.")


def check_schedules(
    schedules: Mapping[str, LRScheduler], optimizers: Mapping[str, Optimizer], where: str = "lr_schedulers"
) -> None:
    """Raise unless each schedule is one of the optimizer of its name."""
    check_names(schedules, where)
    for name, schedule in schedules.items():
        if name not in optimizers:
            raise ConfigError(f"{where}: there is no optimizer {name!r}. {did_you_mean(name, optimizers)}")
        is_alike = hasattr(schedule, "step") and hasattr(schedule, "last_epoch")
        if not isinstance(schedule, LRScheduler) and not is_alike:  # torch's ChainedScheduler has no last_epoch
            raise ConfigTypeError(
                f"{where}[{name!r}]: got {schedule!r:.60} ({type(schedule).__name__}); it must be a schedule of"
                " torch.optim.lr_scheduler."
            )
        if getattr(schedule, "optimizer", optimizers[name]) is not optimizers[name]:
            raise ConfigError(f"{where}[{name!r}]: {type(schedule).__name__} belongs to another optimizer.")

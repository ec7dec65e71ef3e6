"""From a configuration to an optimizer and its schedule."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.config.lazy.instantiation import instantiate, locate_target
from trainwright.optim.fused import fused_arguments, run_fused
from trainwright.optim.groups import get_default_optimizer_params


@without_compiler()
def build_optimizer(cfg: Mapping[str, Any] | Optimizer, model: nn.Module) -> Optimizer:
    """The optimizer that ``cfg`` describes, over the parameters of ``model``; one that is built already is given back.

    ``cfg.params`` may be a lazy node, which gets ``model`` if its target takes it, or parameters or groups, which are
    used as they are; without it the groups are those of :func:`get_default_optimizer_params`. Nothing is written
    into ``cfg``.

    ``do_bias_correction=True``, which torch's optimizers always do and have no name for, is left out.

    Raises:
        ConfigError: there is nothing to train, ``do_bias_correction`` is False for an optimizer without that choice, or
            ``cfg`` builds something else than an optimizer.
    """
    if isinstance(cfg, Optimizer):
        return cfg
    _check_is_lazy(cfg, "optim", "an optimizer")
    params = _params(cfg.get("params"), model)
    if not params:
        raise _nothing_to_train(model)

    described = _without_bias_correction(cfg)
    fused = fused_arguments(locate_target(described), described, params, model)
    optimizer = instantiate(described, params=params, **fused)
    if not isinstance(optimizer, Optimizer):
        raise ConfigTypeError(
            f"optim: its target built {type(optimizer).__name__}; it must be a torch.optim.Optimizer."
        )
    if not isinstance(locate_target(described), type):
        run_fused(optimizer, model)
    if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
        raise _nothing_to_train(model)
    return optimizer


def build_lr_scheduler(cfg: Mapping[str, Any] | LRScheduler, optimizer: Optimizer) -> LRScheduler:
    """The schedule that ``cfg`` describes, of ``optimizer``; one that is built already is given back."""
    if isinstance(cfg, LRScheduler):
        return cfg
    _check_is_lazy(cfg, "train.scheduler", "a schedule")
    scheduler = instantiate(cfg, optimizer=optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise ConfigTypeError(
            f"train.scheduler: its target built {type(scheduler).__name__}; "
            "it must be a torch.optim.lr_scheduler.LRScheduler."
        )
    return scheduler


def _takes(target: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(target).parameters
    except ValueError:  # some built-in callables have no signature
        return False


def _check_is_lazy(cfg: object, where: str, what: str) -> None:
    if not isinstance(cfg, Mapping) or "_target_" not in cfg:
        raise ConfigTypeError(
            f"{where}: got {type(cfg).__name__}; it must be {what}, or a lazy call of one, for example "
            "LazyCall(torch.optim.AdamW)(lr=1e-4)."
        )


def _params(params: Any, model: nn.Module) -> list[Any]:
    if params is None:
        return list(get_default_optimizer_params(model))
    if isinstance(params, Mapping) and "_target_" not in params:  # settings of the groups alone
        return list(get_default_optimizer_params(model, **{str(name): params[name] for name in params}))
    if isinstance(params, Mapping):
        params = instantiate(params, model=model) if _takes(locate_target(params), "model") else instantiate(params)
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise ConfigTypeError(
            f"optim.params: got {type(params).__name__}; it must be parameters or groups of them, for example "
            "LazyCall(get_default_optimizer_params)(weight_decay_norm=0.0)."
        )
    return [dict(item) if isinstance(item, Mapping) else item for item in params]


def _nothing_to_train(model: nn.Module) -> ConfigError:
    parameters = list(model.parameters())
    trainable = sum(parameter.requires_grad for parameter in parameters)
    return ConfigError(
        f"optim.params: there is nothing to train ({type(model).__name__} has {len(parameters)} parameters, "
        f"{trainable} of them trainable). Set requires_grad on those that should learn, and give them to the optimizer."
    )


def _without_bias_correction(cfg: Mapping[str, Any]) -> Mapping[str, Any]:
    """``cfg`` less an option of other frameworks' optimizers, unless its target takes it."""
    if "do_bias_correction" not in cfg or _takes(locate_target(cfg), "do_bias_correction"):
        return cfg
    if not cfg["do_bias_correction"]:
        raise ConfigError(
            f"optim.do_bias_correction: got {cfg['do_bias_correction']}; "
            f"{locate_target(cfg).__name__} has no such choice. Leave it out, or give an optimizer that takes it."
        )
    if not isinstance(cfg, DictConfig):
        return {key: value for key, value in cfg.items() if key != "do_bias_correction"}
    # A shallow copy keeps the node's place in the whole configuration, which its interpolations and errors need.
    without = copy.copy(cfg)
    without._set_flag(["struct", "readonly"], False)
    del without["do_bias_correction"]
    return without

"""From a configuration to parameter groups, an optimizer and its learning-rate schedule."""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright._torch_compat.norm_layers import RUNNING_NORMS
from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.base.dist import gather_over_pipeline
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, did_you_mean
from trainwright.config.lazy.instantiation import instantiate, locate_target
from trainwright.config.lazy.provenance import are_several
from trainwright.config.lazy.targets import signature_of
from trainwright.config.rules import both_clippings
from trainwright.optim.freeze import NO_PARAMETERS
from trainwright.optim.fused import run_fused
from trainwright.optim.layer_depth import layer_depths, log_layer_rates
from trainwright.optim.muon import IS_HIDDEN, Muon, matrices_of_hidden_layers
from trainwright.optim.named import NamedOptimizers, check_schedules
from trainwright.parallel.pipeline import Outline, outline_of

NORM_LAYERS = (*RUNNING_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

_BIAS = re.compile(r"(?<![a-z])bias(?![a-z])", re.IGNORECASE)  # a word of a name: in_proj_bias, bias_ih_l0

ParamGroup = dict[str, Any]


def get_default_optimizer_params(
    model: nn.Module,
    base_lr: float | None = None,
    weight_decay: float | None = None,
    weight_decay_norm: float | None = None,
    weight_decay_bias: float | None = None,
    clip_grad_max_norm: float | None = None,
    clip_grad_norm_type: float | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    part: str | None = None,
    layer_decay: float | None = None,
    include_frozen: bool = False,
    clip_grad_value: float | None = None,
    hidden_matrices: bool = False,
) -> list[ParamGroup]:
    """The trainable parameters of ``model``, in as few groups as their settings allow.

    ``part``: only those of this submodule, ``"generator"`` or ``"encoder.layers"``.

    A value of None leaves the optimizer's own default. ``weight_decay_norm`` is for the parameters of norm layers,
    ``weight_decay_bias`` for each parameter with the word bias in its name or its module's (``bias``, ``in_proj_bias``,
    ``bias_ih_l0``), also in norm layers. ``overrides`` gives settings by the last part of a parameter's name,
    ``{"pos_embed": {"weight_decay": 0.0}}``, and has precedence over both. Frozen parameters are left out, unless
    ``include_frozen``; a shared parameter is in one group, by its first name in the model.

    With ``layer_decay`` the learning rate of a layer is ``base_lr * layer_decay ** (n - depth)``: the last layer n has
    ``base_lr``, each one below it ``layer_decay`` times the rate of the next (:func:`~trainwright.optim.layer_depths`).
    A group has its ``layer``; the groups of the last layer are first.

    With ``hidden_matrices`` each group says whether its parameters are matrices of hidden layers, for
    :class:`~trainwright.optim.Muon`.

    With ``clip_grad_max_norm`` or ``clip_grad_value`` each group carries the clipping settings that
    :func:`gradient_clipper` reads; the norm type is 2 by default.

    Raises:
        ConfigKeyError: an override names no parameter of the model, or ``part`` no submodule.
        ConfigError: ``weight_decay_bias`` and ``overrides`` both set biases, a clipping value or ``layer_decay`` is
            out of range, or ``layer_decay`` has no ``base_lr``.
    """
    if part is not None:
        model, outline = _part_of(model, part)
    else:
        outline = outline_of(model)
    defaults = _given(lr=base_lr, weight_decay=weight_decay)
    defaults |= _clipping(clip_grad_max_norm, clip_grad_norm_type, clip_grad_value)
    by_name = {name: dict(settings) for name, settings in (overrides or {}).items()}
    _check_override_names(model, by_name, outline)
    if weight_decay_bias is not None and "bias" in by_name:
        raise ConfigError(
            f"weight_decay_bias={weight_decay_bias} and overrides['bias']={by_name['bias']}: both are settings of"
            " the biases. Set all of them in overrides['bias'], and weight_decay_bias=None."
        )

    by_layer = _by_layer(model, base_lr, layer_decay, outline)
    groups: list[ParamGroup] = []
    seen: set[nn.Parameter] = set()
    matrices = matrices_of_hidden_layers(model) if hidden_matrices else set()
    for path, module in model.named_modules():
        norm = _given(weight_decay=weight_decay_norm) if _is_norm(module) else {}
        for name, parameter in module.named_parameters(recurse=False):
            if not (parameter.requires_grad or include_frozen) or parameter in seen:
                continue
            seen.add(parameter)
            layer = by_layer.get(parameter, {})
            is_bias = _BIAS.search(f"{path.rpartition('.')[2]}.{name}")
            bias = _given(weight_decay=weight_decay_bias) if is_bias else {}
            kind = {IS_HIDDEN: parameter in matrices} if hidden_matrices else {}
            groups.append({"params": [parameter], **defaults, **layer, **norm, **bias, **by_name.get(name, {}), **kind})
    groups = reduce_param_groups(groups)
    if layer_decay is not None:
        groups.sort(key=lambda group: -group["layer"])
        log_layer_rates(groups, layer_decay)
    return groups


def reduce_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[ParamGroup]:
    """Merge the settings of each parameter, and then groups with equal settings: fewer groups are faster to update.

    A parameter in several groups has the settings of all of them; the later group has precedence. Groups, and
    parameters in a group, are in the order of their first appearance. The given groups are not changed.
    """
    merged: dict[int, tuple[Any, ParamGroup]] = {}
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for parameter in [group["params"]] if isinstance(group["params"], Tensor) else group["params"]:
            merged.setdefault(id(parameter), (parameter, {}))[1].update(settings)
    reduced: list[tuple[ParamGroup, list[Any]]] = []
    for parameter, settings in merged.values():
        # Settings may hold lists, which cannot be hashed; a model has few distinct ones, so a search is cheap.
        for known, members in reduced:
            if known == settings:
                members.append(parameter)
                break
        else:
            reduced.append((settings, [parameter]))
    return [{"params": members, **settings} for settings, members in reduced]


def _is_norm(module: nn.Module) -> bool:
    """Whether it is a norm layer of torch, or one of another library by its name (``LlamaRMSNorm``)."""
    if isinstance(module, NORM_LAYERS):
        return True
    return "Norm" in type(module).__name__ and all(one.ndim <= 1 for one in module.parameters(recurse=False))


def _by_layer(
    model: nn.Module, base_lr: float | None, layer_decay: float | None, outline: Outline
) -> dict[nn.Parameter, dict[str, float]]:
    """The settings of each parameter by its layer."""
    if layer_decay is None:
        return {}
    if not 0 < layer_decay <= 1:
        raise ConfigError(f"layer_decay: got {layer_decay}; it must be a number in (0, 1], or None.")
    if base_lr is None:
        raise ConfigError("layer_decay: got it without base_lr, the learning rate of the last layer. Set base_lr.")
    depths = layer_depths(model, outline)
    last = max(depths.values())
    return {
        parameter: {"lr": base_lr * layer_decay ** (last - depths[name]), "layer": depths[name]}
        for name, parameter in model.named_parameters()
    }


def _given(**settings: float | None) -> dict[str, float]:
    return {key: value for key, value in settings.items() if value is not None}


def _clipping(max_norm: float | None, norm_type: float | None, value: float | None) -> dict[str, float]:
    if value is not None and max_norm is not None:
        raise ConfigError(f"clip_grad_value: {both_clippings(value, 'clip_grad_max_norm', max_norm)}")
    if value is not None and not value > 0:
        raise ConfigError(f"clip_grad_value: got {value}; it must be > 0, or None for no clipping by value.")
    if max_norm is None:
        return {} if value is None else {"clip_grad_value": float(value)}
    faults, norm_type = [], 2.0 if norm_type is None else norm_type
    if not max_norm > 0:
        faults.append(f"clip_grad_max_norm: got {max_norm}; it must be > 0, or None for no clipping.")
    if not float(norm_type) > 0:
        faults.append(f"clip_grad_norm_type: got {norm_type}; it must be > 0 (2.0 is usual, inf is the largest entry).")
    if faults:
        raise ConfigError("\n".join(faults))
    return {"clip_grad_max_norm": max_norm, "clip_grad_norm_type": float(norm_type)}


def _check_override_names(model: nn.Module, overrides: Iterable[str], outline: Outline) -> None:
    names = {name.rpartition(".")[2] for name in outline[0]}
    faults = [
        f"overrides[{name!r}]: no parameter of {type(model).__name__} has this as the last part of its name. "
        f"{did_you_mean(name, names)}"
        for name in overrides
        if name not in names
    ]
    if faults:
        raise ConfigKeyError("\n".join(faults))


def _part_of(model: nn.Module, part: str) -> tuple[nn.Module, Outline]:
    """A submodule, without parameters if another pipeline stage holds it, and its outline."""
    modules = outline_of(model)[1]
    if part not in modules or not part:
        raise ConfigKeyError(
            f"part={part!r}: {type(model).__name__} has no such submodule. {did_you_mean(part, modules)}"
        )
    return dict(model.named_modules()).get(part, nn.Identity()), outline_of(model, part)


@without_compiler()
def build_optimizer(cfg: Mapping[str, Any] | Optimizer, model: nn.Module) -> Optimizer:
    """The optimizer of ``cfg`` for the parameters of ``model``; an optimizer is returned unchanged.

    ``cfg`` may also contain several by name, ``{"g": LazyCall(Adam)(params=dict(part="generator")), "d": ...}``; they
    become a :class:`NamedOptimizers`.

    ``cfg.params`` may be a lazy node, which gets ``model`` if its target takes it, or parameters or groups; without it
    the groups are those of :func:`get_default_optimizer_params`. ``cfg`` is not changed.

    ``do_bias_correction=True`` is ignored: torch's optimizers always correct the bias.

    Raises:
        ConfigError: there is nothing to train, ``do_bias_correction=False`` is not supported by the optimizer, or
            ``cfg`` does not build an optimizer.
    """
    if isinstance(cfg, Optimizer):
        return cfg
    if are_several(cfg):
        return NamedOptimizers({str(name): build_optimizer(cfg[name], model) for name in cfg}, where="optim")
    _check_is_lazy(cfg, "optim", "an optimizer")
    params = _params(cfg.get("params"), model, cfg.get("lr"), is_muon=locate_target(cfg) is Muon)
    groups = next((found for found in gather_over_pipeline(_settings_of(params)) if found), None)
    if groups is None:
        raise _nothing_to_train(model)
    params = params or groups  # a pipeline stage that trains no parameter clips and steps as the others

    described = _without_bias_correction(cfg)
    optimizer = instantiate(described, params=params)
    if not isinstance(optimizer, Optimizer):
        raise ConfigTypeError(
            f"optim: its target built {type(optimizer).__name__}; it must be a torch.optim.Optimizer."
        )
    run_fused(optimizer, model, level=logging.DEBUG if isinstance(locate_target(described), type) else logging.INFO)
    is_trained = any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"])
    if not any(gather_over_pipeline(is_trained)):
        raise _nothing_to_train(model)
    return optimizer


def build_lr_scheduler(cfg: Mapping[str, Any] | LRScheduler, optimizer: Optimizer) -> LRScheduler:
    """The schedule of ``cfg`` for ``optimizer``; a schedule is returned unchanged.

    For a :class:`NamedOptimizers` it is a dict: the schedule of ``cfg`` for each of them, or, if ``cfg`` contains
    several by name, those; optimizers without one keep their learning rate.
    """
    if isinstance(optimizer, NamedOptimizers):
        return _schedules(cfg, optimizer)  # type: ignore[return-value]  # a dict only for several
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


def _schedules(cfg: Any, optimizer: NamedOptimizers) -> dict[str, LRScheduler]:
    each = optimizer.optimizers
    if are_several(cfg):
        unknown = [str(name) for name in cfg if name not in each]
        if unknown:
            raise ConfigKeyError(
                f"train.scheduler.{unknown[0]}: there is no optimizer of this name. {did_you_mean(unknown[0], each)}"
            )
        built = {str(name): build_lr_scheduler(cfg[name], each[name]) for name in cfg}
    else:
        built = {name: build_lr_scheduler(cfg, one) for name, one in each.items()}
    check_schedules(built, each, "train.scheduler")
    return built


def _takes(target: Callable[..., Any], name: str) -> bool:
    signature = signature_of(target)
    return signature is not None and name in signature.parameters


def _check_is_lazy(cfg: object, where: str, what: str) -> None:
    if not isinstance(cfg, Mapping) or "_target_" not in cfg:
        raise ConfigTypeError(
            f"{where}: got {type(cfg).__name__}; it must be {what}, or a lazy call of one, for example "
            "LazyCall(torch.optim.AdamW)(lr=1e-4)."
        )


def _params(params: Any, model: nn.Module, lr: float | None, *, is_muon: bool) -> list[Any]:
    given: dict[str, Any] = {"hidden_matrices": True} if is_muon else {}
    if params is None:
        return list(get_default_optimizer_params(model, **given))
    # Rates by layer are fractions of the optimizer's.
    has_layers = isinstance(params, Mapping) and params.get("layer_decay") is not None and not params.get("base_lr")
    given |= {"base_lr": lr} if has_layers else {}
    if isinstance(params, Mapping) and "_target_" not in params:  # only settings of the groups
        return list(get_default_optimizer_params(model, **{**{str(name): params[name] for name in params}, **given}))
    if isinstance(params, Mapping):
        function = locate_target(params)
        given = {name: value for name, value in given.items() if _takes(function, name)}
        given |= {"model": model} if _takes(function, "model") else {}
        params = instantiate(params, **given)
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise ConfigTypeError(
            f"optim.params: got {type(params).__name__}; it must be parameters or groups of them, for example "
            "LazyCall(get_default_optimizer_params)(weight_decay_norm=0.0)."
        )
    return [dict(item) if isinstance(item, Mapping) else item for item in params]


def _settings_of(params: list[Any]) -> list[ParamGroup]:
    """The groups of an optimizer, without parameters."""
    groups = [item if isinstance(item, Mapping) else {} for item in params]
    return [{**{key: value for key, value in one.items() if key != "param_names"}, "params": []} for one in groups[:1]]


def _nothing_to_train(model: nn.Module) -> ConfigError:
    parameters = list(model.parameters())
    if not parameters:
        return ConfigError(f"optim.params: there is nothing to train: {type(model).__name__} {NO_PARAMETERS}")
    trainable = sum(parameter.requires_grad for parameter in parameters)
    return ConfigError(
        f"optim.params: there is nothing to train ({type(model).__name__} has {len(parameters)} parameters, "
        f"{trainable} of them trainable). Set requires_grad on those to be trained, and pass them to the optimizer."
    )


def _without_bias_correction(cfg: Mapping[str, Any]) -> Mapping[str, Any]:
    """``cfg`` without an option of other frameworks' optimizers, unless its target takes it."""
    if "do_bias_correction" not in cfg or _takes(locate_target(cfg), "do_bias_correction"):
        return cfg
    if not cfg["do_bias_correction"]:
        raise ConfigError(
            f"optim.do_bias_correction: got {cfg['do_bias_correction']}; "
            f"{locate_target(cfg).__name__} does not have this option. Remove it, or use an optimizer that has it."
        )
    if not isinstance(cfg, DictConfig):
        return {key: value for key, value in cfg.items() if key != "do_bias_correction"}
    # A shallow copy keeps the node's place in the whole configuration, which its interpolations and errors need.
    without = copy.copy(cfg)
    without._set_flag(["struct", "readonly"], False)
    del without["do_bias_correction"]
    return without

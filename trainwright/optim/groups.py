"""Parameter groups: which weight decay, learning rate and clipping each parameter of a model gets."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from trainwright._torch_compat.norm_layers import RUNNING_NORMS
from trainwright.config.errors import ConfigError, ConfigKeyError, did_you_mean

NORM_LAYERS = (*RUNNING_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

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
) -> list[ParamGroup]:
    """The trainable parameters of ``model``, in as few groups as their settings allow.

    A value of None leaves the optimizer's own default. ``weight_decay_norm`` is for the parameters of norm layers,
    ``weight_decay_bias`` for every parameter called ``bias`` (it wins over the norm rule). ``overrides`` gives settings
    by the last part of a parameter's name, ``{"pos_embed": {"weight_decay": 0.0}}``, and wins over both. Frozen
    parameters are left out; a shared one is in one group, by the first name that the model gives it.

    With ``clip_grad_max_norm`` each group carries the clipping settings that :func:`gradient_clipper` reads; the norm
    type is 2 where none is given.

    Raises:
        ConfigKeyError: an override names no parameter of the model.
        ConfigError: ``weight_decay_bias`` and ``overrides`` both set biases, or a clipping value is out of range.
    """
    defaults = _given(lr=base_lr, weight_decay=weight_decay) | _clipping(clip_grad_max_norm, clip_grad_norm_type)
    by_name = {name: dict(settings) for name, settings in (overrides or {}).items()}
    _check_override_names(model, by_name)
    if weight_decay_bias is not None:
        if "bias" in by_name:
            raise ConfigError(
                f"weight_decay_bias={weight_decay_bias} and overrides['bias']={by_name['bias']}: both are settings of"
                " the biases. Give all of them in overrides['bias'], and weight_decay_bias=None."
            )
        by_name["bias"] = {"weight_decay": weight_decay_bias}

    groups: list[ParamGroup] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        norm = _given(weight_decay=weight_decay_norm) if isinstance(module, NORM_LAYERS) else {}
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            groups.append({"params": [parameter], **defaults, **norm, **by_name.get(name, {})})
    return reduce_param_groups(groups)


def reduce_param_groups(groups: Iterable[Mapping[str, Any]]) -> list[ParamGroup]:
    """Merge the settings of each parameter, and then groups with equal settings: fewer groups are quicker to update.

    A parameter in several groups has the settings of all of them; where two set the same thing, the later one wins.
    The order of groups, and of parameters in a group, is that of their first appearance. The given groups stay as
    they are.
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


def _given(**settings: float | None) -> dict[str, float]:
    return {key: value for key, value in settings.items() if value is not None}


def _clipping(max_norm: float | None, norm_type: float | None) -> dict[str, float]:
    if max_norm is None:
        return {}
    norm_type = 2.0 if norm_type is None else norm_type
    faults = []
    if not max_norm > 0:
        faults.append(f"clip_grad_max_norm: got {max_norm}; it must be > 0, or None for no clipping.")
    if not float(norm_type) > 0:
        faults.append(f"clip_grad_norm_type: got {norm_type}; it must be > 0 (2.0 is usual, inf is the largest entry).")
    if faults:
        raise ConfigError("\n".join(faults))
    return {"clip_grad_max_norm": max_norm, "clip_grad_norm_type": float(norm_type)}


def _check_override_names(model: nn.Module, overrides: Iterable[str]) -> None:
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters(remove_duplicate=False)}
    faults = [
        f"overrides[{name!r}]: no parameter of {type(model).__name__} has this as the last part of its name. "
        f"{did_you_mean(name, names)}"
        for name in overrides
        if name not in names
    ]
    if faults:
        raise ConfigKeyError("\n".join(faults))

"""The sections of a run: missing settings are filled from the defaults, leaf by leaf."""

import copy
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.config.errors import ConfigTypeError
from trainwright.config.lazy.instantiation import TARGET
from trainwright.config.lazy.lazy_config import get_config
from trainwright.config.lazy.provenance import is_set, mark_default, raw_children
from trainwright.config.schema.aliases import resolve_aliases


def complete(cfg: Mapping[str, Any] | DictConfig) -> DictConfig:
    """The complete configuration: ``cfg`` with every setting of the ``train``, ``optim`` and ``graph`` sections.

    A missing section is its default; an existing one is filled with its missing settings. A node with its own target
    is unchanged, because the default's arguments belong to the default's target. Aliases are moved to their canonical
    keys. ``cfg`` is not changed; objects in it are passed on, not copied.

    Raises:
        ConfigError: two names of one setting have different values.
    """
    if not isinstance(cfg, Mapping | DictConfig):
        raise ConfigTypeError(f"a configuration is a mapping of sections, not {type(cfg).__name__}.")
    whole = copy.deepcopy(cfg) if isinstance(cfg, DictConfig) else DictConfig(dict(cfg), flags={"allow_objects": True})
    whole._set_flag(["allow_objects", "struct", "readonly"], [True, False, False])
    defaults = get_config("common/defaults.py")
    _detach(whole, "train")
    train = raw_children(whole).get("train")
    if isinstance(train, DictConfig) and isinstance(train._value(), dict):
        resolve_aliases(train, defaults.train)
        if not is_set(train, "train_iter") and _has_epochs(train):
            train.train_iter = 0  # epochs set by the user replace the default number of iterations
    defaults_of_best = [key for key in ("eval_metric", "eval_mode") if not _is_set_for_evaluation(train, key)]
    _fill(whole, defaults)
    evaluation = OmegaConf.select(whole, "train.evaluation", throw_on_resolution_failure=False)
    if isinstance(evaluation, DictConfig) and isinstance(evaluation._value(), dict):
        for key in defaults_of_best:
            mark_default(evaluation, key)  # filling copies only the value
    return whole


def _is_set_for_evaluation(train: Any, key: str) -> bool:
    evaluation = raw_children(train).get("evaluation") if isinstance(train, DictConfig) else None
    return isinstance(evaluation, DictConfig) and isinstance(evaluation._value(), dict) and is_set(evaluation, key)


def _has_epochs(train: DictConfig) -> bool:
    epochs = OmegaConf.select(train, "train_epoch", throw_on_resolution_failure=False, throw_on_missing=False)
    return isinstance(epochs, int | float) and epochs > 0


def _fill(node: DictConfig, defaults: DictConfig) -> None:
    for key, default in raw_children(defaults).items():
        there = raw_children(node).get(key)
        if there is None or (there._is_none() and node is node._get_root()):
            node[key] = default
            continue
        if not isinstance(default, DictConfig):
            continue
        _detach(node, key)
        there = raw_children(node)[key]
        if isinstance(there, DictConfig) and isinstance(there._value(), dict) and TARGET not in there:
            _fill(there, default)


def _detach(node: DictConfig, key: Any) -> None:
    """Replace a section that is an interpolation by a copy of its target, so that filling it does not change that."""
    child = raw_children(node).get(key)
    if child is not None and child._is_interpolation():
        section = OmegaConf.select(node, str(key), throw_on_resolution_failure=False)
        if isinstance(section, DictConfig):
            node[key] = section

"""Flat spellings of train settings, and the one place where each is kept. This table is the only one."""

import copy
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.config.errors import ConfigError

CANONICAL = {
    "eval_period": "evaluation.eval_period",
    "topk": "evaluation.evaluator.topk",
    "recompute_grad": "activation_checkpoint",
}


def settle_aliases(train: DictConfig, defaults: DictConfig) -> None:
    """Move the values of aliases in ``train`` to their canonical places.

    Raises:
        ConfigError: both spellings are there with different values. A canonical value that is the default counts as not
            given.
    """
    for alias, canonical in CANONICAL.items():
        if alias not in train:
            continue
        value = train[alias]
        there = OmegaConf.select(train, canonical)
        default = OmegaConf.select(defaults, canonical)
        if there is not None and not _agree(there, value) and not _agree(there, default):
            raise ConfigError(
                f"train.{alias} is {value!r} and train.{canonical} is {there!r}: these are two names of one setting. "
                f"Give one of them; train.{canonical} is the one that is kept."
            )
        del train[alias]
        OmegaConf.update(train, canonical, copy.deepcopy(value), merge=True, force_add=True)


def canonical_key(key: str) -> str:
    """A dotted key with an alias in it replaced: ``train.topk`` is ``train.evaluation.evaluator.topk``."""
    section, _, rest = key.partition(".")
    name, _, below = rest.partition(".")
    if section != "train" or name not in CANONICAL:
        return key
    return ".".join(part for part in (section, CANONICAL[name], below) if part)


def _agree(one: Any, other: Any) -> bool:
    return bool(_plain(one) == _plain(other))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

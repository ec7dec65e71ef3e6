"""Aliases of train settings and the canonical key of each. This table is the only one."""

import copy
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainwright.config.errors import ConfigError

CANONICAL = {
    "eval_period": "evaluation.eval_period",
    "topk": "evaluation.evaluator.topk",
    "recompute_grad": "activation_checkpoint",
}


def resolve_aliases(train: DictConfig) -> None:
    """Move the values of aliases in ``train`` to their canonical keys."""
    from trainwright.config.settings import SECTIONS  # here: loads pydantic

    for alias, canonical in CANONICAL.items():
        if alias not in train:
            continue
        value = train[alias]
        there = _plain(OmegaConf.select(train, canonical))
        default = _plain(OmegaConf.select(OmegaConf.create(SECTIONS["train"].value(lambda _: dict)), canonical))
        if there is not None and there not in (_plain(value), default):
            raise ConfigError(
                f"train.{alias} is {value!r} and train.{canonical} is {there!r}: these are two names of one setting. "
                f"Give one of them; the canonical name is train.{canonical}."
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


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

"""Aliases of train settings and the canonical key of each. This table is the only one."""

import copy
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from trainwright.config.errors import ConfigError
from trainwright.config.lazy.provenance import raw_children, value_at

CANONICAL = {
    "eval_period": "evaluation.eval_period",
    "topk": "evaluation.evaluator.topk",
    "recompute_grad": "activation_checkpoint",
}


def resolve_aliases(train: DictConfig, defaults: DictConfig) -> None:
    """Move the values of aliases in ``train`` to their canonical keys."""
    for alias, canonical in CANONICAL.items():
        if alias not in train:
            continue
        value = train[alias]
        there = OmegaConf.select(train, canonical)
        default = OmegaConf.select(defaults, canonical)
        if there is not None and not _agree(there, value) and not _agree(there, default):
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


def drop_other_name(cfg: DictConfig, key: str, value: Any = None, *, delete: bool = False) -> bool:
    """Remove the other name of the setting ``key``, before it is set to ``value`` in ``cfg`` or deleted.

    A section of which only a part is set is moved to the new name. Returns whether something was removed.
    """
    dropped = False
    for alias, canonical in CANONICAL.items():
        for own, other in ((f"train.{alias}", f"train.{canonical}"), (f"train.{canonical}", f"train.{alias}")):
            if not _sets(key, value, own) or _sets(key, value, other):
                continue
            above, _, last = other.rpartition(".")
            holder = value_at(cfg, above)
            there = raw_children(holder).get(last) if isinstance(holder, DictConfig) else None
            if there is None:
                continue
            is_part = isinstance(there, DictConfig) and not delete and (key != own or isinstance(value, dict))
            with open_dict(holder):
                del holder[last]
            if is_part and OmegaConf.select(cfg, own) is None:
                OmegaConf.update(cfg, own, there, force_add=True)
            dropped = True
    return dropped


def _sets(key: str, value: Any, path: str) -> bool:
    """Whether setting ``key`` to ``value`` sets ``path``: ``key`` is equal to it, below it, or a section above it."""
    if key == path or key.startswith(path + "."):
        return True
    if not path.startswith(key + "."):
        return False
    for part in path[len(key) + 1 :].split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def _agree(one: Any, other: Any) -> bool:
    return bool(_plain(one) == _plain(other))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

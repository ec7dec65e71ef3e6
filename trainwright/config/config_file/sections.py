"""The sections of a run: missing settings are filled from the defaults; batch sizes and iterations are computed.

The arithmetic is exact, because ceil(0.07 * 100) is 8 with floats.
"""

import copy
import itertools
import math
import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeGuard

from omegaconf import DictConfig

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.config.lazy.lazy_config import get_config, try_get_key
from trainwright.config.lazy.overrides import resolve_aliases
from trainwright.config.lazy.provenance import TARGET, are_several, is_set, put, raw_children, value_at
from trainwright.config.windows import Windows

_ALONE = Windows.of(1)


def resolve_batch_sizes(train: Mapping[str, Any], data_parallel_size: int) -> tuple[int, int | None, Any]:
    """``(train_micro_batch_size, global_batch_size, num_accumulation_steps)``, computed from the given ones.

    ``global = micro * accumulation * data_parallel_size`` holds for the result. With a schedule of the accumulation
    there is no global batch size.
    """
    names = ("train_micro_batch_size", "global_batch_size", "num_accumulation_steps")
    micro, total, accumulation = (try_get_key(train, name) for name in names)
    values = f"train_micro_batch_size={micro}, global_batch_size={total}, num_accumulation_steps={accumulation}"
    given = f"{values}, data-parallel size {data_parallel_size}"
    if micro is None and total is None:
        raise ConfigError(f"train: give train_micro_batch_size or global_batch_size ({given}).")

    if isinstance(accumulation, Mapping):
        if micro is None or total is not None:
            raise ConfigError(
                "train.num_accumulation_steps: a schedule changes the samples of an update; give it with"
                f" train_micro_batch_size, without global_batch_size ({given})."
            )
    elif micro is None:
        accumulation = accumulation or 1
        micro = _divide(total, accumulation * data_parallel_size, "num_accumulation_steps * data-parallel size", given)
    elif total is None:
        accumulation = accumulation or 1
        total = micro * accumulation * data_parallel_size
    elif accumulation is None:
        accumulation = _divide(total, micro * data_parallel_size, "train_micro_batch_size * data-parallel size", given)
    elif total != (product := micro * accumulation * data_parallel_size):
        raise ConfigError(
            f"train.global_batch_size: {total} must be equal to train_micro_batch_size * num_accumulation_steps * "
            f"data-parallel size, which is {product} ({given}). Leave one of them out (None) and it is computed."
        )
    return micro, total, accumulation


def total_iterations(
    train: Mapping[str, Any], dataset_length: int | None, batch: int, windows: Windows = _ALONE
) -> int:
    """The number of iterations of a run: the larger of ``train_iter`` and ``train_epoch`` epochs."""
    train_iter, train_epoch = try_get_key(train, "train_iter", default=0), try_get_key(train, "train_epoch", default=0)
    total = max(train_iter or 0, iterations_of_epochs(train, dataset_length, batch, windows))
    if total < 1:
        raise ConfigError(
            f"train: nothing to do with train_iter={train_iter} and train_epoch={train_epoch}"
            + (" (the training set is empty)." if dataset_length == 0 else ". Give one of them.")
        )
    return int(total)


def iterations_of_epochs(
    train: Mapping[str, Any], dataset_length: int | None, batch: int, windows: Windows = _ALONE
) -> int:
    """The number of iterations of ``train_epoch`` epochs, or 0.

    An epoch has ``iter_per_epoch`` iterations if this is set; else epochs are counted in samples, so that only the last
    global batch of the run is rounded up. ``dataset_length`` is None for data of unknown length. An iteration has
    ``windows`` of batches, each of ``batch`` samples of all processes together.
    """
    train_epoch = try_get_key(train, "train_epoch", default=0)
    iter_per_epoch = try_get_key(train, "iter_per_epoch")
    if not train_epoch:
        return 0
    if iter_per_epoch is not None:
        iterations: int = math.ceil(exact(train_epoch) * iter_per_epoch)
        return iterations
    if dataset_length is None:
        raise ConfigError(
            f"train.train_epoch: got {train_epoch}, but the length of the training data is unknown. "
            "Give train.iter_per_epoch, or train.train_iter with train_epoch=0."
        )
    return windows.updates(exact(train_epoch) * dataset_length / batch)


def warmup_iterations(train_iter: int, warmup_ratio: float) -> int:
    """The number of warm-up iterations: ``warmup_ratio * train_iter``, rounded up."""
    return math.ceil(exact(warmup_ratio) * train_iter)


def milestone_iterations(milestones: Iterable[float], train_iter: int) -> list[int]:
    """Milestones as iterations. Ratios of ``train_iter`` are rounded down; integers >= 1 are iterations already."""
    return [m if isinstance(m, int) and m >= 1 else math.floor(exact(m) * train_iter) for m in milestones]


def milestone_fault(milestones: Any) -> str | None:
    """The allowed milestones if these are not allowed, else None."""
    allowed = "a list of increasing ratios in [0, 1), or of increasing whole numbers of iterations"
    numbers = list(milestones)
    if any(isinstance(m, bool) or not isinstance(m, int | float) for m in numbers):
        return allowed
    ratios = all(0 <= m < 1 for m in numbers)
    iterations = all(isinstance(m, int) for m in numbers) and all(m >= 1 for m in numbers)
    increasing = all(a < b for a, b in itertools.pairwise(numbers))
    return None if increasing and (ratios or iterations) else allowed


def _divide(total: int, divisor: int, named: str, given: str) -> int:
    if total % divisor:
        below, above = total // divisor * divisor, (total // divisor + 1) * divisor
        nearest = f"The nearest that fit are {below} and {above}." if below else f"The smallest that fits is {above}."
        raise ConfigError(
            f"train.global_batch_size: {total} must be divisible by {named}, which is {divisor} ({given}). {nearest}"
            " Or set another train.train_micro_batch_size."
        )
    return total // divisor


def exact(number: float) -> Fraction:
    """The exact decimal number: 0.1 is one tenth, not the nearest binary fraction."""
    return Fraction(str(number))


def complete(cfg: Mapping[str, Any] | DictConfig) -> DictConfig:
    """The complete configuration: ``cfg`` with every setting of the ``train``, ``optim`` and ``graph`` sections.

    A missing section is its default; an existing one is filled with its missing settings. A node with its own target
    is unchanged, because the default's arguments belong to the default's target. Aliases are moved to their canonical
    keys. ``cfg`` is not changed; objects in it are passed on, not copied.

    Raises:
        ConfigError: two names of one setting have different values.
    """
    if not isinstance(cfg, Mapping | DictConfig):
        is_path = isinstance(cfg, str | os.PathLike)
        hint = f" Write LazyConfig.load({os.fspath(cfg)!r})." if is_path else ""
        raise ConfigTypeError(f"a configuration is a mapping of sections, not {type(cfg).__name__}.{hint}")
    full = copy.deepcopy(cfg) if isinstance(cfg, DictConfig) else DictConfig(dict(cfg), flags={"allow_objects": True})
    full._set_flag(["allow_objects", "struct", "readonly"], [True, False, False])
    _detach(full, "train")
    if _is_section(train := raw_children(full).get("train")):
        resolve_aliases(train)
        epochs = value_at(train, "train_epoch")
        if not is_set(train, "train_iter") and isinstance(epochs, int | float) and epochs > 0:
            train.train_iter = 0  # epochs set by the user replace the default number of iterations
    _fill(full, get_config("common/defaults.py"))
    for name in ("train", "graph"):
        if _is_section(section := raw_children(full)[name]):
            _write_whole(section, f"{name}.")
    return full


def _write_whole(section: DictConfig, path: str) -> None:
    """Write counts that are floats, such as 1e2, as whole numbers."""
    from trainwright.config.settings import KEYS, type_of_key  # here: loads pydantic
    from trainwright.config.validation import converted

    for key, child in raw_children(section).items():
        if isinstance(child, DictConfig):
            _write_whole(child, f"{path}{key}.")
        elif type(value := child._value()) is float and value.is_integer() and f"{path}{key}" in KEYS:
            section[key] = converted(type_of_key(f"{path}{key}"), value)


def _is_section(node: Any) -> TypeGuard[DictConfig]:
    """Whether ``node`` is a section with settings: neither None nor an interpolation."""
    return isinstance(node, DictConfig) and isinstance(node._value(), dict)


def _fill(node: DictConfig, defaults: DictConfig) -> None:
    children = raw_children(node)
    for key, default in raw_children(defaults).items():
        there = children.get(key)
        if there is None or (there._is_none() and node is node._get_root()):
            put(node, key, default)
            continue
        if not isinstance(default, DictConfig):
            continue
        _detach(node, key)
        there = raw_children(node)[key]
        if _is_section(there) and TARGET not in there and not (TARGET in default and are_several(there)):
            _fill(there, default)


def _detach(node: DictConfig, key: Any) -> None:
    """Replace a section that is an interpolation by a copy of its target, so that filling it does not change that."""
    child = raw_children(node).get(key)
    if child is not None and child._is_interpolation():
        section = value_at(node, str(key))
        if isinstance(section, DictConfig):
            node[key] = section

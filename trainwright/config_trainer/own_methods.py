"""The methods of a user's DefaultTrainer: whether they take what they are called with, and return a part."""

import logging
from collections.abc import Mapping, Sequence
from inspect import getattr_static, isfunction
from typing import Any

from torch.utils.data import DataLoader

from trainwright.base.errors import ConfigTypeError
from trainwright.base.signatures import read_signature, shown_arguments
from trainwright.config.lazy.provenance import SECTIONS
from trainwright.evaluation.adapters import evaluator_of
from trainwright.hooks.method_overrides import Overrides, check_arguments, is_overridden

logger = logging.getLogger("trainwright.engine")

_BUILD = (
    "build_tokenizer", "build_model", "build_optimizer", "build_lr_scheduler", "build_train_loader",
    "build_test_loader", "build_hooks", "build_writers", "auto_scale_hyperparams",
)  # fmt: skip


def check_own_methods(trainer: Any, *, evaluates: bool) -> None:
    """Raise ConfigTypeError for a method that cannot be called as the run calls it, before anything is built."""
    has_own_loop = is_overridden(trainer, "train")
    evaluates &= not has_own_loop
    has_own_steps = has_own_loop or is_overridden(trainer, "run_step")
    check_arguments(trainer, [*_BUILD, *(["build_evaluator", "test"] if evaluates else [])])
    check_arguments(trainer, [] if has_own_steps else ["get_batch", "train_step"])
    kind = type(trainer)
    if evaluates and not is_overridden(trainer, "test") and isfunction(getattr_static(kind, "get_batch")):
        raise ConfigTypeError(
            f"{kind.__name__}.get_batch: the evaluation calls it on the class. Write @classmethod, and below it"
            " def get_batch(cls, data, input_placement_device=None, mixup_func=None)."
        )


def check_class_methods(kind: type) -> None:
    """Raise ConfigTypeError for a method with ``self``, which ``--eval-only`` calls on the class."""
    has_own_test = not next(one for one in kind.__mro__ if "test" in vars(one)).__module__.startswith("trainwright.")
    of_test = () if has_own_test else ("build_evaluator", "get_batch")  # an own one may call them in another way
    for name in ("build_test_loader", "build_model", "test", *of_test):
        method = getattr_static(kind, name)
        if isfunction(method) and next(iter(read_signature(method).parameters), "") == "self":
            arguments = shown_arguments(method, is_bound=False).removeprefix("(")
            raise ConfigTypeError(
                f"{kind.__name__}.{name}: --eval-only has no trainer, and calls it on the class. Write @classmethod,"
                f" and below it def {name}(cls, {arguments}."
            )


def part(overrides: Overrides, method: str, result: Any, *, is_right: bool, must: str) -> Any:
    """What a method has returned; ConfigTypeError if it is another thing."""
    if is_right:
        return result
    missing = " Is its return statement missing?" if result is None else ""
    is_class = f" Call it: {result.__name__}(...)." if isinstance(result, type) else ""
    what = "None" if result is None else result.__name__ if isinstance(result, type) else type(result).__name__
    raise ConfigTypeError(f"{overrides.kind}.{method} returned {what}; it must return {must}.{missing}{is_class}")


def loaders_part(overrides: Overrides, loaders: Any) -> Any:
    """The loaders of evaluations. A ``test`` or ``train`` of the user's gets them as they are."""
    has_own = overrides.has("test", "train")
    is_iterable = any(hasattr(loaders, name) for name in ("__iter__", "__getitem__")) and not isinstance(loaders, type)
    is_right = is_iterable and (has_own or not isinstance(loaders, DataLoader | Mapping | str))
    part(overrides, "build_test_loader", loaders, is_right=is_right, must="a list of loaders, [loader]")
    return loaders if has_own or hasattr(loaders, "__getitem__") else [*loaders]


def evaluator_part(overrides: Overrides, evaluator: Any) -> Any:
    """The evaluator, which may be None: the loss alone. A ``test`` of the user's gets it as it is."""
    if overrides.has("test"):
        return evaluator
    if evaluator is None:
        warn_of_none(overrides, "build_evaluator", evaluator, "evaluations compute the loss only")
        return None
    return evaluator_of(evaluator, f"{overrides.kind}.build_evaluator")


def schedule_part(overrides: Overrides, schedule: Any, *, several: bool) -> None:
    """Check a schedule, or with ``several`` optimizers a dict of them by name; None: the rates stay as they are."""
    is_dict = isinstance(schedule, Mapping)
    is_right = (
        schedule is None or (hasattr(schedule, "step") and not isinstance(schedule, type)) or (several and is_dict)
    )
    must = "a schedule of the optimizer" + ("s by name, in a dict" if several else "")
    must += "; return the one in 'scheduler'" if is_dict and "scheduler" in schedule else ""  # as in Lightning
    part(overrides, "build_lr_scheduler", schedule, is_right=is_right, must=must)


def warn_of_none(overrides: Overrides, method: str, result: Any, effect: str) -> None:
    """Warn of a part that may be None, where a return statement seems to be missing."""
    if result is None and overrides.lacks_return(method):
        logger.warning("%s.%s returned None, so %s. Is its return statement missing?", overrides.kind, method, effect)


def warn_of_unread(overrides: Overrides, method: str, section: str, given: Sequence[str]) -> None:
    """Warn of ``given`` overrides of a section of the configuration that a method of the user's does not read."""
    values = [one.lstrip("+") for one in given if not one.startswith("~")]
    if values and overrides.leaves_unread(method, section, SECTIONS.keys() - {section}):
        logger.warning(
            "%s has no effect: %s.%s does not read cfg.%s. Use cfg.%s in it.",
            ", ".join(values), overrides.kind, method, section, values[0].partition("=")[0],
        )  # fmt: skip

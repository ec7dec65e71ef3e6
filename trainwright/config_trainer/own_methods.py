"""The methods of a user's DefaultTrainer: whether they take what they are called with, and return a part."""

import logging
from inspect import getattr_static, isfunction
from typing import Any

from torch import nn

from trainwright.base.errors import ConfigTypeError
from trainwright.evaluation.adapters import evaluator_of
from trainwright.evaluation.evaluator import DatasetEvaluator
from trainwright.hooks.method_overrides import check_arguments, is_overridden, lacks_return

logger = logging.getLogger("trainwright.engine")

_BUILD = (
    "build_tokenizer", "build_model", "build_optimizer", "build_lr_scheduler", "build_train_loader",
    "build_test_loader", "build_hooks", "build_writers", "auto_scale_hyperparams", "train_step",
)  # fmt: skip


def check_own_methods(trainer: Any, *, evaluates: bool) -> None:
    """Raise ConfigTypeError for a method that cannot be called as the run calls it, before anything is built."""
    has_own_steps = is_overridden(trainer, "run_step")
    names = [*_BUILD, *(["build_evaluator", "test"] if evaluates else []), *([] if has_own_steps else ["get_batch"])]
    check_arguments(trainer, names)
    kind = type(trainer)
    if evaluates and not is_overridden(trainer, "test") and isfunction(getattr_static(kind, "get_batch")):
        raise ConfigTypeError(
            f"{kind.__name__}.get_batch: the evaluation calls it on the class. Write @classmethod, and below it"
            " def get_batch(cls, data, input_placement_device=None, mixup_func=None)."
        )


def part(trainer: Any, method: str, result: Any, *, is_right: bool, must: str) -> Any:
    """What a method has returned; ConfigTypeError if it is another thing."""
    if is_right:
        return result
    kind = type(trainer).__name__
    missing = " Is its return statement missing?" if result is None else ""
    is_class = f" Call it: {result.__name__}(...)." if isinstance(result, type) else ""
    what = "None" if result is None else result.__name__ if isinstance(result, type) else type(result).__name__
    raise ConfigTypeError(f"{kind}.{method} returned {what}; it must return {must}.{missing}{is_class}")


def model_part(trainer: Any, model: Any) -> Any:
    return part(trainer, "build_model", model, is_right=isinstance(model, nn.Module), must="a torch.nn.Module")


def evaluator_part(trainer: Any, evaluator: Any) -> DatasetEvaluator | None:
    """The evaluator, which may be None: the loss alone."""
    if evaluator is None:
        warn_of_none(trainer, "build_evaluator", evaluator, "evaluations compute the loss only")
        return None
    return evaluator_of(evaluator, f"{type(trainer).__name__}.build_evaluator")


def warn_of_none(trainer: Any, method: str, result: Any, effect: str) -> None:
    """Warn of a part that may be None, where a return statement seems to be missing."""
    if result is None and lacks_return(trainer, method):
        logger.warning(
            "%s.%s returned None, so %s. Is its return statement missing?", type(trainer).__name__, method, effect
        )

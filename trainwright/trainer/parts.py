"""Build parts of a run from a TrainingConfig: metrics, callbacks, writers; the settings of copies."""

import logging
import shlex
import weakref
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.config.spec import RunSpec
from trainwright.config.torch_names import GivenName
from trainwright.data.wrapped import with_inner
from trainwright.engine.run_methods import RunMethods
from trainwright.hooks.callbacks import Callback
from trainwright.trainer.checks import Given

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig

logger = logging.getLogger("trainwright.engine")


def settings_of_copy(
    config: "TrainingConfig", folder: Path, changes: dict[str, Any], *, resumes: bool, is_endless: bool
) -> "TrainingConfig":
    """The settings of a copy that a check trains."""
    from trainwright.config.settings import changes_of

    settings: dict[str, Any] = {"output_dir": str(folder), "resume_from_checkpoint": True if resumes else None}
    settings |= changes_of("copy", config.rows)
    if isinstance(config.optimizer, GivenName):  # passed to the copy, or set later
        settings["optimizer"] = "Adam"
    if isinstance(config.loss, GivenName):
        settings["loss"] = None
    if is_endless:
        settings |= {"num_epochs": 100_000} | ({} if config.max_steps is None else {"max_steps": 100_000})
    wanted = {**settings, **changes}
    return config.copy_with(**{name: value for name, value in wanted.items() if config[name] != value})


def dev_batches(spec: RunSpec) -> int | None:
    """The number of batches of a ``fast_dev_run``; None: all of them."""
    return int(spec.fast_dev_run) or None


def give_preprocessor(preprocessor: Any, model: Any, *datasets: Any) -> Any:
    """Set the passed preprocessor, or the model's own, on the model and data sets whose ``preprocessor`` is None.

    Data sets that are joined, mixed or in a subset are set, too.
    """
    if preprocessor is None:
        preprocessor = getattr(model, "preprocessor", None)
    if preprocessor is not None:
        for part in (model, *chain.from_iterable(map(with_inner, datasets))):
            if getattr(part, "preprocessor", preprocessor) is None:
                part.preprocessor = preprocessor
    return preprocessor


def given_handler(given: Given, spec: RunSpec, trainer: RunMethods) -> Any:
    """The handler that the user has passed or configured, so that errors in it are raised now; None: the default."""
    if given.metrics_handler is None:
        return build_metrics_handler(spec, trainer) if spec.is_set("metrics") or spec.task is not None else None
    from trainwright.evaluation.adapters import EvaluatorHandler, handler_of

    handler = handler_of(given.metrics_handler)
    inner = handler.metric_evaluators() if isinstance(handler, EvaluatorHandler) else ()
    for one in (handler, *(evaluator.metric for evaluator in inner)):
        if (held := getattr(one, "trainer", trainer)) is None or _is_gone(held):
            one.trainer = weakref.proxy(trainer)
    return handler


def _is_gone(held: Any) -> bool:
    """Whether this is the reference to an earlier trainer, which has been deleted."""
    try:
        return type(held) in weakref.ProxyTypes and held.__class__ is None
    except ReferenceError:
        return True


def build_metrics_handler(spec: RunSpec, trainer: RunMethods) -> Any:
    """The handler of ``spec.metrics``: the task's, or a torchmetrics handler if there is no task.

    It gets the trainer, as the documented ones do.
    """
    from trainwright.evaluation import TorchMetricsHandler, metrics_handler_for

    if spec.task is not None:
        return metrics_handler_for(spec.task)(spec.metrics, weakref.proxy(trainer))
    return TorchMetricsHandler(spec.metrics or [], weakref.proxy(trainer), is_default=not spec.is_set("metrics"))


def next_commands(spec: RunSpec, total_steps: int, callbacks: Iterable[Callback]) -> list[str]:
    """What a user may do after a training."""
    folder = shlex.quote(spec.output_dir)
    commands = [] if spec.tensorboard is None else [f"tensorboard --logdir {folder}"]
    if not spec.save_enabled:
        return commands
    if any(callback.has_ended_run for callback in callbacks):
        longer = "early_stopping=None"
    elif isinstance(spec.max_steps, float):
        longer = "max_steps=None"
    elif spec.max_steps == total_steps:
        longer = f"max_steps={2 * total_steps}"
    else:
        longer = f"num_epochs={2 * spec.num_epochs}"
    return [*commands, f"resume_from_checkpoint=True with {longer} trains it longer"]

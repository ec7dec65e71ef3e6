"""Build parts of a run from a TrainingConfig: metrics, callbacks, writers; the settings of copies."""

import logging
import shlex
import weakref
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.config.torch_names import GivenName
from trainwright.data.wrapped import with_inner
from trainwright.engine.run_methods import RunMethods
from trainwright.engine.spec import RunSpec
from trainwright.hooks.callbacks import Callback, CallbackList, EarlyStoppingCallback, PrintCallback, TrainerControl
from trainwright.hooks.timer import SettingNames
from trainwright.trainer.best_metric import BestMetric
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
    from trainwright.evaluation.adapters import handler_of

    handler = handler_of(given.metrics_handler)
    if getattr(handler, "trainer", trainer) is None:
        handler.trainer = weakref.proxy(trainer)
    return handler


def build_metrics_handler(spec: RunSpec, trainer: RunMethods) -> Any:
    """The handler of ``spec.metrics``: the task's, or a torchmetrics handler if there is no task.

    It gets the trainer, as the documented ones do.
    """
    from trainwright.evaluation import TorchMetricsHandler, metrics_handler_for

    if spec.task is not None:
        return metrics_handler_for(spec.task)(spec.metrics, weakref.proxy(trainer))
    return TorchMetricsHandler(spec.metrics or [], weakref.proxy(trainer), is_default=not spec.is_set("metrics"))


def build_callbacks(
    spec: RunSpec, control: TrainerControl, best: BestMetric, *, evaluates: bool, print_steps: int
) -> list[Callback]:
    """The callbacks that the configuration requests."""
    callbacks: list[Callback] = []
    if spec.early_stopping is not None:
        callbacks += _early_stopping(spec, control, best, evaluates=evaluates)
    if spec.print_steps is not None:
        callbacks.append(PrintCallback(spec.num_epochs, step_frequency=print_steps))
    return callbacks


def add_built_in(callbacks: CallbackList, built_in: list[Callback], *, before: list[Callback]) -> list[Callback]:
    """Add callbacks behind the user's, except for classes that the user has passed, in place of those of ``before``."""
    for callback in before:
        if any(callback is there for there in callbacks):
            callbacks.pop_callback(callback)
    own = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
    added = [c for c in built_in if not own & {kind.__name__ for kind in type(c).__mro__[:-2]}]
    for callback in added:
        callbacks.add_callback(callback, singleton=False)
    return added


def _early_stopping(spec: RunSpec, control: TrainerControl, best: BestMetric, *, evaluates: bool) -> list[Callback]:
    """Watch the monitor that the user sets, or else ``metric_for_best_model``."""
    given = spec.as_set["early_stopping"] if spec.is_set("early_stopping") else {}
    settings: dict[str, Any] = dict(spec.early_stopping or {})
    if given and not evaluates and str(given.get("monitor", "eval")).startswith("eval"):
        logger.warning(
            "TrainingConfig.early_stopping: watches %s, but nothing is evaluated, so it never stops the run. Pass an"
            " eval_dataset (and no eval_strategy='no'), or watch a training metric such as 'epoch_loss'.",
            given.get("monitor", "the result of an evaluation"),
        )
    if "monitor" in given:
        settings["monitor"], settings["mode"] = best.monitor(settings["monitor"], settings["mode"])
    elif evaluates or spec.is_set("metric_for_best_model"):
        settings |= {"monitor": best.name_in_logs(), "mode": given.get("mode", best.mode())}
    else:
        return []
    callback = EarlyStoppingCallback(control, **settings)
    callback.is_default, callback.turned_off_by = "monitor" not in given, "early_stopping=None turns it off"
    return [callback]


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


SETTING_NAMES = SettingNames(
    workers="dataloader_num_workers",
    no_workers="dataloader_num_workers=0",
    collate="data_collator=lambda batch: batch",
    asynchronous="save_asynchronously=True",
    profile="TrainingConfig(profile=True)",
    save="a larger save_steps, or every_n_epoch or every_n_iteration of model_checkpoint,",
    evaluate="eval_strategy='step' with a larger eval_steps",
)

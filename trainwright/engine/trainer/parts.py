"""Build the parts of a run from a TrainingConfig: loaders, metrics, callbacks, writers, and resuming."""

import json
import logging
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.folder import POINTER_NAME, checkpoint_folders, is_checkpoint, resume_candidates
from trainwright.config.errors import ConfigError, MissingFileError
from trainwright.config.secrets import safe_trackers, without_secrets
from trainwright.config.torch_names import GivenName
from trainwright.engine.folder.formats import CSV_NAME
from trainwright.engine.trainer.best_metric import BestMetric
from trainwright.events.writers import EventWriter, default_writers
from trainwright.hooks.callbacks import Callback, EarlyStoppingCallback, PrintCallback, TrainerControl
from trainwright.hooks.callbacks.logs import Logs
from trainwright.parallel.dist import broadcast_object, is_main_process
from trainwright.parallel.restarts import is_continued

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig

logger = logging.getLogger("trainwright.engine")


def apply_dev_run(config: "TrainingConfig", owner: Any) -> "TrainingConfig":
    """The settings of a ``fast_dev_run``: few batches, in a temporary folder that is deleted with ``owner``."""
    num_batches = dev_batches(config)
    if num_batches is None:
        return config
    from trainwright.config.settings import changes_of

    folder: str = broadcast_object(tempfile.mkdtemp(prefix="fast_dev_run_") if is_main_process() else "")
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    changes = {"output_dir": folder, **changes_of("dev_run", config.rows, num_batches)}
    if config.tensorboard is not None:
        changes["tensorboard"] = {**config.tensorboard, "log_dir": None}
    return config.copy_with(**changes)


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


def dev_batches(config: "TrainingConfig") -> int | None:
    """The number of batches of a ``fast_dev_run``; None: all of them."""
    return int(config.fast_dev_run) or None


def give_preprocessor(preprocessor: Any, model: Any, *datasets: Any) -> Any:
    """Set the passed preprocessor, or the model's own, on the model and data sets whose ``preprocessor`` is None."""
    if preprocessor is None:
        preprocessor = getattr(model, "preprocessor", None)
    if preprocessor is not None:
        for part in (model, *datasets):
            if getattr(part, "preprocessor", preprocessor) is None:
                part.preprocessor = preprocessor
    return preprocessor


def as_handler(given: Any, device: torch.device) -> Any:
    """The passed handler, or a handler around the passed function or metric of torchmetrics."""
    from trainwright.evaluation.handlers import FunctionHandler, MetricObjectHandler

    if isinstance(given, nn.Module) and hasattr(given, "compute"):
        return MetricObjectHandler(given.to(device))
    return given if hasattr(given, "compute") else FunctionHandler(given)


def build_metrics_handler(config: "TrainingConfig", trainer: Any) -> Any:
    """The handler of ``config.metrics``: the task's, or a torchmetrics handler if there is no task."""
    from trainwright.config.torch_names import split_name
    from trainwright.evaluation import TorchMetricsHandler, metrics_handler_for

    if config.task is not None:
        return metrics_handler_for(config.task)(config.metrics, weakref.proxy(trainer))
    metrics: Any = config.metrics or []
    if split_name(config.loss or "")[0].lower() == "bcewithlogitsloss":  # a batch does not show it
        metrics = [{"name": name, "from_logits": True} if isinstance(name, str) else name for name in metrics]
    return TorchMetricsHandler(metrics, weakref.proxy(trainer), is_default=not config.is_set("metrics"))


def build_callbacks(
    config: "TrainingConfig", control: TrainerControl, best: BestMetric, *, evaluates: bool, print_steps: int
) -> list[Callback]:
    """The callbacks that the configuration requests."""
    callbacks: list[Callback] = []
    if config.early_stopping is not None:
        callbacks += _early_stopping(config, control, best, evaluates=evaluates)
    if config.print_steps is not None:
        callbacks.append(PrintCallback(config.num_epochs, step_frequency=print_steps))
    return callbacks


def _early_stopping(
    config: "TrainingConfig", control: TrainerControl, best: BestMetric, *, evaluates: bool
) -> list[Callback]:
    """Watch the monitor that the user sets, or else ``metric_for_best_model``."""
    given = config.to_dict()["early_stopping"] if config.is_set("early_stopping") else {}
    settings: dict[str, Any] = dict(config.early_stopping or {})
    callback: EarlyStoppingCallback
    if "monitor" in given:
        best.warn_of_unknown_monitor(settings["monitor"])
        if settings["mode"] == "auto":
            settings["mode"] = best.mode_of_monitor(settings["monitor"])
        settings["monitor"] = best.monitor_in_logs(settings["monitor"])
        callback = EarlyStoppingCallback(control, **settings)
    else:
        if not evaluates and not config.is_set("metric_for_best_model"):
            logger.info("Early stopping: off, because nothing is evaluated.")
            return []
        settings |= {"monitor": best.name_in_logs(), "mode": given.get("mode", best.mode())}
        callback = DefaultEarlyStopping(control, **settings)
    callback.turned_off_by = "early_stopping=None turns it off"
    return [callback]


class DefaultEarlyStopping(EarlyStoppingCallback):
    """Early stopping by default: turns itself off if its metric is missing."""

    _is_off = False

    def on_train_end(self, logs: Logs) -> None:
        """Does not warn about a missing monitor: the user did not request early stopping."""

    def _find_monitor(self, logs: Logs) -> bool:
        if self.monitor in logs:
            return True
        if not self._is_off:
            self._is_off = True
            logger.info("Early stopping: off, the evaluation computes no %s.", self.monitor.removeprefix("eval_"))
        return False


def build_writers(
    config: "TrainingConfig",
    folder: Path,
    num_updates: int,
    batch_size: int,
    *,
    first_metric: str | None,
    updates_per_epoch: int,
) -> list[EventWriter]:
    """Progress bar and console (unless ``print_steps`` prints), ``metrics.json``, ``metrics.csv``, TensorBoard."""
    from trainwright.config.settings import TrainerConfig

    tensorboard = config.tensorboard
    aliases = {"evaluation/loss": "eval_epoch_loss", f"evaluation/{first_metric}": "eval_epoch_metric"}
    logs = folder / config.logs_dir
    settings, _ = without_secrets(config.to_dict())
    return default_writers(
        folder,
        num_updates,
        batch_size=batch_size,
        progress_bar=config.progress_bar and config.print_steps is None,
        iterations_per_epoch=updates_per_epoch,
        console=config.print_steps is None,
        table=logs / CSV_NAME,
        tensorboard=None if tensorboard is None else tensorboard["log_dir"] or logs / tensorboard["comment"],
        tensorboard_aliases={"total_loss": "train.loss"} if isinstance(config, TrainerConfig) else aliases,
        trackers=safe_trackers(config.trackers),
        settings=settings,
    )


def continued(config: "TrainingConfig", output_dir: Path) -> "TrainingConfig":
    """``config``, resuming if the launcher has restarted this run."""
    if config.resume_from_checkpoint is True:
        return config
    if not is_continued(output_dir / config.checkpoints_dir / POINTER_NAME):
        return config
    logger.info("The launcher has restarted this run: it continues from its latest checkpoint.")
    return config.copy_with(resume_from_checkpoint=True)


def resume(config: "TrainingConfig", checkpointer: Checkpointer) -> Path | None:
    """Load the checkpoint that ``config`` resumes from and return its folder; None for a run that starts from step 0.

    Raises:
        MissingFileError: the configured path holds no checkpoint.
    """
    asked, model = config.resume_from_checkpoint, checkpointer.model
    if asked is None or asked is False:
        _begin_with_weights(config, model)
        return None
    own = Path(checkpointer.save_dir)
    folder = own if asked is True else _checkpoints_at(Path(asked), config.checkpoints_dir)
    if is_checkpoint(folder):
        there = checkpointer.in_folder("")
        there.load(folder)
        checkpointer.loaded_from = there.loaded_from
        return folder.resolve()
    there = checkpointer.in_folder(folder)
    if not there.has_checkpoint():
        logger.info("%s holds no checkpoint to resume from: starting a new run.", config.output_dir)
        _begin_with_weights(config, model)
        return None
    there.resume_or_load("", resume=True)
    checkpointer.loaded_from = there.loaded_from
    return folder


def elastic_accumulation(config: "TrainingConfig", output_dir: Path, batch_size: int) -> int:
    """The batches of an update that keep the samples per update of the checkpoint that an elastic run resumes from.

    ``batch_size``: the samples of a batch of all processes together; 0: unknown.

    Raises:
        ConfigError: they are no multiple of a batch.
    """
    asked, now = config.resume_from_checkpoint, config.gradient_accumulation_steps
    if asked is None or asked is False or not config.elastic or not batch_size:
        return now
    own = output_dir / config.checkpoints_dir
    folder = own if asked is True else _checkpoints_at(Path(asked), config.checkpoints_dir)
    candidates = [folder] if is_checkpoint(folder) else resume_candidates(folder) if folder.is_dir() else []
    if not candidates or not (file := candidates[0] / "trainer.json").is_file():
        return now
    state = json.loads(file.read_text())
    total = state.get("batch_size", 0) * state["gradient_accumulation_steps"]
    steps, rest = divmod(total, batch_size)
    if rest:
        raise ConfigError(
            f"TrainingConfig.elastic: an update of the checkpoint has {total} samples, which batches of {batch_size}"
            f" ({config.batch_size} batch_size x {batch_size // config.batch_size} data ranks) do not divide. Set"
            " another batch_size, or start another number of processes."
        )
    if steps and steps != now:
        logger.info("Elastic: %d batches per update instead of %d, %d samples as before.", steps, now, total)
    return steps or now


def _begin_with_weights(config: "TrainingConfig", model: nn.Module) -> None:
    if config.init_weights_from is not None:
        from trainwright.models.folder import init_weights

        init_weights(model, config.init_weights_from)


def _checkpoints_at(path: Path, checkpoints_dir: str) -> Path:
    """``path``, or the folder of checkpoints of the run in it."""
    for folder in (path, path / checkpoints_dir):
        if is_checkpoint(folder) or checkpoint_folders(folder):
            return folder
    raise MissingFileError(
        f"TrainingConfig.resume_from_checkpoint: {path} holds no checkpoint; give a checkpoint or a run folder."
    )

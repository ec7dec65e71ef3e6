"""How a run of the Python API starts: its processes, data, length and periods, and the checkpoint it continues from."""

import json
import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainwright.base.dist import (
    all_gather_object,
    broadcast_object,
    get_data_parallel_size,
    get_world_size,
    is_main_process,
)
from trainwright.base.errors import ConfigError, MissingFileError
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.folder import POINTER_NAME, checkpoint_folders, is_checkpoint, resume_candidates
from trainwright.config.spec import RunSpec, spec_of_training_config
from trainwright.config.windows import Windows
from trainwright.data.batches import loader_epoch_setters, source_of
from trainwright.data.sampler import limited
from trainwright.engine.folder.files import RunFiles
from trainwright.engine.folder.mirrored import fetch_run, mirror_of
from trainwright.engine.folder.run_folder import RunFolder, file_names_of
from trainwright.engine.initial_weights import load_initial_weights
from trainwright.engine.loaders import is_own_loader, with_length
from trainwright.engine.logs import log_to_console
from trainwright.engine.state import TrainerState
from trainwright.engine.step_plan import StepPlan, steps_of
from trainwright.parallel.data_parallel import launched_rank
from trainwright.parallel.restarts import is_continued
from trainwright.trainer.checks import Given
from trainwright.trainer.processes import check_launch, join

if TYPE_CHECKING:
    from trainwright.checkpoint.mirror import Mirror
    from trainwright.config.settings import TrainingConfig

logger = logging.getLogger("trainwright.engine")

_SHOWN = 5  # checkpoints that a message names


def start(given: Given, owner: object) -> "tuple[TrainingConfig, torch.device]":
    """Join the launcher's processes; return the settings and the device of this process.

    With ``fast_dev_run`` the settings are changed, and a temporary folder is deleted with ``owner``. A run that the
    launcher has restarted resumes.
    """
    log_to_console(launched_rank())  # before the first warning
    config, device = join(given.config, given.accelerator, given.data)
    if num_batches := int(config.fast_dev_run):
        from trainwright.config.settings import changes_of

        folder: str = broadcast_object(tempfile.mkdtemp(prefix="fast_dev_run_") if is_main_process() else "")
        weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
        changes = {"output_dir": folder, **changes_of("dev_run", config.rows, num_batches)}
        if config.tensorboard is not None:
            changes["tensorboard"] = {**config.tensorboard, "log_dir": None}
        config = config.copy_with(**changes)
    checkpoints = Path(os.path.abspath(config.output_dir), config.checkpoints_dir)
    spec = spec_of_training_config(config)
    mirror = mirror_of_spec(spec)
    elsewhere = mirror.has_checkpoint if mirror is not None else bool
    if spec.resume_from_checkpoint is not True and is_continued(checkpoints / POINTER_NAME, elsewhere):
        config = config.copy_with(resume_from_checkpoint=True)
        spec = spec_of_training_config(config)
    fetch_run(mirror, resumes=spec.resume_from_checkpoint is True)
    check_launch(spec, given.accelerator)
    return config, device


def mirror_of_spec(spec: RunSpec) -> "Mirror | None":
    """The mirror of the checkpoints that the settings request."""
    url = spec.checkpoint_mirror if spec.save_enabled else None
    files = RunFiles(Path(os.path.abspath(spec.output_dir)), file_names_of(spec))
    return mirror_of(url, spec.where("checkpoint_mirror"), files)


def resume(spec: RunSpec, checkpointer: Checkpointer) -> Path | None:
    """Load the checkpoint that ``spec`` resumes from and return its folder; None: a run starts from step 0."""
    folder = _resumed_folder(spec, Path(checkpointer.save_dir))
    if folder is not None and is_checkpoint(folder):
        there = checkpointer.in_folder("")
        there.load(folder)
        checkpointer.loaded_from = there.loaded_from
        return folder.resolve()
    if folder is not None and (there := checkpointer.in_folder(folder)).has_checkpoint():
        there.resume_or_load("", resume=True)
        checkpointer.loaded_from = there.loaded_from
        return folder
    if folder is not None:
        logger.info("%s holds no checkpoint to resume from: starting a new run.", spec.output_dir)
    load_initial_weights(spec, checkpointer)
    return None


def check_folder(spec: RunSpec, folder: RunFolder) -> None:
    """Refuse a folder with another run."""
    if not spec.overwrite_output_dir and not folder.resume and folder.holds_a_run():
        raise ConfigError(
            f"TrainingConfig.output_dir: {spec.output_dir} holds a run, and overwrite_output_dir is False. Set"
            " another folder, or resume_from_checkpoint=True to continue that run."
        )


def elastic_accumulation(spec: RunSpec, output_dir: Path, batch_size: int) -> int | dict[int, int]:
    """The batches of an update that keep the samples per update of the checkpoint that an elastic run resumes from.

    ``batch_size``: the samples of a batch of all processes together; 0: unknown.
    """
    now = spec.gradient_accumulation_steps
    folder = _resumed_folder(spec, output_dir / spec.checkpoints_dir) if spec.elastic and batch_size else None
    if folder is None or isinstance(now, dict):
        return now
    candidates = [folder] if is_checkpoint(folder) else resume_candidates(folder) if folder.is_dir() else []
    if not candidates or not (file := candidates[0] / "trainer.json").is_file():
        return now
    state = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(state["gradient_accumulation_steps"], dict):
        return now  # which the state refuses
    total = state.get("batch_size", 0) * state["gradient_accumulation_steps"]
    steps, rest = divmod(total, batch_size)
    if rest:
        raise ConfigError(
            f"TrainingConfig.elastic: an update of the checkpoint has {total} samples, which batches of {batch_size}"
            f" ({spec.batch_size} batch_size x {batch_size // spec.batch_size} data ranks) do not divide. Set"
            " another batch_size, or start another number of processes."
        )
    if steps and steps != now:
        logger.info("Elastic: %d batches per update instead of %d, %d samples as before.", steps, now, total)
    return steps or now


_OF_OTHERS = " For the weights of another library: model.load_state_dict(...), before Trainer(...)."


def _resumed_folder(spec: RunSpec, own: Path) -> Path | None:
    """The checkpoint that the settings resume from, or a folder of checkpoints; None: they do not."""
    asked = spec.resume_from_checkpoint
    if asked is None or isinstance(asked, bool):
        return own if asked else None
    for folder in (Path(asked), Path(asked, spec.checkpoints_dir)):
        if is_checkpoint(folder) or checkpoint_folders(folder):
            return folder
    fault = "holds no checkpoint" if Path(asked).exists() else "there is no such file or folder"
    beside = [path.name for path in checkpoint_folders(Path(asked).parent) if not path.name.startswith(".")]
    shown = f" In {Path(asked).parent} there are {', '.join(beside[-_SHOWN:])}." if beside else ""
    raise MissingFileError(
        f"TrainingConfig.resume_from_checkpoint: {Path(asked)}: {fault}; give a checkpoint or a run folder.{shown}"
        f"{_OF_OTHERS if Path(asked).is_file() else ''}"
    )


def plan_of(spec: RunSpec, loader: Any) -> tuple[Any, StepPlan]:
    """The loader with a length, and the plan: ``num_epochs`` passes over it, or ``max_steps`` if these are fewer."""
    max_steps, limit = spec.max_steps, spec.overfit_batches or spec.limit_train_batches
    loader = with_length(loader, limit, max_steps)
    steps_per_epoch = epoch_length(spec, loader)
    if isinstance(max_steps, float):
        share, max_steps = max_steps, steps_of(max_steps, steps_per_epoch) * spec.num_epochs
        logger.info(
            "TrainingConfig.max_steps=%g: %d steps in total, that fraction of %d epochs of %d batches. No epoch is"
            " shortened: training ends in epoch %d. limit_train_batches=%g shortens each epoch.",
            share, max_steps, spec.num_epochs, steps_per_epoch, -(-max_steps // steps_per_epoch), share,
        )  # fmt: skip
    total = spec.num_epochs * steps_per_epoch
    batch_size = (getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 0) * get_data_parallel_size()
    if max_steps is not None and max_steps > total:
        logger.warning(
            "TrainingConfig.max_steps: %d exceeds the %d steps of num_epochs=%d, after which training ends.",
            max_steps, total, spec.num_epochs,
        )  # fmt: skip
    plan = StepPlan(
        steps_per_epoch=steps_per_epoch,
        windows=Windows.of(spec.gradient_accumulation_steps),
        num_epochs=spec.num_epochs,
        max_steps=max_steps,
        batch_size=batch_size,
        samples_per_epoch=samples_of_epoch(loader, steps_per_epoch, batch_size),
        has_epochs=not hasattr(loader, "is_open_ended"),
    )
    return loader, plan


def warn_of_windows(spec: RunSpec, plan: StepPlan, loader: Any) -> None:
    """Warn of updates of more batches than an epoch has, unless a setting shortens the epoch, or later ones may be
    longer."""
    is_short = spec.overfit_batches or spec.limit_train_batches or spec.fast_dev_run
    if plan.windows.largest > plan.steps_per_epoch and not (is_short or any(loader_epoch_setters(source_of(loader)))):
        logger.warning(
            "TrainingConfig.gradient_accumulation_steps: got %d, and an epoch has %d batches: an update ends at the end"
            " of an epoch, so none has more.", plan.windows.largest, plan.steps_per_epoch,
        )  # fmt: skip


def epoch_length(spec: RunSpec, loader: Any) -> int:
    """The steps of an epoch that starts now."""
    try:
        steps = len(loader)
    except TypeError as error:
        raise ConfigError(
            f"Trainer.train_dataloader: {type(loader).__name__} has no length any more: {error}."
        ) from error
    if steps == 0:
        raise ConfigError(f"Trainer.train_dataloader: {type(loader).__name__} is empty; it must yield a batch.")
    if not is_own_loader(loader):  # which limits itself
        steps = limited(steps, spec.overfit_batches or spec.limit_train_batches)
    lengths = all_gather_object(steps)
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"Trainer.train_dataloader: its lengths are {', '.join(map(str, lengths))} on the {len(lengths)} processes;"
            " they must be equal, because all processes make each step together."
        )
    return steps


def samples_of_epoch(loader: Any, steps: int, batch_size: int) -> int:
    """The samples of an epoch of all processes; 0: unknown."""
    return getattr(getattr(loader, "batch_sampler", None), "samples_per_epoch", None) or steps * batch_size


class Periods:
    """The periods of the configuration in steps, 0 for none, and whether they are over after the latest update.

    Attributes:
        save, log, evaluate, print: the periods. ``eval_epochs``: that of evaluations in epochs, if ``evaluate`` is 0.
        common_print: that of printed lines with the metrics of several processes; 0 with one process.
        log_is_due, eval_is_due: after each period, by default at the end of each epoch.
        metrics_are_due: when the metrics of the training are logged or printed.
        check_is_due: when values are checked, and computed over several processes: before anything reads them.
        save_is_due: when a checkpoint is saved.
    """

    def __init__(self, spec: RunSpec, state: TrainerState) -> None:
        self._state = state
        self.plan(spec)
        epoch_end = state.epoch_ends()
        self.log_is_due = state.passes(lambda: self.log, otherwise=epoch_end)
        self.eval_is_due = state.passes(lambda: self.evaluate, otherwise=state.epoch_ends(lambda: self.eval_epochs))
        self.metrics_are_due = self.log_is_due | state.passes(lambda: self.common_print)
        self.check_is_due = self.metrics_are_due | epoch_end
        linked_epoch_end = state.epoch_ends(lambda: self._linked_epochs)
        self.is_linked_epoch_end = linked_epoch_end.is_over  # an epoch whose checkpoint has a link ``epoch_{n}``
        saves = state.passes(lambda: self.save) | state.passes(lambda: self._saved_steps)
        self.save_is_due = saves | linked_epoch_end

    def plan(self, spec: RunSpec) -> None:
        """Compute the periods for the current length of the run."""
        self.save, self.log, self.evaluate, self.print = (
            steps_of(period, self._state.plan.total_steps)
            for period in (spec.save_steps, spec.log_steps, spec.eval_steps, spec.print_steps)
        )
        self.common_print = self.print if get_world_size() > 1 else 0
        self.eval_epochs = spec.eval_every_n_epoch or 1
        saved = spec.model_checkpoint or {}
        self._saved_steps: int = saved.get("every_n_iteration") or 0
        self._linked_epochs: int = saved.get("every_n_epoch") or 0

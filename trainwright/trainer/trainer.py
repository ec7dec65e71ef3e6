"""The Python API: a trainer for a model, data sets and settings."""

import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.base.batch import to_batch
from trainwright.base.dist import get_averaging_rank, is_main_process
from trainwright.base.errors import ConfigError, checked_arguments
from trainwright.config.foreign_names import EVALUATION_ARGUMENTS, TRAIN_ARGUMENTS
from trainwright.config.torch_names import CUSTOM, GivenName
from trainwright.data.seeding import seed_everything
from trainwright.engine import loaders
from trainwright.engine.build import build_run
from trainwright.engine.extra_parameters import extra_optimizers, log_modes, warn_of_untrained
from trainwright.engine.run_hooks import inner_hooks
from trainwright.engine.run_methods import RunMethods, part_of_run
from trainwright.engine.state import TrainerState
from trainwright.engine.update import refuse_sparse_gradients
from trainwright.events.formats import CSV_NAME
from trainwright.events.writers.base import EventWriter
from trainwright.hooks import (
    HookBase,
)
from trainwright.hooks.callbacks import Callback
from trainwright.hooks.method_overrides import check_arguments, is_overridden, overridable
from trainwright.models.eval_mode import set_training_mode
from trainwright.optim.named import NamedOptimizers
from trainwright.optim.weight_average import exchanging_optimizers
from trainwright.trainer import checks, parts
from trainwright.trainer.checks import Given
from trainwright.trainer.run import PythonRun
from trainwright.trainer.saving import read_csv_logs
from trainwright.trainer.start import warn_of_windows
from trainwright.trainer.training_step import STEP_METHODS

logger = logging.getLogger("trainwright.engine")

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig


@overridable
class Trainer(RunMethods):
    """Train ``model`` on ``train_dataset``: ``Trainer(model, config, train_dataset=data).train()``.

    Override ``train_step(model, inputs)``, ``training_step(batch)``, ``optimization_step()`` or
    ``compute_loss(model, inputs)`` to change a step, ``prepare_input_batch(batch)`` to change its batch,
    ``inner_training_loop(epoch_num)`` to write the loop over an epoch, ``evaluate_step(model, inputs)``,
    ``evaluation_step(batch)``, ``compute_metric(model, inputs)`` or ``evaluate`` to change an evaluation,
    ``create_train_dataloader(dataset)`` or ``create_eval_dataloader(dataset)`` to change the loaders.

    Args:
        model, config: in either order; ``training_config`` is another name of ``config``. A model may be a LazyCall,
            which ``config.meta_init`` builds on the meta device.
        data_collator: builds a batch from a list of samples; the data set's own ``data_collator`` by default.
        preprocessor: set on the model and data sets whose ``preprocessor`` is None; saved with the model.
        metrics_handler: computes the metrics of evaluations in place of ``config.metrics``; or a function of
            (predictions, labels) of the complete data set that returns metrics by name, or a list or dict of both.
        optimizers, lr_schedulers: several optimizers, and their schedules, by name: ``{"g": ..., "d": ...}`` (see
            ``docs/custom-training.md``).
        loss: a module or function of (outputs, target), in place of ``config.loss``.
        accelerator: an ``accelerate.Accelerator``, whose device, precision and processes are used.
        eval_dataset: several data sets are a dict, ``{"clean": …, "noisy": …}``. A metric name without a data set, such
            as ``loss``, means that of the first.
        train_dataloader, eval_dataloader: loaders to use unchanged, in place of loaders built from the data sets.
        model_card: a :class:`~trainwright.models.ModelCard` for the ``README.md`` of checkpoints.

    Attributes:
        state: ``global_step``, ``epoch`` and ``epoch_step``, counted in calls of ``training_step``.
        total_steps: ``state.global_step`` at the end of training.
        num_batches, steps_in_epoch: batches of an epoch, and the number of them that one trains on.
        metrics_handler, loss, optimizer, lr_scheduler, checkpointer: as built from the arguments.
    """

    run: PythonRun
    run_kind = PythonRun
    config: "TrainingConfig" = part_of_run()
    state: TrainerState = part_of_run()
    train_dataset: Any = part_of_run()
    eval_dataset: Any = part_of_run()
    train_dataloader: Any = part_of_run()
    eval_dataloader: Any = part_of_run()
    preprocessor: Any = part_of_run()
    accelerator: Any = part_of_run()
    model_card: Any = part_of_run()
    output_dir: Path = part_of_run()
    loss: Any = part_of_run("criterion")  # a module, or the user's function; None if the model computes its loss

    def __init__(
        self,
        model: Any = None,
        config: "TrainingConfig | Any" = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        training_config: "TrainingConfig | None" = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        preprocessor: Any = None,
        metrics_handler: Any = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        optimizers: Mapping[str, Optimizer] | None = None,
        lr_schedulers: Mapping[str, LRScheduler] | None = None,
        loss: Callable[..., Any] | None = None,
        accelerator: Any = None,
        train_dataloader: Any = None,
        eval_dataloader: Any = None,
        model_card: Any = None,
        callbacks: Iterable[Callback] = (),
        **unknown: Never,
    ) -> None:
        super().__init__()
        check_arguments(self, [one for one in STEP_METHODS if is_overridden(self, one)][:1])  # it may call the others
        given = Given.checked(  # every error at once, before anything is built
            model, config, training_config=training_config, unknown=unknown,
            train_dataset=train_dataset, eval_dataset=eval_dataset,
            train_dataloader=train_dataloader, eval_dataloader=eval_dataloader,
            data_collator=data_collator, preprocessor=preprocessor, metrics_handler=metrics_handler,
            optimizer=optimizer, lr_scheduler=lr_scheduler, optimizers=optimizers, lr_schedulers=lr_schedulers,
            loss=loss, accelerator=accelerator, model_card=model_card, callbacks=callbacks,
        )  # fmt: skip
        self.run.start(given)
        build_run(self.run)

    def build_hooks(self) -> list[HookBase | None]:
        """The hooks, in the order of their calls."""
        return inner_hooks(self.run)

    def build_writers(self) -> list[EventWriter]:
        """The writers of metrics: the console, ``metrics.json``, ``metrics.csv``, TensorBoard."""
        return self.run.build_writers()

    # Documented attributes.

    @cached_property
    def metrics_handler(self) -> Any:
        """Computes the metrics of evaluations. Built on first use by default."""
        return parts.build_metrics_handler(self.run.spec, self)

    @property
    def total_steps(self) -> int:
        """``state.global_step`` at the end of training."""
        return self.state.plan.total_steps

    @property
    def num_batches(self) -> int:
        """The batches of an epoch."""
        return self.state.plan.steps_per_epoch

    @property
    def steps_in_epoch(self) -> int:
        """The batches of an epoch that one trains on."""
        return min(self.num_batches, self.total_steps)

    @property
    def configs(self) -> "TrainingConfig":
        """Another name of ``config``."""
        return self.config

    @property
    def data_collator(self) -> "Callable[[list[Any]], Any] | None":
        """Builds a batch from a list of samples: the passed collator, or the data set's own."""
        return self.run.data_collator

    @property
    def checkpoints_dir(self) -> Path:
        """The folder of checkpoints."""
        return self.run.checkpoints_dir

    @property
    def logs_dir(self) -> Path:
        """The folder of ``metrics.csv``."""
        return self.output_dir / self.run.spec.logs_dir

    @property
    def epoch(self) -> int:
        """The epoch of the latest step, counted from 1."""
        return self.state.epoch

    @property
    def consumed_samples(self) -> int:
        """Training samples used so far; 0 if a user's loader does not report its size."""
        return self.state.plan.samples(self.state.global_step)

    def set_optimizer(self, optimizer: Optimizer, optimizer_name: str | None = None) -> None:
        """Train with ``optimizer`` from now on; the configured schedule is rebuilt for it."""
        if isinstance(self.optimizer, NamedOptimizers):
            raise ConfigError("Trainer.set_optimizer: this run has several optimizers; pass others as optimizers=.")
        checks.check_optimizer(optimizer, self.model)
        if exchanging_optimizers(optimizer) or exchanging_optimizers(self.optimizer):
            raise ConfigError("Trainer.set_optimizer: an optimizer with train() and eval() is passed as optimizer=.")
        self.run.change_config(optimizer=GivenName(optimizer_name or CUSTOM))
        self.optimizer = optimizer
        self.lr_scheduler, self.lr_schedulers = self.run.scheduling.replace(optimizer), {}
        self.run.set_checkpoint_parts()
        self.run.steps.build_update()
        self.run.own_step.watch_optimizers()

    def set_loss(self, loss: Callable[..., Any], loss_name: str | None = None) -> None:
        """Use ``loss(outputs, target)`` from now on."""
        self.run.use_loss(loss, loss_name)
        self.run.steps.build_loss()

    def set_train_mode(self, model: nn.Module | None = None) -> None:
        """Training mode, except for frozen parts in evaluation mode; with ``config.freeze_bn`` for batch norms too."""
        set_training_mode(model or self.model)
        self.run.hold_batch_norms(model or self.model)

    def create_train_dataloader(self, dataset: Any) -> Any:
        """The loader of training data: it yields the rest of this epoch, and iterated again the next epoch.

        An override is called when the trainer is built, for the length of the training, and for each further epoch,
        also the one that a resumed run is in. ``self.state.epoch`` is then that epoch.
        """
        return loaders.train_loader(dataset, self.run.spec, self.run.given.data_collator, self.state.global_step)

    @checked_arguments(partial(checks.method_hint, EVALUATION_ARGUMENTS))
    def evaluate(self, dataset: Any = None, logs: MutableMapping[str, Any] | None = None) -> dict[str, Any]:
        """``loss``, the mean over all samples, and each metric, over the evaluation data or ``dataset``.

        ``dataset`` may be a loader. Of several data sets, a dict by name, the results are named after them:
        ``clean/loss``, ``clean/accuracy``, ``noisy/loss`` …

        Training state, modes and random state are unchanged afterwards. ``loss`` is absent if the model returns no loss
        in evaluation mode. No metric is logged or written. Every process must call it; each evaluates its share of the
        samples.

        ``evaluate(model, logs)`` evaluates ``model``, which may differ from the trainer's, on the evaluation data and
        returns ``logs`` with ``eval_epoch_loss`` and ``eval_epoch_metric`` added.

        Raises:
            ConfigError: there is no evaluation data.
        """
        if dataset is None:
            self.run.check_loaders_assigned(trains=False)
            self.run.check_data_assigned()
        return self.run.evaluation.evaluate(dataset, logs, self.eval_dataloader)

    def create_eval_dataloader(self, dataset: Any) -> Any:
        """The loader over evaluation data: every sample once, in order."""
        return self.run.evaluation.create_loader(dataset)

    def evaluate_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        """Evaluate one batch: returns ``eval_step_loss``, and updates the metrics with :meth:`evaluation_step`."""
        return self.run.evaluation.evaluate_step(model, inputs)

    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        """The model's outputs for one batch as a dict: its own entries or ``logits``, and ``loss`` if there is one.

        With ``evaluate_with_generate`` the ``logits`` of a generative model are the result of its ``generate``.
        """
        return self.run.evaluation.evaluation_step(batch)

    @checked_arguments(partial(checks.method_hint, EVALUATION_ARGUMENTS))
    def predict(self, data: Any, *, iterate: bool = False) -> Any:
        """The model's outputs for a data set, a loader or a list of samples, on the CPU, in the order of the samples.

        Tensors are concatenated, dicts and tuples by item. Tensors of unequal sizes become a list with one for each
        sample. Items with no value for each sample, such as a loss, are left out. Samples need no labels. Training
        state, modes and random state are unchanged. Every process must call it; each computes its share of the batches
        and returns all outputs.

        ``iterate``: return an iterator over the outputs of each batch instead, for data whose outputs exceed the
        memory.

        For one batch of inputs, a tensor, a dict or a tuple, it returns the model's outputs unchanged, on the device.
        """
        return self.run.evaluation.predict(data, iterate=iterate)

    def predict_step(self, batch: Any) -> Any:
        """The outputs of :meth:`predict` for one batch: those of the model, or of its ``generate``, as in evaluations.

        The model gets the fields that it takes, or the first item of a pair.
        """
        return self.run.evaluation.predict_step(batch)

    @property
    def metric(self) -> Any:
        """The first metric of ``metrics_handler``; None if there is none."""
        return getattr(self.metrics_handler, "first", None)

    def save(self, path: str | Path, overwrite: bool = True) -> None:
        """Save the complete training state to the checkpoint folder ``path``, with its model card ``README.md``.

        Every process must call it; the main process writes. A call within an update (of an accumulation window, for
        example) saves when the update is complete, since only then a run can be resumed.

        Raises:
            FileExistsError: ``path`` exists, and ``overwrite`` is False.
        """
        self.run.saving.save(path, overwrite=overwrite)

    def load(self, path: str | Path) -> None:
        """Restore the complete training state from a checkpoint. ``train`` continues from there."""
        self.run.saving.load(path)

    def push_to_hub(self, repo_id: str, *, commit_message: str | None = None, private: bool = False) -> str:
        """Upload the model, its config, preprocessor, card and training state; return the URL of the repository.

        The card shows ``curves.png``, if the run has one.

        Raises:
            MissingFileError: the hub cannot be reached, or rejects the upload.
        """
        return self.run.saving.push_to_hub(repo_id, commit_message=commit_message, private=private)

    def load_csv_logs(self, logs_dir: str | Path | None = None) -> dict[str, list[float | None]]:
        """The columns of ``metrics.csv`` by name, with None for empty cells.

        With a ``TrainerConfig`` also ``step`` (steps done), ``train.loss`` and ``evaluation.<metric>``.

        Raises:
            MissingFileError: the file does not exist.
        """
        from trainwright.config.settings import TrainerConfig

        columns = read_csv_logs(Path(self.logs_dir if logs_dir is None else logs_dir) / CSV_NAME)
        if not isinstance(self.config, TrainerConfig):
            return columns
        plan, first = self.state.plan, "eval_"
        steps: list[float | None] = [float(plan.steps(int(at or 0) + 1)) for at in columns.get("iteration", [])]
        named = {f"evaluation.{name.removeprefix(first)}": columns[name] for name in columns if name.startswith(first)}
        loss = {"train.loss": columns["total_loss"]} if "total_loss" in columns else {}
        return {"step": steps, **named, **loss, **columns}

    # The path of a batch: train -> Step.run (engine/step.py) -> TrainingStep._train (trainer/training_step.py) -> the
    # contract that fits the batch (engine/loss_fn.py) -> the model; then Update.backward and finish (engine/update.py).
    # Overridden methods are called in between.

    def train(  # type: ignore[override]  # not decorated: a traceback has no frame more
        self, resume_checkpoint_path: str | Path | None = None, **unknown: Never
    ) -> dict[str, Any]:
        """Train to the end, from the current state or a checkpoint; returns the results of the last evaluation.

        With ``load_best_model_at_end`` those of the best weights, which the model has then.
        """
        checks.refuse_arguments("Trainer.train", unknown, TRAIN_ARGUMENTS)
        if not isinstance(resume_checkpoint_path, str | PathLike | None):
            raise checks.no_path(resume_checkpoint_path)
        self._use_settings()
        if resume_checkpoint_path is not None:
            self.load(resume_checkpoint_path)
            self.run.saving.continue_from(resume_checkpoint_path)
        with self._training() as run_step:
            if is_overridden(self, "inner_training_loop"):
                self._run_own_epochs()
            for _ in self._iterations():
                run_step()
        return self.last_eval_results

    def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
        """Train to the end of epoch ``epoch_num`` (counted from 1); returns ``loss``, its mean since the run started.

        ``train`` runs through all epochs at once and calls this method only if it is overridden. Batches that an
        override reads itself count as one iteration for hooks, evaluations and checkpoints.
        """

        def until() -> int:  # the epoch may get another length when it is opened
            return self.state.plan.updates(self.state.plan.end_of_epoch(epoch_num))

        if self.is_training:
            for _ in self._iterations(until):
                self.run_step()
            return {"loss": self.state.mean_loss()}
        self._use_settings()
        try:
            with self._training(max_iter=min(until(), self.max_iter)):
                if self.is_training:  # there was something left to train
                    for _ in self._iterations(until):
                        self.run_step()
                    self.max_iter = self.iter
        finally:
            self.max_iter = self.state.plan.num_updates
        return {"loss": self.state.mean_loss()}

    def run_step(self) -> None:
        """One update: ``train_step`` for each micro-batch. ``train`` does not call it unless it is overridden."""
        if self.run.steps.step is None:
            raise ConfigError(
                "Trainer.run_step: the step is built when the training starts. Call train(), or inner_training_loop(n)"
                " for the steps up to the end of epoch n."
            )
        self.run.steps.step.run()

    def prepare_input_batch(self, batch: Any) -> Any:
        """Prepare a batch of the loader for a step: by default, move its tensors to the device."""
        return to_batch(batch, self.device)

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        """One micro-batch: forward and backward, and at the end of an accumulation window the update.

        Returns ``step_loss``, a detached tensor that has not been synchronized. Callbacks and printed lines receive any
        further entries of an override (``epoch_loss``, ``epoch_metric`` …).
        """
        return self.run.steps.train_step(model, inputs)

    def training_step(self, batch: Any) -> Any:
        """Forward and backward of one micro-batch; returns its detached loss. Does not change weights."""
        return self.run.steps.training_step(batch)

    def optimization_step(self) -> None:
        """Clip the gradients, step the optimizer, set the gradients to None: at the end of each accumulation window."""
        self.run.update.finish()

    # Called by a user's own step.

    def autocast(self) -> AbstractContextManager[Any]:
        """The run's precision, for computations of a step outside the model's ``forward``."""
        if self.accelerator is None:
            return super().autocast()
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        """The mean loss of a batch, by the contract of model and batch (see ``docs/trainer.md``)."""
        return self.run.steps.loss.compute_loss(model, inputs)

    def compute_metric(self, model: Any, inputs: Any) -> float:
        """The first metric over the batches passed so far and this one: a forward pass in evaluation mode.

        Training calls this method only if it is overridden; otherwise it reuses the outputs of the step.
        """
        return self.run.evaluation.compute_metric(model, inputs)

    def update_metrics(self, model: Any, inputs: Any, step_loss: Any, training: bool = True) -> tuple[float, float]:
        """For a user's ``train_step``: count a batch, and return the epoch's mean loss and metric."""
        if training and self.run.train_metrics is not None:
            self.run.train_metrics.add_now(inputs)
            return self.run.calls.epoch_loss(float(step_loss)), self.run.train_metrics.first()
        return float(step_loss), self.compute_metric(model, inputs)

    # Called by the loop and by hooks.

    def before_train(self) -> None:
        run = self.run
        run.folder.prepare(self.config)
        if self.config.is_by_its_page:  # the page documents this list
            logger.log(logging.WARNING if is_main_process() else logging.INFO, "%s", repr(self.config))  # once
        run.scheduling.check(run.schedules())
        if not self.has_trained:
            warn_of_windows(run.spec, run.state.plan, self.train_dataloader)
        super().before_train()

    def _before_first_step(self) -> None:
        if self.start_iter == 0:
            seed_everything(self.run.spec.seed + get_averaging_rank())
        self.run.batches_of_loader()
        with without_compiler():
            self.optimizer.zero_grad()
        self.state.restore(in_place=self.run.folder.resume)
        self.run.steps.check_assigned()
        self.run.check_data_assigned()
        self.run.update.clear_also(warn_of_untrained(self.model, self.optimizer, extra_optimizers(self), self.loss))
        if not self.run.spec.graph:
            refuse_sparse_gradients(self.run.model, self.run.optimizer, self.run.update)
        loaders.warn_of_unsharded(self.train_dataloader, "Trainer.train_dataloader")
        if self.run.spec.eval_on_start and self.start_iter == 0 and self.eval_dataloader is not None:
            self.run.evaluate_now()
        if not self.is_copy and not is_overridden(self, "set_train_mode"):
            log_modes(self.model, self.run.spec)
        self.set_train_mode()
        self.run.steps.start()

    def after_train(self) -> None:
        # A failed update leaves steps that do not count.
        self.state.global_step = self.state.plan.steps(self.iterations_done)
        try:
            super().after_train()
        finally:
            self.run.steps.close()

    def _use_settings(self) -> None:
        self.run.follow_given()
        super()._use_settings()
        self.run.check_loaders_assigned()
        self.run.plan_again()

    def _apply_settings(self, names: set[str]) -> None:
        if names & {"max_grad_norm", "clip_grad_value", "lr_scheduling_steps"}:
            self.run.steps.build_update()

    def _run_own_epochs(self) -> None:
        plan = self.state.plan
        while self.iter < self.max_iter:
            first = self.iter
            epoch = plan.epoch_at(plan.steps(first))[0] + 1
            self.inner_training_loop(epoch)
            plan = self.state.plan
            if self.iter == first:  # it read the batches itself: they count as one iteration
                last = min(plan.updates(plan.end_of_epoch(epoch)), self.max_iter) - 1
                self.state.step_before, self.iter = plan.steps(first), last
                for _ in self._iterations(lambda: last + 1):  # noqa: B023  # called in this round
                    self.state.global_step = plan.steps(last + 1)

    def _bind_run_step(self) -> tuple[Any, Callable[[], None]]:
        step = self.run.steps.step
        assert step is not None, "built before the first step"
        return self, self.run_step if self.run.overrides.has("run_step") else step.run

"""The Python API: a trainer for a model, data sets and settings."""

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainwright._torch_compat.probing import real_tensors
from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.config.foreign_names import ARGUMENTS, TRAIN_ARGUMENTS
from trainwright.config.torch_names import CUSTOM, GivenName, described_loss
from trainwright.data.batch import to_batch
from trainwright.data.mixture import mixed
from trainwright.data.streaming import is_stream
from trainwright.engine.folder.formats import CSV_NAME
from trainwright.engine.hardest_samples import hardest_samples
from trainwright.engine.logs import log_to_console
from trainwright.engine.spec import spec_of_training_config
from trainwright.engine.trainer import checks, loaders, optim, parts
from trainwright.engine.trainer.base import OWN_STEP_METHODS
from trainwright.engine.trainer.evaluation import Evaluation
from trainwright.engine.trainer.processes import check_launch, join
from trainwright.engine.trainer.saving import read_csv_logs, with_documented_names
from trainwright.engine.trainer.setup import TrainerSetup
from trainwright.events.storage import EventStorage
from trainwright.hooks.callbacks import Callback, CallbackList, TrainerControl
from trainwright.hooks.method_overrides import Overrides, is_overridden, overridable
from trainwright.optim.freeze import freeze_bn
from trainwright.optim.named import NamedOptimizers
from trainwright.optim.schedules import FormulaLR

logger = logging.getLogger("trainwright.engine")

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig


@overridable
class Trainer(TrainerSetup):
    """Train ``model`` on ``train_dataset``: ``Trainer(model, config, train_dataset=data).train()``.

    Override ``train_step(model, inputs)``, ``training_step(batch)``, ``optimization_step()`` or
    ``compute_loss(model, inputs)`` to change a step, ``prepare_input_batch(batch)`` to change its batch,
    ``inner_training_loop(epoch_num)`` to write the loop over an epoch, ``evaluate_step(model, inputs)``,
    ``evaluation_step(batch)``, ``compute_metric(model, inputs)`` or ``evaluate`` to change an evaluation,
    ``create_train_dataloader(dataset)`` or ``create_eval_dataloader(dataset)`` to change the loaders.

    Args:
        model, config: in either order; ``training_config`` is another name of ``config``.
        data_collator: builds a batch from a list of samples; the data set's own ``data_collator`` by default.
        preprocessor: set on the model and data sets whose ``preprocessor`` is None; saved with the model.
        metrics_handler: computes the metrics of evaluations in place of ``config.metrics``; or a function of
            (predictions, labels) of the complete data set that returns metrics by name.
        optimizers, lr_schedulers: several optimizers, and their schedules, by name: ``{"g": ..., "d": ...}`` (see
            ``docs/several-optimizers.md``).
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
        callbacks, trainercontrol: see :class:`~trainwright.hooks.Callback`.
        metrics_handler, loss, optimizer, lr_scheduler, checkpointer: as built from the arguments.
    """

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
        self._overrides = Overrides(self)
        checks.refuse_arguments("Trainer", unknown, ARGUMENTS)
        model, config = checks.in_order(model, config, training_config)
        data = {
            "train_dataset": train_dataset, "train_dataloader": train_dataloader,
            "eval_dataset": eval_dataset, "eval_dataloader": eval_dataloader,
        }  # fmt: skip
        has = {name: value is not None for name, value in data.items()}
        trains, evaluates = (
            has["train_dataset"] or has["train_dataloader"],
            has["eval_dataset"] or has["eval_dataloader"],
        )
        checks.check_parts(model, config, trains, evaluates)
        if optimizers is not None or lr_schedulers is not None:
            optimizer = checks.several(optimizer, lr_scheduler, optimizers, lr_schedulers)
        checks.check_given(config, optimizer, lr_scheduler or lr_schedulers, loss)
        checks.check_kinds(data_collator=data_collator, metrics_handler=metrics_handler, model_card=model_card)
        train_dataset = mixed(train_dataset)
        checks.check_data(train_dataset, train_dataloader, eval_dataset, eval_dataloader)
        self.accelerator = accelerator
        config, self.device = join(config, accelerator, data)
        self._output_dir_of_user = config.output_dir
        self.config: TrainingConfig = parts.apply_dev_run(config, self)
        config = self.config
        log_to_console()
        self.output_dir = Path(os.path.abspath(config.output_dir))
        self.config = config = parts.continued(config, self.output_dir)
        check_launch(config, accelerator)
        self.model = model
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.model_card, self._collator = model_card, data_collator
        self.preprocessor = parts.give_preprocessor(preprocessor, model, train_dataset, *loaders.each(eval_dataset))
        self.train_dataloader, self.eval_dataloader = train_dataloader, eval_dataloader
        self._evaluation = Evaluation(
            self._overrides,
            device=self.device,
            settings=lambda: self.config,
            model=lambda: self.model,
            criterion=lambda: self.loss,
            handler=lambda: self.metrics_handler,
            compute_loss=lambda model, inputs: self._resolve_contract(inputs).compute_loss(model, inputs),
            prepare=lambda batch: to_batch(batch, self.device),
            preprocessor=self.preprocessor,
            collator=data_collator,
            default_collator=getattr(train_dataset, "data_collator", None),
            weights=lambda: self.run.evaluated_weights(),
            replaced_model=self._replaced_model,
            is_pipeline=lambda: self._pipeline is not None,
        )
        with real_tensors():  # in an estimate, too
            if train_dataloader is None:  # not `or`: that calls len(loader), and a loader may have none
                self.train_dataloader = self.create_train_dataloader(train_dataset)
            if config.overfit_batches is not None:
                self.eval_dataloader = loaders.overfit_loader(
                    self.train_dataloader, train_dataset, config, self._collator
                )
            elif eval_dataloader is None and eval_dataset is not None:
                is_iterated = is_stream(eval_dataset)  # not a loader, although it is only iterated
                build = self._evaluation.loader_of if is_iterated else self._evaluation.loaders_of
                self.eval_dataloader = build(eval_dataset)
        self._build_plan()
        kept = parts.elastic_accumulation(config, self.output_dir, self._plan.batch_size)
        if kept != config.gradient_accumulation_steps:
            self.config = config = config.copy_with(gradient_accumulation_steps=kept)
            self._build_plan()
        self._batches_of_run()
        self.run.spec, self.run.calls = spec_of_training_config(config), self._calls()
        self.run.step_methods = (*OWN_STEP_METHODS, "inner_training_loop", "compute_loss")

        self.run.autocast = optim.autocast_for(config, self.device)
        has_own_step = is_overridden(self, "train_step") or is_overridden(self, "training_step")
        self._prepare_model(optimizer, wraps=not (has_own_step and isinstance(optimizer, NamedOptimizers)))
        self.optimizer = optimizer or optim.build_optimizer(config, model)
        checks.check_optimizer(self.optimizer, model, lr_scheduler)
        self._is_given_schedule = lr_scheduler is not None or lr_schedulers is not None
        if isinstance(self.optimizer, NamedOptimizers):
            self.lr_scheduler, self.lr_schedulers = None, dict(lr_schedulers or {})
            for name, one in self.optimizer.optimizers.items() if lr_schedulers is None else ():
                schedule = self._build_lr_scheduler(one, self.max_iter)
                self.lr_schedulers |= {name: schedule} if schedule is not None else {}
        else:
            self.lr_scheduler = lr_scheduler or self._build_lr_scheduler(self.optimizer, self.max_iter)
        for given in [lr_scheduler] if lr_scheduler is not None else (lr_schedulers or {}).values():
            if not isinstance(given, FormulaLR | ReduceLROnPlateau):
                often = f"every {config.lr_scheduling_steps} steps" if config.lr_scheduling_steps else "once an epoch"
                logger.info(
                    "The passed %s is stepped %s; lr_scheduling_steps changes that.", type(given).__name__, often
                )
        self.run.grad_scaler = accelerator.scaler if accelerator else optim.grad_scaler_for(config, self.device)
        if loss is None:
            self.loss = optim.build_criterion(config, self.device)
        else:
            self._use_loss(loss)
        self.callbacks, self.trainercontrol = CallbackList(callbacks), TrainerControl()
        self._built_in_callbacks: list[Callback] = []
        if metrics_handler is not None:
            self.metrics_handler = parts.as_handler(metrics_handler, self.device)
            if getattr(self.metrics_handler, "trainer", self) is None:
                self.metrics_handler.trainer = weakref.proxy(self)
        elif config.is_set("metrics") or config.task is not None:  # so that errors in them are raised now
            self.metrics_handler = parts.build_metrics_handler(config, self)
        self.storage = EventStorage()
        self._build_state()
        self._build_loss()
        self._build_update()

        self.run.folder.recover()
        self.run.watching_hardest = hardest_samples(self.run, "TrainingConfig.hardest_samples")
        source = parts.resume(config, self.checkpointer)
        if source is not None:
            self._saving.continue_from(source)
        if not config.overwrite_output_dir and not self.run.folder.resume and self.run.folder.holds_a_run():
            raise ConfigError(
                f"TrainingConfig.output_dir: {config.output_dir} holds a run, and overwrite_output_dir is False. Set"
                " another folder, or resume_from_checkpoint=True to continue that run."
            )
        if config.load_best_model_at_end and not (self._evaluates and config.save_enabled):
            raise ConfigError(
                "TrainingConfig.load_best_model_at_end: got True, but nothing is evaluated or saved; it needs an"
                " eval_dataset, an eval_strategy other than 'no', and save_enabled=True."
            )
        self._register_hooks()

    @property
    def configs(self) -> "TrainingConfig":
        """Another name of ``config``."""
        return self.config

    @property
    def data_collator(self) -> "Callable[[list[Any]], Any] | None":
        """Builds a batch from a list of samples: the passed collator, or the data set's own."""
        return self._collator or getattr(self.train_dataset, "data_collator", None)

    @property
    def checkpoints_dir(self) -> Path:
        """The folder of checkpoints."""
        return self.output_dir / self.config.checkpoints_dir

    @property
    def logs_dir(self) -> Path:
        """The folder of ``metrics.csv``."""
        return self.output_dir / self.config.logs_dir

    @property
    def epoch(self) -> int:
        """The epoch of the latest step, counted from 1."""
        return self.state.epoch

    @property
    def consumed_samples(self) -> int:
        """Training samples used so far; 0 if a user's loader does not report its size."""
        return self._plan.samples(self.state.global_step)

    def add_callback(self, callback: Callback, singleton: bool = True) -> None:
        """Register ``callback``. ``singleton``: replaces registered callbacks of its class."""
        self.callbacks.add_callback(callback, singleton)
        if self._step is not None:
            self._step.after_batch = self._after_batch()

    def set_optimizer(self, optimizer: Optimizer, optimizer_name: str | None = None) -> None:
        """Train with ``optimizer`` from now on; the configured schedule is rebuilt for it."""
        checks.check_optimizer(optimizer, self.model)
        self.config = self.config.copy_with(optimizer=GivenName(optimizer_name or CUSTOM))  # a copy
        if isinstance(self.optimizer, NamedOptimizers):
            raise ConfigError("Trainer.set_optimizer: this run has several optimizers; pass others as optimizers=.")
        self.optimizer = optimizer
        left = self._plan.num_updates - self.state.updates_done
        self.lr_scheduler, self._is_given_schedule = self._build_lr_scheduler(optimizer, max(1, left)), False
        self.lr_schedulers = {}
        self.run.set_checkpoint_parts()
        self._build_update()
        self.run.own_step.watch_optimizers()

    def set_loss(self, loss: Callable[..., Any], loss_name: str | None = None) -> None:
        """Use ``loss(outputs, target)`` from now on."""
        self._use_loss(loss, loss_name)
        self._build_loss()

    def _use_loss(self, loss: Callable[..., Any], loss_name: str | None = None) -> None:
        """Use a loss object; the configuration gets its name, and the arguments of a loss of ``torch.nn``."""
        if not callable(loss) or isinstance(loss, type):
            raise ConfigTypeError(
                f"Trainer.loss: got {loss!r}; it must be a module or a function of (outputs, target)."
            )
        written = described_loss(loss) if loss_name is None else None
        self.config = self.config.copy_with(loss=written or GivenName(loss_name or CUSTOM))
        self.loss = loss.to(self.device) if isinstance(loss, nn.Module) else loss

    def set_train_mode(self, model: nn.Module | None = None) -> None:
        """Training mode, with batch normalization in evaluation mode if ``config.freeze_bn``."""
        (model or self.model).train()
        if self.config.freeze_bn:
            freeze_bn(model or self.model)

    def create_train_dataloader(self, dataset: Any) -> Any:
        """The loader of training data: it yields the rest of this epoch, and iterated again the next epoch."""
        state = getattr(self, "state", None)
        return loaders.train_loader(dataset, self.config, self._collator, 0 if state is None else state.global_step)

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
        return self._evaluation.evaluate(dataset, logs, self.eval_dataloader)

    def create_eval_dataloader(self, dataset: Any) -> Any:
        """The loader over evaluation data: every sample once, in order."""
        return self._evaluation.create_loader(dataset)

    def evaluate_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        """Evaluate one batch: returns ``eval_step_loss``, and updates the metrics with :meth:`evaluation_step`."""
        return self._evaluation.evaluate_step(model, inputs)

    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        """The model's outputs for one batch as a dict: its own entries or ``logits``, and ``loss`` if there is one.

        With ``evaluate_with_generate`` the ``logits`` of a generative model are the result of its ``generate``.
        """
        return self._evaluation.evaluation_step(batch)

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
        return self._evaluation.predict(data, iterate=iterate)

    def predict_step(self, batch: Any) -> Any:
        """The outputs of :meth:`predict` for one batch: those of the model, or of its ``generate``, as in evaluations.

        The model gets the fields that it takes, or the first item of a pair.
        """
        return self._evaluation.predict_step(batch)

    @property
    def metric(self) -> Any:
        """The first metric of ``metrics_handler``; None if there is none."""
        return getattr(self.metrics_handler, "first", None)

    def save(self, path: str | Path, overwrite: bool = True) -> None:
        """Save the complete training state to the checkpoint folder ``path``, with its model card ``README.md``.

        Every process must call it; the main process writes.

        Raises:
            FileExistsError: ``path`` exists, and ``overwrite`` is False.
        """
        self._saving.save(path, overwrite=overwrite)

    def load(self, path: str | Path) -> None:
        """Restore the complete training state from a checkpoint. ``train`` continues from there."""
        self._saving.load(path)

    def push_to_hub(self, repo_id: str, *, commit_message: str | None = None, private: bool = False) -> str:
        """Upload the model, its config, preprocessor, card and training state; return the URL of the repository.

        The card shows ``curves.png``, if the run has one.

        Raises:
            MissingFileError: the hub cannot be reached, or rejects the upload.
        """
        return self._saving.push_to_hub(repo_id, commit_message=commit_message, private=private)

    def load_csv_logs(self, logs_dir: str | Path | None = None) -> dict[str, list[float | None]]:
        """The columns of ``metrics.csv`` by name, with None for empty cells.

        With a ``TrainerConfig`` also ``step`` (steps done), ``train.loss`` and ``evaluation.<metric>``.

        Raises:
            MissingFileError: the file does not exist.
        """
        from trainwright.config.settings import TrainerConfig

        columns = read_csv_logs(Path(self.logs_dir if logs_dir is None else logs_dir) / CSV_NAME)
        return with_documented_names(columns, self._plan) if isinstance(self.config, TrainerConfig) else columns

    # The path of a batch: train -> Step.run (engine/step.py, built in build_step.py before the first step) ->
    # train_step -> training_step -> compute_loss, or the function that fits the batch (engine/loss_fn.py) -> model.

    def train(  # type: ignore[override]
        self, resume_checkpoint_path: str | Path | None = None, **unknown: Never
    ) -> dict[str, Any]:
        """Train to the end, from the current state or a checkpoint; returns the results of the last evaluation."""
        checks.refuse_arguments("train", unknown, TRAIN_ARGUMENTS)
        if resume_checkpoint_path is not None:
            self.load(resume_checkpoint_path)
            self._saving.continue_from(resume_checkpoint_path)
        self._update_plan()
        is_done = self.start_iter >= self.max_iter
        with self._training() as run_step:
            if is_overridden(self, "inner_training_loop"):
                self._run_own_epochs()
            for _ in self._iterations():
                run_step()
        if is_done and not self.last_eval_results:  # no hook has evaluated
            self.last_eval_results = self.run.folder.last_results("evaluation/")
            if self.config.load_best_model_at_end:
                self._saving.load_best()
        return self.last_eval_results

    def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
        """Train to the end of epoch ``epoch_num`` (counted from 1); returns ``loss``, its mean since the run started.

        ``train`` runs through all epochs at once and calls this method only if it is overridden. Batches that an
        override reads itself count as one iteration for hooks, evaluations and checkpoints.
        """
        until = self._plan.updates(self._plan.steps_per_epoch * epoch_num)
        if not self._is_training:
            whole = self.max_iter
            try:
                with self._training(max_iter=min(until, whole)):
                    return self.inner_training_loop(epoch_num)
            finally:
                self.max_iter = whole
        for _ in self._iterations(until):
            self.run_step()
        return {"loss": self.state.mean_loss()}

    def run_step(self) -> None:
        """One update: ``train_step`` for each micro-batch. ``train`` does not call it unless it is overridden."""
        assert self._step is not None, "built before the first step"
        self._step.run()

    def prepare_input_batch(self, batch: Any) -> Any:
        """Prepare a batch of the loader for a step: by default, move its tensors to the device."""
        return to_batch(batch, self.device)

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        """One micro-batch: forward and backward, and at the end of an accumulation window the update.

        Returns ``step_loss``, a detached tensor that has not been synchronized. Callbacks and printed lines receive any
        further entries of an override (``epoch_loss``, ``epoch_metric`` …).
        """
        loss = self.training_step(inputs)
        if self._update.is_window_end:
            self.optimization_step()
        return {"step_loss": loss["loss"] if isinstance(loss, Mapping) else loss}

    def training_step(self, batch: Any) -> Any:
        """Forward and backward of one micro-batch; returns its detached loss. Does not change weights."""
        loss = (self._compute_loss or self.compute_loss)(self._step_model, batch)
        start = time.perf_counter()
        self._update.backward(loss, batch)
        seconds, phases = time.perf_counter() - start, self.phases
        phases.backward += seconds
        phases.forward -= seconds  # the step adds all of train_step
        return loss.detach()

    def optimization_step(self) -> None:
        """Clip the gradients, step the optimizer, set the gradients to None: at the end of each accumulation window."""
        start = time.perf_counter()
        self._update.finish()
        seconds, phases = time.perf_counter() - start, self.phases
        phases.optimizer += seconds
        phases.forward -= seconds

    # Called by a user's own step.

    def autocast(self) -> AbstractContextManager[Any]:
        """The run's precision, for computations of a step outside the model's ``forward``."""
        if self.accelerator is None:
            return super().autocast()
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        """The mean loss of a batch, by the contract of model and batch (see ``docs/trainer.md``)."""
        return self._resolve_contract(inputs).compute_loss(model, inputs)

    def compute_metric(self, model: Any, inputs: Any) -> float:
        """The first metric over the batches passed so far and this one: a forward pass in evaluation mode.

        Training calls this method only if it is overridden; otherwise it reuses the outputs of the step.
        """
        return self._evaluation.compute_metric(model, inputs)

    def update_metrics(self, model: Any, inputs: Any, step_loss: Any, training: bool = True) -> tuple[float, float]:
        """For a user's ``train_step``: count a batch, and return the epoch's mean loss and metric."""
        if training and self._train_metrics is not None:
            self._train_metrics.add_now(inputs)
            return self._run_callbacks.epoch_loss_with(float(step_loss)), self._train_metrics.first()
        return float(step_loss), self.compute_metric(model, inputs)

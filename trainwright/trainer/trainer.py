"""The Python API: a trainer for a model, data sets and settings."""

import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright._torch_compat.probing import real_tensors
from trainwright.base.batch import to_batch
from trainwright.base.dist import get_averaging_rank, get_world_size, is_main_process
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.config.foreign_names import TRAIN_ARGUMENTS
from trainwright.config.secrets import safe_trackers, without_secrets
from trainwright.config.torch_names import CUSTOM, GivenName, described_loss
from trainwright.data.batch_loader import BatchLoader
from trainwright.data.batches import Batches
from trainwright.data.sampler import EpochSampler
from trainwright.data.seeding import seed_everything
from trainwright.data.streaming import is_stream
from trainwright.data.wrapped import own_collator
from trainwright.engine import loaders
from trainwright.engine.best_metric import BestMetric, raise_missing
from trainwright.engine.extra_parameters import log_modes, refuse_sparse_gradients, warn_of_untrained
from trainwright.engine.folder.run_folder import TrainerFolder
from trainwright.engine.late_changes import late_changes
from trainwright.engine.loss_fn import forward
from trainwright.engine.own_step import OwnStep
from trainwright.engine.resumed_settings import plain
from trainwright.engine.run import TrainerRun
from trainwright.engine.run_hooks import run_hooks, timing_facts
from trainwright.engine.run_methods import RunMethods, part_of_run
from trainwright.engine.spec import RunSpec, spec_of_training_config
from trainwright.engine.state import StepPlan, TrainerState
from trainwright.events.formats import CSV_NAME
from trainwright.events.storage import EventStorage
from trainwright.events.writers import default_writers
from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.progress import bar_stream
from trainwright.hooks import (
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    HookBase,
    IterationTimer,
    PeriodicCheckpointer,
    PeriodicWriter,
    ReduceOnPlateau,
)
from trainwright.hooks.callbacks import Callback, CallbackList, PrintCallback, RunCallbacks
from trainwright.hooks.callbacks.progress import EpochProgress, epoch_lines
from trainwright.hooks.method_overrides import check_arguments, is_overridden, overridable
from trainwright.hooks.profile import profile_hook
from trainwright.models.eval_mode import set_training_mode
from trainwright.optim.named import NamedOptimizers
from trainwright.optim.weight_average import exchanging_optimizers
from trainwright.trainer import checks, optim, parts, start
from trainwright.trainer.checks import Given
from trainwright.trainer.evaluation import Evaluation
from trainwright.trainer.model_card import RunCard
from trainwright.trainer.optim import Schedules
from trainwright.trainer.parts import SETTING_NAMES, next_commands
from trainwright.trainer.processes import Placement, check_pipeline, warn_unsharded_loader
from trainwright.trainer.saving import Saving, read_csv_logs
from trainwright.trainer.train_metrics import TrainMetrics, after_batch_calls, measures_training
from trainwright.trainer.training_step import OWN_STEP_METHODS, STEP_METHODS, BatchLoss, TrainingStep

logger = logging.getLogger("trainwright.engine")

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig


class PythonRun(TrainerRun):
    """A run of the Python API.

    Attributes:
        evaluation, saving, scheduling: its evaluations, checkpoints and learning-rate schedules.
    """

    evaluation: Evaluation
    saving: Saving
    scheduling: Schedules

    @property
    def spec(self) -> RunSpec:
        """The settings of the current configuration, which the user may change between two trainings."""
        if self._spec is None or self._spec.as_set is not self.config.as_set:
            self._spec = spec_of_training_config(self.config)
        return self._spec

    def prepare(self, batch: Any) -> Any:
        return self.evaluation.prepare(batch)

    def prepare_eval(self, batch: Any) -> Any:
        return self.evaluation.prepare(batch)

    def forward(self, batch: Any) -> Any:
        return forward(self.model, batch)

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.evaluation.compute_loss(self.model, batch)
        return loss

    def evaluate(self) -> dict[str, Any]:
        results: dict[str, Any] = self.trainer.evaluate()
        return results

    def eval_loaders(self) -> list[Any]:
        return [loader for loader in loaders.each(self.trainer.eval_dataloader) if loader is not None]

    def examples(self) -> Iterable[Any]:
        trainer = self.trainer
        data = next(iter(loaders.each(trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset)))
        return loaders.batches_of_rank(self.evaluation.loader_of(data) if loaders.is_dataset(data) else data)

    def position_of(self, update: int) -> tuple[int, int] | None:
        sampler, plan = getattr(self.batches.loader, "batch_sampler", None), self.state.plan
        if self.overrides.has("run_step", "inner_training_loop") or not isinstance(sampler, EpochSampler):
            return None
        done = plan.steps(update - 1)
        return done, plan.steps(update) - done

    def save(self) -> None:
        self.saving.save_step()

    def use_callbacks(self) -> None:
        self.trainer._steps.renew_after_batch()

    def more_callbacks(self) -> list[Callback]:
        is_printed = self.spec.print_steps is not None
        return [PrintCallback(self.spec.num_epochs, step_frequency=self.trainer._periods.print)] if is_printed else []

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        return self.spec.eval_strategy != "no" and self.trainer.eval_dataloader is not None

    @property
    def best_metric(self) -> BestMetric:  # type: ignore[override]
        trainer = self.trainer
        return BestMetric(
            self.spec,
            lambda: trainer.metrics_handler,
            trainer.eval_dataloader if isinstance(trainer.eval_dataloader, Mapping) else (),
            evaluates=self.evaluates,
            has_own_results=partial(self.overrides.has, "evaluate", "evaluate_step", "compute_metric"),
        )

    def own_facts(self) -> dict[str, Any]:
        config, spec, trainer = self.config, self.spec, self.trainer
        tests = [len(one) for one in loaders.each(trainer.eval_dataset) if isinstance(one, Sized)]
        return {
            "task": spec.task,
            "num_train": len(trainer.train_dataset) if isinstance(trainer.train_dataset, Sized) else None,
            "num_eval": sum(tests),
            "num_left_out": loaders.num_left_out(self.batches.loader),
            "iterations_per_epoch": self.state.plan.updates_per_epoch,
            "metrics": ", ".join(map(str, getattr(trainer.metrics_handler, "metrics", None) or ())),
            "settings": "" if config.is_by_its_page else config.summary(),
        }

    def own_record(self) -> dict[str, Any]:
        trainer, plan = self.trainer, self.state.plan
        train = trainer.train_dataset
        tests = trainer.eval_dataset if isinstance(trainer.eval_dataset, Mapping) else {"eval": trainer.eval_dataset}
        named = {name if name == "eval" else f"eval {name}": one for name, one in tests.items()}
        return {
            "samples_per_iteration": plan.samples(plan.steps(1)),
            "iterations_per_epoch": float(plan.updates_per_epoch),
            "data": {"train": getattr(self.batches.loader, "dataset", None) if train is None else train} | named,
        }

    def next_commands(self) -> list[str]:
        return next_commands(self.spec, self.trainer.total_steps, self.trainer.callbacks)

    def schedule_length(self, schedule: Any) -> int:
        return self.scheduling.length(schedule)

    def use_learning_rate(self, rate: float) -> None:
        self.config.update({"learning_rate": rate})
        self._has_read("learning_rate")

    def settings_now(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.trainer.config.as_set
        return settings

    def late_changes(self) -> set[str]:
        rows = self.config.rows
        return late_changes(
            self.settings_read,
            self.settings_now(),
            lambda name: rows[name].changed,
            kind="Trainer",
            where="TrainingConfig.",
        )

    def change_config(self, **settings: Any) -> None:
        """Write settings that the trainer itself has changed, into a copy of the user's configuration."""
        self.config = self.config.copy_with(**settings)
        self._has_read(*settings)

    def _has_read(self, *names: str) -> None:
        if self.settings_read is not None:
            self.settings_read = {**self.settings_read, **{name: self.settings_now()[name] for name in names}}

    def own_settings(self) -> dict[str, Any]:
        settings, _ = without_secrets(self.config.to_dict())
        return {name: plain(value) for name, value in settings.items()}

    def source_of(self, name: str) -> str:
        row = self.config.rows.get(name)
        return "" if row is None else row.source

    def default_of(self, name: str) -> Any:
        return plain(type(self.config).model_fields[name].default)

    def keep_settings(self, settings: Mapping[str, Any]) -> None:
        now = self.config.to_dict()
        self.change_config(**{name: value for name, value in settings.items() if CUSTOM not in (value, now[name])})

    def settings_of_copy(self, folder: Path, changes: dict[str, Any], **kind: bool) -> "TrainingConfig":
        return parts.settings_of_copy(self.config, folder, changes, **kind)

    def change_copy(self, new: "Trainer", memo: dict[int, Any]) -> None:
        if isinstance(self.spec.optimizer, GivenName) and id(self.optimizer) not in memo:
            new.set_optimizer(copy.deepcopy(self.optimizer, memo))
        if self.criterion is not None and id(self.criterion) not in memo:
            new.set_loss(copy.deepcopy(self.criterion, memo))


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
            (predictions, labels) of the complete data set that returns metrics by name.
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
        self._given_output_dir = given.config.output_dir
        self.config, self.device = start.start(given, self)
        self.output_dir = Path(os.path.abspath(self.run.spec.output_dir))
        self.model, self.accelerator, self.model_card = given.model, given.accelerator, given.model_card
        self.train_dataset, self.eval_dataset = given.train_dataset, given.eval_dataset
        self.callbacks = CallbackList(given.callbacks)
        self.storage = EventStorage()

        self._build_data(given)
        self._build_metrics(given)
        self._build_weights(given)
        self._build_saving()
        self._build_callbacks()
        self._build_step()
        run = self.run
        run.folder.recover()
        if (source := start.resume(self.run.spec, self.checkpointer)) is not None:
            self.run.saving.continue_from(source)
        run.fill_weights()
        start.check_folder(self.run.spec, run.folder, evaluates=self.run.evaluates)
        self._register_hooks()
        run.settings_read = run.settings_now()

    # The parts of a run, in the order in which they need each other.

    def _build_data(self, given: Given) -> None:
        """The evaluation, the loaders, the plan of the steps, and the position in it."""
        datasets = given.train_dataset, *loaders.each(given.eval_dataset)
        checks.check_labels(given.model, datasets)
        self.preprocessor = parts.give_preprocessor(given.preprocessor, given.model, *datasets)
        self._collator, self._creates_loader = given.data_collator, given.train_dataloader is None
        self.run.evaluation = Evaluation(
            self.run,
            handler=lambda: self.metrics_handler,
            compute_loss=lambda model, inputs: self._steps.loss.compute_loss(model, inputs),
            preprocessor=self.preprocessor,
            collator=given.data_collator,
            default_collator=self.data_collator,
            replaced_model=self._replaced_model,
        )
        run, spec = self.run, self.run.spec
        self.state = TrainerState(self, is_elastic=spec.elastic)
        train, tests = given.train_dataloader, given.eval_dataloader
        with real_tensors():  # in an estimate, too
            if train is None:  # not `or`: that calls len(loader), and a loader may have none
                train = self.create_train_dataloader(given.train_dataset)
            if spec.overfit_batches is not None:
                tests = loaders.overfit_loader(train, given.train_dataset, spec, given.data_collator)
            elif tests is None and given.eval_dataset is not None:
                is_iterated = is_stream(given.eval_dataset)  # not a loader, although it is only iterated
                create = self.run.evaluation.loader_of if is_iterated else self.run.evaluation.loaders_of
                tests = create(given.eval_dataset)
        self.train_dataloader, plan = start.plan_of(spec, train)
        self.eval_dataloader = tests
        kept = start.elastic_accumulation(spec, self.output_dir, plan.batch_size)
        if kept != spec.gradient_accumulation_steps:
            run.change_config(gradient_accumulation_steps=kept)
            self.train_dataloader, plan = start.plan_of(self.run.spec, train)
        self.state.plan, self.max_iter = plan, plan.num_updates
        self._batches_of_run()

    def _build_metrics(self, given: Given) -> None:
        self._periods = start.Periods(self.run.spec, self.state)
        handler = parts.given_handler(given, self.run.spec, self)
        if handler is not None:
            self.metrics_handler = handler
        self._train_metrics = None
        if measures_training(self.run.spec) and (handler is None or hasattr(handler, "train_copy")):
            self._train_metrics = TrainMetrics(
                lambda: self.metrics_handler.train_copy(),  # with the first batch
                self._periods.metrics_are_due,
                self.state.is_epoch_end,
                self.run.evaluation.comparisons.labelled,
                self.run.evaluation.find_comparison_in_training,
                lambda: self._steps.is_padding_batch(),
            )

    def _build_weights(self, given: Given) -> None:
        """What changes the weights: the model as a step calls it, optimizers, schedules, and the criterion."""
        run, spec = self.run, self.run.spec
        run.step_methods = (*OWN_STEP_METHODS, "inner_training_loop", "compute_loss")
        run.autocast, run.grad_scaler = optim.precision_of(spec, self.device)
        if self.accelerator:
            run.grad_scaler = self.accelerator.scaler
        overrides, model = run.overrides, self.model
        is_toggled = isinstance(given.optimizer, NamedOptimizers) and overrides.has("train_step", "training_step")
        uses_scores = overrides.has(*STEP_METHODS, "compute_metric", "update_metrics") or measures_training(spec)
        self._placement = Placement(
            run,
            accelerator=self.accelerator,
            optimizer=given.optimizer,
            splits_scores=hasattr(model, "compute_loss") and not uses_scores,
            wraps=not is_toggled,
        )
        if self._placement.pipeline is not None:
            check_pipeline(self._placement.pipeline, spec, model, self.train_dataloader, overrides)
        self.optimizer = given.optimizer or optim.build_optimizer(spec, self.model)
        run.scheduling = Schedules(run, given.schedules, lambda: self.run.best_metric.mode())
        self.lr_scheduler, self.lr_schedulers = self.run.scheduling.of(self.optimizer)
        if given.loss is None:
            self.loss = optim.build_criterion(spec, self.device)
        else:
            self._use_loss(given.loss)

    def _build_saving(self) -> None:
        run = self.run
        run.folder = TrainerFolder(self.output_dir, self.run.spec)
        run.build_checkpointer(
            self.checkpoints_dir,
            files=lambda: {"README.md": self._card.text().encode()},
            preprocessor=self.preprocessor,
        )
        self._card = RunCard(run, self.model_card, lambda: self._run_callbacks.current_results())
        run.saving = Saving(run, self._periods, self._card)

    def _build_callbacks(self) -> None:
        state = self.state
        self._run_callbacks = RunCallbacks(
            self.callbacks,
            self.trainercontrol,
            epoch_at=state.epoch_at,
            save=self.run.saving.save_step,
            evaluate=self._evaluate_now if self.eval_dataloader is not None else None,
            log=lambda: self._write_hook.write() if is_main_process() else None,
            is_due=self._periods.check_is_due,
            late=self.run.saving.late,
            eval_is_due=self._periods.eval_is_due,
            steps_done=lambda: state.global_step,
        )
        if self._train_metrics is not None:
            self._run_callbacks.logs.defer("epoch_metric", self._train_metrics.first)

    def _build_step(self) -> None:
        me: Trainer = weakref.proxy(self)
        self._steps = TrainingStep(
            self.run,
            self._placement,
            callbacks=self._run_callbacks,
            metrics=self._train_metrics,
            use_plan=lambda plan: me._use_plan(plan),
            accelerator=self.accelerator,
            after_batch=lambda: me._after_batch(),
        )
        self.run.own_step = OwnStep(self.run, OWN_STEP_METHODS)

    def _register_hooks(self) -> None:
        run, spec, state, periods = self.run, self.run.spec, self.state, self._periods
        run.watch_hardest()
        hooks = run_hooks(
            run,
            self.build_hooks(),
            own_step=run.own_step,
            check_period=periods.check_is_due if get_world_size() > 1 else periods.log_is_due,
            save=self.run.saving.save_step if spec.save_enabled else lambda: None,
            steps_done=lambda: state.global_step,
            has_passed=lambda start, every: state.global_step > start and state.has_passed(every),
            total_steps=self.total_steps,
            steps_per_epoch=self.num_batches,
        )
        self.register_hooks(hooks)
        run.own_hooks = tuple(run.hooks)

    def build_hooks(self) -> list[HookBase | None]:
        """The hooks, in the order of their calls."""
        spec, state, periods, evaluates = self.run.spec, self.state, self._periods, self.run.evaluates
        best = self._best_checkpointer()
        evaluation = self._run_callbacks.evaluating(self._evaluate_in_training)
        self._evaluate_hook = EvalHook(periods.eval_is_due, evaluation, prefix="eval_")
        # With the settings of each training.
        self._write_hook = PeriodicWriter(
            lambda: self.build_writers(), periods.log_is_due, epoch_of=lambda update: state.plan.epoch_of(update)
        )
        save = PeriodicCheckpointer(
            self.checkpointer,
            periods.save_is_due,
            save=self.run.saving.save_step,
        )
        hooks = [
            IterationTimer(facts=lambda trainer: timing_facts(trainer.run, SETTING_NAMES)),
            *self.run.scheduling.hooks(self.optimizer, self.lr_schedulers),
            self._train_metrics,
            save if spec.save_enabled else None,
            self._evaluate_hook if evaluates else None,  # the final evaluation may take long: after the save
            self._plateau_hook(),
            best,
            self._run_callbacks,
            profile_hook(spec.profile, self.output_dir),
            *self._progress_lines(best),
            self._write_hook if is_main_process() else None,
            CallbackHook(after_end=lambda _: self._finish()),
        ]
        return [hook for hook in hooks if hook is not None]

    def _best_checkpointer(self) -> BestCheckpointer | None:
        spec, best = self.run.spec, self.run.best_metric
        if not (self.run.evaluates and spec.save_enabled):
            if spec.save_top_k is not None:
                logger.warning(
                    "TrainingConfig.save_top_k=%d has no effect: nothing is %s.",
                    spec.save_top_k, "evaluated" if spec.save_enabled else "saved",
                )  # fmt: skip
            return None
        best.check()
        metric = best.key

        def on_missing() -> None:
            raise_missing(spec, metric, self.last_eval_results)

        return BestCheckpointer(
            self._periods.eval_is_due,
            self.checkpointer,
            metric,
            best.mode(),
            on_missing=on_missing if spec.load_best_model_at_end else None,
            top_k=spec.save_top_k or 1,
            number=self.run.saving.step_name,
        )

    def _plateau_hook(self) -> ReduceOnPlateau:
        """Step by an evaluation result after each evaluation, or by a training metric at the end of each epoch."""
        metric = self.run.best_metric.key
        latest = lambda: self.storage.latest().get(metric, (None, 0))[0]  # noqa: E731
        if metric.startswith("eval_"):
            return ReduceOnPlateau(latest)
        mean_loss = self._run_callbacks.epoch_loss_of_all
        return ReduceOnPlateau(mean_loss if metric == "total_loss" else latest, self.state.is_epoch_end)

    def _progress_lines(self, best: BestCheckpointer | None) -> list[HookBase | None]:
        """A line per epoch; without a bar and lines by steps also one every half minute."""
        spec, state, plan, periods = self.run.spec, self.state, self.state.plan, self._periods
        if not spec.progress_bar or spec.print_steps is not None or not is_main_process():
            return []
        period = plan.updates(periods.evaluate or plan.steps_per_epoch) if self.run.evaluates else None
        log_period = plan.updates(periods.log)
        lines = epoch_lines(plan.updates_per_epoch, plan.num_updates, log_period, eval_period=period, best=best)
        if spec.log_steps or bar_stream() is not None:
            return [lines]
        position = lambda: (state.epoch, state.epoch_step, state.plan.steps_per_epoch)  # noqa: E731
        return [EpochProgress(spec.num_epochs, position, steps_per_update=plan.accumulation), lines]

    def build_writers(self) -> list[EventWriter]:
        """The writers of metrics: the console, ``metrics.json``, ``metrics.csv``, TensorBoard."""
        handler, plan = vars(self).get("metrics_handler"), self.state.plan  # None: the default one, built on first use
        from trainwright.config.settings import TrainerConfig

        first = "accuracy" if handler is None else getattr(getattr(handler, "first", None), "key", None)
        spec, logs, (settings, _) = self.run.spec, self.logs_dir, without_secrets(self.config.to_dict())
        aliases = {"eval_loss": "eval_epoch_loss", f"eval_{first}": "eval_epoch_metric"}
        tensorboard = spec.tensorboard
        me: Trainer = weakref.proxy(self)
        return default_writers(
            self.output_dir,
            lambda: me.state.plan.num_updates,  # which changes with the lengths of the epochs
            batch_size=plan.samples(plan.steps(1)),
            progress_bar=spec.progress_bar and spec.print_steps is None,
            iterations_per_epoch=plan.updates_per_epoch,
            console=spec.print_steps is None,
            table=logs / CSV_NAME,
            tensorboard=None if tensorboard is None else tensorboard["log_dir"] or logs / tensorboard["comment"],
            tensorboard_aliases={"total_loss": "train.loss"} if isinstance(self.config, TrainerConfig) else aliases,
            trackers=safe_trackers(spec.trackers),
            settings=settings,
        )

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
        return self._collator or own_collator(self.train_dataset)

    @property
    def checkpoints_dir(self) -> Path:
        """The folder of checkpoints."""
        return self.output_dir / self.run.spec.checkpoints_dir

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
        self._steps.build_update()
        self.run.own_step.watch_optimizers()

    def set_loss(self, loss: Callable[..., Any], loss_name: str | None = None) -> None:
        """Use ``loss(outputs, target)`` from now on."""
        self._use_loss(loss, loss_name)
        self._steps.build_loss()

    def _use_loss(self, loss: Callable[..., Any], loss_name: str | None = None) -> None:
        """Use a loss object; the configuration gets its name, and the arguments of a loss of ``torch.nn``."""
        if not callable(loss) or isinstance(loss, type):
            raise ConfigTypeError(
                f"Trainer.loss: got {loss!r}; it must be a module or a function of (outputs, target)."
            )
        written = described_loss(loss) if loss_name is None else None
        self.run.change_config(loss=written or GivenName(loss_name or CUSTOM))
        self.loss = loss.to(self.device) if isinstance(loss, nn.Module) else loss

    def set_train_mode(self, model: nn.Module | None = None) -> None:
        """Training mode, except for frozen parts in evaluation mode; with ``config.freeze_bn`` for batch norms too."""
        set_training_mode(model or self.model)
        self.run.hold_batch_norms(model or self.model)

    def create_train_dataloader(self, dataset: Any) -> Any:
        """The loader of training data: it yields the rest of this epoch, and iterated again the next epoch.

        An override is called when the trainer is built, for the length of the training, and for each further epoch,
        also the one that a resumed run is in. ``self.state.epoch`` is then that epoch.
        """
        return loaders.train_loader(dataset, self.run.spec, self._collator, self.state.global_step)

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

    def train(  # type: ignore[override]
        self, resume_checkpoint_path: str | Path | None = None, **unknown: Never
    ) -> dict[str, Any]:
        """Train to the end, from the current state or a checkpoint; returns the results of the last evaluation.

        With ``load_best_model_at_end`` those of the best weights, which the model has then.
        """
        checks.refuse_arguments("train", unknown, TRAIN_ARGUMENTS)
        if isinstance(resume_checkpoint_path, bool):
            raise ConfigTypeError(
                f"Trainer.train: got resume_checkpoint_path={resume_checkpoint_path}, which is no path. For"
                " the latest checkpoint set TrainingConfig(resume_from_checkpoint=True)."
            )
        self._use_settings()
        if resume_checkpoint_path is not None:
            self.load(resume_checkpoint_path)
            self.run.saving.continue_from(resume_checkpoint_path)
        self._plan_again()
        is_done = self.start_iter >= self.max_iter
        with self._training() as run_step:
            if is_overridden(self, "inner_training_loop"):
                self._run_own_epochs()
            for _ in self._iterations():
                run_step()
        if is_done and not self.last_eval_results:  # no hook has evaluated
            self.last_eval_results = self.run.folder.last_results()
            if self.run.spec.load_best_model_at_end:
                self.last_eval_results = self.run.saving.load_best() or self.last_eval_results
        return self.last_eval_results

    def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
        """Train to the end of epoch ``epoch_num`` (counted from 1); returns ``loss``, its mean since the run started.

        ``train`` runs through all epochs at once and calls this method only if it is overridden. Batches that an
        override reads itself count as one iteration for hooks, evaluations and checkpoints.
        """

        def until() -> int:  # the epoch may get another length when it is opened
            return self.state.plan.updates(self.state.plan.end_of_epoch(epoch_num))

        if not self.is_training:
            whole = self.max_iter
            try:
                with self._training(max_iter=min(until(), whole)):
                    logs = self.inner_training_loop(epoch_num)
                    self.max_iter = self.iter
                    return logs
            finally:
                self.max_iter = self.state.plan.num_updates
        for _ in self._iterations(until):
            self.run_step()
        return {"loss": self.state.mean_loss()}

    def run_step(self) -> None:
        """One update: ``train_step`` for each micro-batch. ``train`` does not call it unless it is overridden."""
        assert self._steps.step is not None, "built before the first step"
        self._steps.step.run()

    def prepare_input_batch(self, batch: Any) -> Any:
        """Prepare a batch of the loader for a step: by default, move its tensors to the device."""
        return to_batch(batch, self.device)

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        """One micro-batch: forward and backward, and at the end of an accumulation window the update.

        Returns ``step_loss``, a detached tensor that has not been synchronized. Callbacks and printed lines receive any
        further entries of an override (``epoch_loss``, ``epoch_metric`` …).
        """
        return self._steps.train_step(model, inputs)

    def training_step(self, batch: Any) -> Any:
        """Forward and backward of one micro-batch; returns its detached loss. Does not change weights."""
        return self._steps.training_step(batch)

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
        return self._steps.loss.compute_loss(model, inputs)

    def compute_metric(self, model: Any, inputs: Any) -> float:
        """The first metric over the batches passed so far and this one: a forward pass in evaluation mode.

        Training calls this method only if it is overridden; otherwise it reuses the outputs of the step.
        """
        return self.run.evaluation.compute_metric(model, inputs)

    def update_metrics(self, model: Any, inputs: Any, step_loss: Any, training: bool = True) -> tuple[float, float]:
        """For a user's ``train_step``: count a batch, and return the epoch's mean loss and metric."""
        if training and self._train_metrics is not None:
            self._train_metrics.add_now(inputs)
            return self._run_callbacks.epoch_loss(float(step_loss)), self._train_metrics.first()
        return float(step_loss), self.compute_metric(model, inputs)

    # Called by the loop and by hooks.

    def before_train(self) -> None:
        run = self.run
        run.folder.prepare(self.config)
        if self.config.is_by_its_page:  # the page documents this list
            logger.log(logging.WARNING if is_main_process() else logging.INFO, "%s", repr(self.config))  # once
        self.run.saving.load_last_trained()
        self.run.scheduling.check(self.lr_scheduler)
        super().before_train()

    def _before_first_step(self) -> None:
        if self.start_iter == 0:
            seed_everything(self.run.spec.seed + get_averaging_rank())
        self._batches_of_run()
        with without_compiler():
            self.optimizer.zero_grad()
        self.state.restore(in_place=self.run.folder.resume)
        self._steps.check_assigned()
        self.run.update.clear_also(warn_of_untrained(self, self.loss))
        refuse_sparse_gradients(self.run)
        warn_unsharded_loader(self.train_dataloader)
        if self.run.spec.eval_on_start and self.start_iter == 0 and self.eval_dataloader is not None:
            self._evaluate_now()
        if not self.is_copy and not is_overridden(self, "set_train_mode"):
            log_modes(self.model, self.run.spec)
        self.set_train_mode()
        self._steps.start()

    def after_train(self) -> None:
        # A failed update leaves steps that do not count.
        self.state.global_step = self.state.plan.steps(self.iterations_done)
        try:
            super().after_train()
        finally:
            self.max_iter = self.state.plan.num_updates
            self._steps.close()

    def _finish(self) -> None:
        """At the end of a training without failure, after the last save: load the best weights, write the card."""
        spec = self.run.spec
        if self.has_failed:
            return
        if spec.load_best_model_at_end:
            self.last_eval_results = self.run.saving.load_best() or self.last_eval_results
        if spec.save_enabled and is_main_process():
            self.run.folder.write_card(self._card.text_of_run())
        if parts.dev_batches(spec) is not None and is_main_process():
            logger.info(
                "fast_dev_run completed without errors: %d training steps%s%s. Nothing was written to %s; the steps"
                " have changed the weights.",
                self.state.global_step,
                ", evaluations" if self.last_eval_results else "",
                ", checkpoints" if spec.save_enabled else "",
                self._given_output_dir,
            )

    def _apply_settings(self, names: set[str]) -> None:
        if names & {"max_grad_norm", "clip_grad_value", "lr_scheduling_steps"}:
            self._steps.build_update()

    def _plan_again(self) -> None:
        """Plan the training again: its length and periods may have been changed in the settings."""
        before = self.state.plan
        self.train_dataloader, plan = start.plan_of(self.run.spec, self.train_dataloader)
        if self.state.global_step and plan.has_epochs:  # its epochs have had their lengths
            plan = replace(before, num_epochs=plan.num_epochs, max_steps=plan.max_steps)
        self._use_plan(plan)

    def _use_plan(self, plan: StepPlan) -> None:
        self.state.plan, self.max_iter = plan, plan.num_updates
        self._periods.plan(self.run.spec)
        self.run.scheduling.follow([self.lr_scheduler, *self.lr_schedulers.values()])

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

    def _after_batch(self) -> Callable[[Any, Any], None] | None:
        """What the step calls after each micro-batch, with the callbacks and overrides that there are now."""
        return after_batch_calls(
            self.run.overrides,
            self._run_callbacks,
            self._train_metrics,
            model=self.model,
            set_train_mode=self.set_train_mode,
            accumulates=self.run.spec.gradient_accumulation_steps > 1,
            is_pipeline=self._placement.pipeline is not None,
        )

    def _evaluate_in_training(self) -> dict[str, Any]:
        self.storage.reduce()  # writers write a row for the evaluation
        with self.run.watching_hardest():
            return self.run.evaluation.evaluate_in_training(
                self._run_callbacks, self.eval_dataset, self.eval_dataloader
            )

    @contextmanager
    def _replaced_model(self, model: Any) -> Iterator[None]:
        """Evaluate ``model`` in place of the trainer's own, on the run's device and in its precision."""
        is_torchs = type(model).__module__.startswith("torch.")  # DistributedDataParallel and others
        if model is self.model or (is_torchs and getattr(model, "module", None) is self.model):
            yield
            return
        steps, placement, own = self._steps, self._placement, (self.model, self._steps.loss, self._placement.model)
        place = next((parameter.device for parameter in model.parameters()), self.device)
        self.model = placement.model = model.to(self.device)
        steps.loss = BatchLoss(model, self.loss, self.run.autocast, label_names=self.run.spec.label_names)
        try:
            with self.run.autocast() if self.run.autocast else nullcontext():
                yield
        finally:
            self.model, steps.loss, placement.model = own
            model.to(place)

    def _evaluate_now(self) -> None:
        self._evaluate_hook.trainer = weakref.proxy(self)  # it is registered only if evaluations are due
        self._evaluate_hook.evaluate()

    def _bind_run_step(self) -> tuple[Any, Callable[[], None]]:
        step = self._steps.step
        assert step is not None, "built before the first step"
        return self, self.run_step if self.run.overrides.has("run_step") else step.run

    def _batches_of_run(self) -> Batches:
        run, loader = self.run, self.train_dataloader
        if getattr(run, "batches", None) is None or run.batches.loader is not loader:
            me: Trainer = weakref.proxy(self)
            renews = self._creates_loader and run.overrides.has("create_train_dataloader")
            renew = (lambda: me._loader_of_epoch()) if renews else None
            run.batches = Batches(
                loader,
                measure=lambda loader: start.epoch_length(me.run.spec, loader),
                may_change=lambda: me._may_change_data(),
                renew=renew,
            )
        return run.batches

    def _loader_of_epoch(self) -> Any:
        """The loader that the user's ``create_train_dataloader`` returns for an epoch that begins."""
        before, spec = self.train_dataloader, self.run.spec
        self.state.is_opening = True
        try:
            loader = self.create_train_dataloader(self.train_dataset)
        finally:
            self.state.is_opening = False
        if isinstance(before, BatchLoader) and before is not loader:
            before.close()
        limit = spec.overfit_batches or spec.limit_train_batches
        self.train_dataloader = loaders.with_length(loader, limit, spec.max_steps)
        return self.train_dataloader

    def _may_change_data(self) -> bool:
        """Whether code of the user's runs between two epochs, which may change the data."""
        own_methods = ("before_step", "after_step", "inner_training_loop", "evaluate")
        return self.run.overrides.has(*own_methods) or any(hook.may_change_data for hook in self.run.hooks)

"""The run of a ``Trainer``: its parts, made of what the user has passed and of a TrainingConfig."""

import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainwright.base.dist import get_world_size, is_main_process
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.base.files import Content
from trainwright.config.secrets import safe_trackers, without_secrets
from trainwright.config.spec import RunSpec, spec_of_training_config
from trainwright.config.torch_names import CUSTOM, GivenName, described_loss
from trainwright.data.batch_loader import BatchLoader
from trainwright.data.batches import Batches
from trainwright.data.sampler import EpochSampler
from trainwright.data.streaming import is_stream
from trainwright.data.wrapped import own_collator
from trainwright.engine import loaders
from trainwright.engine.best_metric import BestMetric
from trainwright.engine.folder.run_folder import TrainerFolder
from trainwright.engine.late_changes import late_changes
from trainwright.engine.loss_fn import forward, used_loss
from trainwright.engine.own_step import OwnStep
from trainwright.engine.resumed_settings import plain
from trainwright.engine.run import TrainerRun
from trainwright.engine.state import PlannedEpochs, TrainerState
from trainwright.engine.step import Step
from trainwright.engine.step_plan import StepPlan
from trainwright.evaluation.comparison import refusal_by_loss
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
    PeriodicCheckpointer,
    PeriodicWriter,
    ReduceOnPlateau,
)
from trainwright.hooks.callbacks import Callback, CallbackList, PrintCallback, RunCallbacks
from trainwright.hooks.callbacks.progress import EpochLines, EpochProgress, LinePlan, line_plan
from trainwright.hooks.due import Period
from trainwright.hooks.timer import SettingNames
from trainwright.optim.named import NamedOptimizers
from trainwright.trainer import checks, optim, parts, start
from trainwright.trainer.checks import Given
from trainwright.trainer.evaluation import Evaluation
from trainwright.trainer.model_card import RunCard
from trainwright.trainer.optim import Schedules
from trainwright.trainer.parts import next_commands
from trainwright.trainer.processes import Placement, check_pipeline
from trainwright.trainer.saving import Saving
from trainwright.trainer.train_metrics import TrainMetrics, after_batch_calls, measures_training
from trainwright.trainer.training_step import OWN_STEP_METHODS, STEP_METHODS, BatchLoss, TrainingStep

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig

logger = logging.getLogger("trainwright.engine")


class PythonRun(TrainerRun):
    """A run of the Python API.

    Attributes:
        given: what the user has passed.
        evaluation, saving, scheduling: its evaluations, checkpoints and learning-rate schedules.
        steps: builds the step. ``placement``: what it calls in place of the model.
        periods: when something is due. ``train_metrics``: of the training batches, if they are measured.
    """

    given: Given
    evaluation: Evaluation
    saving: Saving
    scheduling: Schedules
    steps: TrainingStep
    placement: Placement
    periods: start.Periods
    train_metrics: TrainMetrics | None
    card: RunCard
    eval_hook: EvalHook
    write_hook: PeriodicWriter
    train_dataset: Any
    eval_dataset: Any
    train_dataloader: Any
    eval_dataloader: Any
    accelerator: Any
    model_card: Any
    output_dir: Path
    _settings_of: Mapping[str, Any] | None = None  # what `own_settings` was made of
    _own_settings: Mapping[str, Any]

    @property
    def spec(self) -> RunSpec:
        """The settings of the current configuration, which the user may change between two trainings."""
        if self._spec is None or self._spec.as_set is not self.config.as_set:
            self._spec = spec_of_training_config(self.config)
        return self._spec

    # The parts, as build_run calls these.

    def start(self, given: Given) -> None:
        """Join the launcher's processes, and use what the user has passed."""
        me = weakref.proxy(self)
        self.given = given
        self._given_settings = given.config.as_set
        self.config, self.device = start.start(given, self.trainer)
        self.output_dir = Path(os.path.abspath(self.spec.output_dir))
        self.model, self.accelerator, self.model_card = given.model, given.accelerator, given.model_card
        self.train_dataset, self.eval_dataset = given.train_dataset, given.eval_dataset
        self.callbacks = CallbackList(given.callbacks)
        self.trainer.storage = EventStorage()
        self.state = TrainerState(self.trainer, is_elastic=self.spec.elastic)
        self.folder = TrainerFolder(self.output_dir, lambda: me.spec)
        self.step_methods = (*OWN_STEP_METHODS, "inner_training_loop", "compute_loss")

    def build_data(self) -> None:
        """The evaluation, the loaders, the plan of the steps, and the metrics."""
        given, spec, trainer, me = self.given, self.spec, self.trainer, weakref.proxy(self)
        datasets = given.train_dataset, *loaders.each(given.eval_dataset)
        checks.check_labels(given.model, datasets)
        self.preprocessor = parts.give_preprocessor(given.preprocessor, given.model, *datasets)
        self.evaluation = Evaluation(
            self,
            handler=lambda: me.trainer.metrics_handler,
            compute_loss=lambda model, inputs: me.steps.loss.compute_loss(model, inputs),
            preprocessor=self.preprocessor,
            collator=given.data_collator,
            default_collator=self.data_collator,
            replaced_model=lambda model: me.replaced_model(model),
        )
        train, tests = given.train_dataloader, given.eval_dataloader
        if train is None:  # not `or`: that calls len(loader), and a loader may have none
            train = trainer.create_train_dataloader(given.train_dataset)
            if train is None:
                raise ConfigTypeError(
                    f"{self.overrides.kind}.create_train_dataloader returned None: is a return missing?"
                )
        if spec.overfit_batches is not None:
            tests = loaders.overfit_loader(train, given.train_dataset, spec, given.data_collator)
        elif tests is None and given.eval_dataset is not None:
            is_iterated = is_stream(given.eval_dataset)  # not a loader, although it is only iterated
            create = self.evaluation.loader_of if is_iterated else self.evaluation.loaders_of
            tests = create(given.eval_dataset)
        self.train_dataloader, plan = start.plan_of(spec, train)
        self.eval_dataloader, self._built_with_evaluation = tests, tests is not None
        kept = start.elastic_accumulation(spec, self.output_dir, plan.batch_size)
        if kept != spec.gradient_accumulation_steps:
            self.change_config(gradient_accumulation_steps=kept)
            self.train_dataloader, plan = start.plan_of(self.spec, train)
        self.state.plan, trainer.max_iter = plan, plan.num_updates
        self.batches_of_loader()
        self.periods = start.Periods(self.spec, self.state)
        self._build_metrics()

    def _build_metrics(self) -> None:
        me, trainer = weakref.proxy(self), self.trainer
        handler = parts.given_handler(self.given, self.spec, trainer)
        if handler is not None:
            trainer.metrics_handler = handler
        self.train_metrics = None
        if measures_training(self.spec) and (handler is None or hasattr(handler, "train_copy")):
            self.train_metrics = TrainMetrics(
                lambda: me.trainer.metrics_handler.train_copy(),  # with the first batch
                self.periods.metrics_are_due,
                self.state.epoch_ends(),
                self.evaluation.comparisons.labelled,
                self.evaluation.find_comparison_in_training,
                lambda: me.steps.is_padding_batch(),
            )

    def place(self) -> None:
        """Put the model on its device and processes."""
        spec, given, overrides = self.spec, self.given, self.overrides
        if self.accelerator:
            self.grad_scaler = self.accelerator.scaler
        is_toggled = isinstance(given.optimizer, NamedOptimizers) and overrides.has("train_step", "training_step")
        uses_scores = overrides.has(*STEP_METHODS, "compute_metric", "update_metrics") or measures_training(spec)
        self.placement = Placement(
            self,
            accelerator=self.accelerator,
            optimizer=given.optimizer,
            splits_scores=hasattr(self.model, "compute_loss") and not uses_scores,
            wraps=not is_toggled,
        )
        if self.placement.pipeline is not None:
            check_pipeline(self.placement.pipeline, spec, self.model, self.train_dataloader, overrides)

    def build_optimizers(self) -> None:
        """The optimizers and their schedules, and the criterion."""
        given, me = self.given, weakref.proxy(self)
        self.optimizer = given.optimizer or optim.build_optimizer(self.spec, self.model)
        self.scheduling = Schedules(self, given.schedules, lambda: me.best_metric.mode())
        self.lr_scheduler, self.lr_schedulers = self.scheduling.of(self.optimizer)
        if given.loss is None:
            self.criterion = optim.build_criterion(self.spec, self.device)
        else:
            self.use_loss(given.loss)

    @property
    def data_collator(self) -> Callable[[list[Any]], Any] | None:
        """Builds a batch from a list of samples: the passed collator, or the data set's own."""
        return self.given.data_collator or own_collator(self.train_dataset)

    @property
    def checkpoints_dir(self) -> Path:
        return self.output_dir / self.spec.checkpoints_dir

    def card_files(self) -> dict[str, Content]:
        return {"README.md": self.card.file()}

    def build_calls(self) -> None:
        """The card, the saves, and what calls the callbacks."""
        state, me = self.state, weakref.proxy(self)
        self.card = RunCard(self, self.model_card, lambda: me.calls.current_results())
        self.saving = Saving(self, self.periods, self.card)
        self.calls = RunCallbacks(
            self.callbacks,
            self.control,
            epoch_at=state.epoch_at,
            save=self.saving.save_step,
            evaluate=(lambda: me.evaluate_now()) if self.eval_dataloader is not None else None,
            log=lambda: me.log_now(),
            is_due=self.periods.check_is_due,
            late=self.saving.late,
            eval_is_due=self.periods.eval_is_due,
            steps_done=lambda: state.global_step,
        )
        if self.train_metrics is not None:
            self.calls.logs.defer("epoch_metric", self.train_metrics.first)

    def build_step(self) -> None:
        me = weakref.proxy(self)
        self.steps = TrainingStep(
            self,
            self.placement,
            callbacks=self.calls,
            metrics=self.train_metrics,
            use_plan=lambda plan: me.use_plan(plan),
            accelerator=self.accelerator,
            after_batch=lambda: me.after_batch(),
        )
        self.own_step = OwnStep(self, OWN_STEP_METHODS)

    def resume(self) -> None:
        if (source := start.resume(self.spec, self.checkpointer)) is not None:
            self.saving.continue_from(source)

    def prepare_folder(self) -> None:
        start.check_folder(self.spec, self.folder)

    # The hooks.

    setting_names = SettingNames(
        workers="dataloader_num_workers",
        no_workers="dataloader_num_workers=0",
        collate="data_collator=lambda batch: batch",
        asynchronous="save_asynchronously=True",
        profile="TrainingConfig(profile=True)",
        save="a larger save_steps, or every_n_epoch or every_n_iteration of model_checkpoint,",
        evaluate="eval_strategy='step' with a larger eval_steps",
    )
    eval_prefix = "eval_"

    @property
    def has_evaluation(self) -> bool:
        return self.eval_dataloader is not None

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        return self.spec.eval_strategy != "no" and self.has_evaluation

    @property
    def log_is_due(self) -> Period:  # type: ignore[override]
        return self.periods.log_is_due

    @property
    def eval_is_due(self) -> Period:  # type: ignore[override]
        return self.periods.eval_is_due

    @property
    def check_is_due(self) -> Period:  # type: ignore[override]
        return self.periods.check_is_due if get_world_size() > 1 else self.periods.log_is_due

    def steps_done(self) -> int:
        return self.state.global_step

    def has_passed(self, start: int, every: int) -> bool:
        return self.state.global_step > start and self.state.has_passed(every)

    def samples_of_window(self, batches: int) -> int:
        return 0

    def planned_length(self) -> tuple[int, int | None]:
        return self.state.plan.total_steps, self.state.plan.steps_per_epoch

    def epoch_of(self) -> Callable[[int], Any] | None:
        state = self.state
        return (lambda update: state.plan.epoch_of(update)) if state.plan.has_epochs else None

    def epoch_ends(self) -> Any:
        return self.state.epoch_ends()

    def own_step_hook(self) -> HookBase:
        return self.own_step  # type: ignore[no-any-return]

    def step_hooks(self) -> list[HookBase | None]:
        return [*self.scheduling.hooks(self.optimizer, self.lr_schedulers), self.train_metrics]

    def save_hook(self) -> HookBase | None:
        if not self.spec.save_enabled:
            return None
        return PeriodicCheckpointer(self.checkpointer, self.periods.save_is_due, save=self.saving.save_step)

    def after_evaluation(self) -> list[HookBase | None]:
        """Step a schedule by a result after each evaluation, or by a training metric at the end of each epoch."""
        metric, me = self.best_metric, weakref.proxy(self)
        if not metric.is_of_training:
            return [ReduceOnPlateau(me.new_result)]

        def latest() -> float | None:
            value: float | None = me.storage.latest().get(metric.key, (None, 0))[0]
            return value

        mean_loss = self.calls.epoch_loss_of_all
        return [ReduceOnPlateau(mean_loss if metric.key == "total_loss" else latest, self.state.epoch_ends())]

    def name_of_save(self) -> str:
        return self.saving.step_name()

    def progress_lines(self, best: BestCheckpointer | None) -> list[HookBase | None]:
        """A line per epoch; without a bar and lines by steps also one every half minute."""
        me, state = weakref.proxy(self), self.state
        if not is_main_process():
            return []

        def shows_progress() -> bool:
            return me.has_lines and not me.spec.log_steps and bar_stream() is None

        def position() -> tuple[int, int, int, int, int]:
            plan, length = state.plan, state.plan.windows.at(me.trainer.iter)
            return state.epoch, plan.num_epochs, state.epoch_step, plan.steps_per_epoch, length

        return [EpochProgress(shows_progress, position), EpochLines(lambda: me.line_plan(), best)]

    @property
    def has_lines(self) -> bool:
        """Whether the log has lines of epochs."""
        return self.spec.progress_bar and self.spec.print_steps is None

    def line_plan(self) -> LinePlan | None:
        if not self.has_lines:
            return None
        plan, periods = self.state.plan, self.periods
        steps = periods.evaluate or periods.eval_epochs * plan.steps_per_epoch
        period = plan.updates(steps) if self.evaluates else None
        return line_plan(PlannedEpochs(self.state), plan.num_updates, plan.updates(periods.log), eval_period=period)

    def more_hooks(self) -> list[HookBase | None]:
        return [CallbackHook(after_end=lambda trainer: trainer.run.finish())]

    # What is done with a run.

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

    def train_data(self) -> dict[str, Any]:
        is_given = self.given.train_dataloader is not None
        return {f"Trainer.train_{'dataloader' if is_given else 'dataset'}": self.train_dataloader}

    def eval_data(self) -> dict[str, Any]:
        name = f"Trainer.eval_{'dataloader' if self.given.eval_dataloader is not None else 'dataset'}"
        data = self.eval_dataloader
        return {f"{name}[{key!r}]": one for key, one in data.items()} if isinstance(data, Mapping) else {name: data}

    def eval_loaders(self) -> list[Any]:
        return [loader for loader in loaders.each(self.eval_dataloader) if loader is not None]

    def examples(self) -> Iterable[Any]:
        data = next(iter(loaders.each(self.train_dataset if self.eval_dataset is None else self.eval_dataset)))
        return loaders.batches_of_rank(self.evaluation.loader_of(data) if loaders.is_dataset(data) else data)

    def use_loaded_plan(self) -> None:
        self.use_plan(self.state.plan)

    def position_of(self, update: int) -> tuple[int, int] | None:
        sampler, plan = getattr(self.batches.loader, "batch_sampler", None), self.state.plan
        if self.overrides.has("run_step", "inner_training_loop") or not isinstance(sampler, EpochSampler):
            return None
        done = plan.steps(update - 1)
        is_known = sampler.epoch_of(done) == (*plan.epoch_at(done), plan.samples_of_epoch(done))
        if not is_known or done < sampler.first_known:
            return None  # the data had another length
        return done, plan.steps(update) - done

    def save(self) -> None:
        self.saving.save_step()

    def use_callbacks(self) -> None:
        self.steps.renew_after_batch()

    def more_callbacks(self) -> list[Callback]:
        is_printed = self.spec.print_steps is not None
        return [PrintCallback(self.spec.num_epochs, step_frequency=self.periods.print)] if is_printed else []

    def current_step(self) -> Step | None:
        return self.steps.step

    @property
    def best_metric(self) -> BestMetric:  # type: ignore[override]
        trainer = self.trainer
        return BestMetric(
            self.spec,
            lambda: trainer.metrics_handler,
            self.eval_dataloader if isinstance(self.eval_dataloader, Mapping) else (),
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
            "epochs": self.state.plan.total_steps / self.state.plan.steps_per_epoch,
            "metrics": ", ".join(map(str, self.computed_metrics())),
            "settings": "" if config.is_by_its_page else config.summary(),
        }

    def computed_metrics(self) -> Iterable[Any]:
        """The names of the metrics; empty if the loss shows that the default one is meaningless."""
        handler = self.trainer.metrics_handler
        if getattr(handler, "is_default", False):
            own_loss = used_loss(getattr(self.model, "compute_loss", None), None)
            criterion = self.declared_criterion(own_loss)
            if criterion is not None and refusal_by_loss(criterion) is not None:
                return ()
        return getattr(handler, "metrics", None) or ()

    def own_record(self) -> dict[str, Any]:
        trainer, plan = self.trainer, self.state.plan
        train, is_even = trainer.train_dataset, not plan.windows.is_scheduled
        tests = trainer.eval_dataset if isinstance(trainer.eval_dataset, Mapping) else {"eval": trainer.eval_dataset}
        named = {name if name == "eval" else f"eval {name}": one for name, one in tests.items()}
        return {
            "samples_per_iteration": plan.samples(plan.steps(1)) if is_even else None,
            "iterations_per_epoch": float(plan.updates(plan.steps_per_epoch)) if is_even else None,
            "data": {"train": getattr(self.batches.loader, "dataset", None) if train is None else train} | named,
        }

    def next_commands(self) -> list[str]:
        return next_commands(self.spec, self.trainer.total_steps, self.built_in_callbacks)

    def schedule_length(self, schedule: Any) -> int:
        return self.scheduling.length(schedule)

    def use_learning_rate(self, rate: float) -> None:
        self.config.update({"learning_rate": rate})
        self._has_read("learning_rate")

    def settings_now(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.trainer.config.as_set
        return settings

    def follow_given(self) -> None:
        """Take over what the user has changed in the configuration that was passed, if this run has a copy of it."""
        if not hasattr(self, "given"):
            return  # the trainer's __init__ has not called super().__init__(), which the next read of a part says
        before, now = self._given_settings, self.given.config.as_set
        self._given_settings = now
        if self.config is not self.given.config and now is not before:
            self.config.update({name: value for name, value in now.items() if value != before[name]})

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
        if self._settings_of is not self.spec.as_set:  # each save needs them
            self._settings_of = self.spec.as_set
            self._own_settings = plain(without_secrets(self.config.to_dict())[0])
        return dict(self._own_settings)

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

    def change_copy(self, new: "PythonRun", memo: dict[int, Any]) -> None:
        if isinstance(self.spec.optimizer, GivenName) and id(self.optimizer) not in memo:
            new.trainer.set_optimizer(copy.deepcopy(self.optimizer, memo))
        if self.criterion is not None and id(self.criterion) not in memo:
            new.trainer.set_loss(copy.deepcopy(self.criterion, memo))

    def build_writers(self) -> list[EventWriter]:
        """The writers of metrics: the console, ``metrics.json``, ``metrics.csv``, TensorBoard."""
        handler, plan = (
            vars(self.trainer).get("metrics_handler"),
            self.state.plan,
        )  # None: the default one, built on first use
        from trainwright.config.settings import TrainerConfig

        first = "accuracy" if handler is None else getattr(getattr(handler, "first", None), "key", None)
        spec, logs, (settings, _) = self.spec, self.trainer.logs_dir, without_secrets(self.config.to_dict())
        aliases = {"eval_loss": "eval_epoch_loss", f"eval_{first}": "eval_epoch_metric"}
        tensorboard = spec.tensorboard
        me = weakref.proxy(self)
        return default_writers(
            self.output_dir,
            lambda: me.state.plan.num_updates,  # which changes with the lengths of the epochs
            batch_size=0 if plan.windows.is_scheduled else plan.samples(plan.steps(1)),
            progress_bar=spec.progress_bar and spec.print_steps is None,
            iterations_per_epoch=PlannedEpochs(self.state),
            console=spec.print_steps is None,
            table=logs / CSV_NAME,
            tensorboard=None if tensorboard is None else tensorboard["log_dir"] or logs / tensorboard["comment"],
            tensorboard_aliases={"total_loss": "train.loss"} if isinstance(self.config, TrainerConfig) else aliases,
            trackers=safe_trackers(spec.trackers),
            settings=settings,
        )

    def plan_again(self) -> None:
        """Plan the training again: its length and periods may have been changed in the settings."""
        before = self.state.plan
        self.train_dataloader, plan = start.plan_of(self.spec, self.train_dataloader)
        if self.state.global_step and plan.has_epochs:  # its epochs have had their lengths
            plan = replace(before, num_epochs=plan.num_epochs, max_steps=plan.max_steps)
        self.use_plan(plan)

    def batches_of_loader(self) -> Batches:
        """The batches of the current training loader, which the user may replace."""
        loader = self.train_dataloader
        if getattr(self, "batches", None) is None or self.batches.loader is not loader:
            me = weakref.proxy(self)
            renews = self.given.train_dataloader is None and self.overrides.has("create_train_dataloader")
            renew = (lambda: me.loader_of_epoch()) if renews else None
            self.batches = Batches(
                loader,
                measure=lambda loader: start.epoch_length(me.spec, loader),
                may_change=lambda: me.may_change_data(),
                renew=renew,
            )
        return self.batches

    def finish(self) -> None:
        """At the end of a training without failure, after the last save: write the card."""
        spec = self.spec
        if self.trainer.has_failed:
            return
        if spec.save_enabled and is_main_process():
            self.folder.write_card(self.card.text_of_run())
        if parts.dev_batches(spec) is not None and is_main_process():
            logger.info(
                "fast_dev_run completed without errors: %d training steps%s%s. Nothing was written to %s; the steps"
                " have changed the weights.",
                self.state.global_step,
                ", evaluations" if self.trainer.last_eval_results else "",
                ", checkpoints" if spec.save_enabled else "",
                self.given.config.output_dir,
            )

    def use_loss(self, loss: Callable[..., Any], loss_name: str | None = None) -> None:
        """Use a loss object; the configuration gets its name, and the arguments of a loss of ``torch.nn``."""
        checks.check_loss(loss)
        written = described_loss(loss) if loss_name is None else None
        self.change_config(loss=written or GivenName(loss_name or CUSTOM))
        self.criterion = loss.to(self.device) if isinstance(loss, nn.Module) else loss

    def use_plan(self, plan: StepPlan) -> None:
        self.state.plan = plan
        self.trainer.plan_end(plan.num_updates)
        self.periods.plan(self.spec)
        self.trainer.plan_calls()
        self.scheduling.follow([self.lr_scheduler, *self.lr_schedulers.values()])

    def after_batch(self) -> Callable[[Any, Any], None] | None:
        """What the step calls after each micro-batch, with the callbacks and overrides that there are now."""
        return after_batch_calls(
            self.overrides,
            self.calls,
            self.train_metrics,
            model=self.model,
            set_train_mode=self.trainer.set_train_mode,
            accumulates=self.spec.windows.largest > 1,
            is_pipeline=self.placement.pipeline is not None,
        )

    def evaluate_in_training(self) -> dict[str, Any]:
        self.storage.reduce()  # writers write a row for the evaluation
        with self.watching_hardest():
            return self.evaluation.evaluate_in_training(self.calls, self.eval_dataset, self.eval_dataloader)

    @contextmanager
    def replaced_model(self, model: Any) -> Iterator[None]:
        """Evaluate ``model`` in place of the trainer's own, on the run's device and in its precision."""
        is_torchs = type(model).__module__.startswith("torch.")  # DistributedDataParallel and others
        if model is self.model or (is_torchs and getattr(model, "module", None) is self.model):
            yield
            return
        steps, placement, own = self.steps, self.placement, (self.model, self.steps.loss, self.placement.model)
        place = next((parameter.device for parameter in model.parameters()), self.device)
        self.model = placement.model = model.to(self.device)
        steps.loss = BatchLoss(model, self.criterion, self.autocast, label_names=self.spec.label_names)
        try:
            with self.autocast() if self.autocast else nullcontext():
                yield
        finally:
            self.model, steps.loss, placement.model = own
            model.to(place)

    def check_loaders_assigned(self, *, trains: bool = True) -> None:
        """Raise if what was assigned to the trainer as a loader is none; warn if a training does not read it."""
        tests = self.eval_dataloader
        for part, given in (("train", [self.train_dataloader]), ("eval", loaders.each(tests))):
            fix = f"a loader, such as trainer.create_{part}_dataloader(data)"
            is_none = part == "train" or self._built_with_evaluation
            if self.overrides.has(f"create_{part}_dataloader"):
                continue
            for loader in given:
                fault = checks.loader_fault(loader) or ("got None" if loader is None and is_none else None)
                if fault is not None:
                    raise ConfigTypeError(f"Trainer.{part}_dataloader was assigned: {fault}; assign {fix}.")
        if trains and tests is not None and not self._built_with_evaluation and self.spec.eval_strategy != "no":
            self._built_with_evaluation = True  # one warning
            logger.warning(
                "Trainer.eval_dataloader was assigned, without effect on train(): this trainer was built without"
                " evaluation data. Pass them to Trainer(...), or call evaluate()."
            )

    def check_data_assigned(self) -> None:
        """Raise if a data set was assigned to the trainer, and neither its loader nor an override reads that one."""
        given, overrides = self.given, self.overrides
        readers = {"train": ("create_train_dataloader", "inner_training_loop", "run_step"), "eval": ("evaluate",)}
        for part, methods in readers.items():
            now, loader = getattr(self, f"{part}_dataset"), getattr(self, f"{part}_dataloader")
            read = [
                None,
                getattr(given, f"{part}_dataset"),
                *(getattr(one, "dataset", None) for one in loaders.each(loader)),
            ]
            if any(now is one for one in read) or overrides.has(*methods):
                continue
            use = "pass it to evaluate(...), or " if part == "eval" else ""
            raise ConfigError(
                f"Trainer.{part}_dataset was assigned, without effect on {part}_dataloader: {use}build a Trainer of it,"
                f" or assign a loader of it to {part}_dataloader."
            )

    def loader_of_epoch(self) -> Any:
        """The loader that the user's ``create_train_dataloader`` returns for an epoch that begins."""
        before, spec = self.train_dataloader, self.spec
        self.state.is_opening = True
        try:
            loader = self.trainer.create_train_dataloader(self.train_dataset)
        finally:
            self.state.is_opening = False
        if isinstance(before, BatchLoader) and before is not loader:
            before.close()
        limit = spec.overfit_batches or spec.limit_train_batches
        self.train_dataloader = loaders.with_length(loader, limit, spec.max_steps)
        return self.train_dataloader

    def may_change_data(self) -> bool:
        """Whether code of the user's runs between two epochs, which may change the data."""
        own_methods = ("before_step", "after_step", "inner_training_loop", "evaluate")
        return self.overrides.has(*own_methods) or any(hook.may_change_data for hook in self.hooks)

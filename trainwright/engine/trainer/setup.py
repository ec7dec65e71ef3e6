"""Setup of a run of the Python API: its plan, its state and its hooks; what precedes and follows its steps."""

import copy
import logging
import shlex
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.config.errors import ConfigError
from trainwright.config.torch_names import GivenName
from trainwright.data.batch_loader import BatchLoader
from trainwright.data.seeding import seed_everything
from trainwright.engine.extra_parameters import log_untrained
from trainwright.engine.folder.run_folder import TrainerFolder
from trainwright.engine.folder.summary import facts_of_objects
from trainwright.engine.own_step import OwnStep
from trainwright.engine.run import Calls
from trainwright.engine.run_hooks import ordered_hooks, run_hooks
from trainwright.engine.state import TrainerState
from trainwright.engine.step_plan import make_plan, num_steps, steps_of
from trainwright.engine.trainer import loaders, optim, parts
from trainwright.engine.trainer.base import OWN_STEP_METHODS, STEP_METHODS
from trainwright.engine.trainer.best_metric import raise_missing
from trainwright.engine.trainer.build_step import SteppingTrainer
from trainwright.engine.trainer.evaluation import forward
from trainwright.engine.trainer.loaders import with_length
from trainwright.engine.trainer.model_card import RunCard
from trainwright.engine.trainer.periods import Periods
from trainwright.engine.trainer.saving import Saving
from trainwright.engine.trainer.train_metrics import TrainMetrics
from trainwright.events.writers import EventWriter
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
from trainwright.hooks import LRScheduler as ScheduleHook
from trainwright.hooks.callbacks import RunCallbacks
from trainwright.hooks.callbacks.progress import EpochProgress, epoch_lines
from trainwright.hooks.method_overrides import uninstall
from trainwright.hooks.profile import profile_hook
from trainwright.optim.named import NamedOptimizers
from trainwright.optim.schedules import FormulaLR, extend_schedule
from trainwright.parallel.dist import get_data_parallel_rank, get_world_size, is_main_process

logger = logging.getLogger("trainwright.engine")


class TrainerSetup(SteppingTrainer):
    """Built before the first step, and called before and after the steps."""

    def build_hooks(self) -> list[HookBase | None]:
        """The hooks, in the order of their calls."""
        config, periods = self.config, self._periods
        evaluates, saves = self._evaluates, config.save_enabled
        metric, best = self._best_metric.key, None
        missing = lambda: raise_missing(metric, self.last_eval_results)  # noqa: E731
        if evaluates and saves:
            self._best_metric.check()
            best = BestCheckpointer(
                periods.eval_is_due,
                self.checkpointer,
                metric,
                self._best_metric.mode(),
                on_missing=missing if config.load_best_model_at_end else None,
                top_k=config.save_top_k or 1,
                number=self._saving.step_name,
            )
        elif config.save_top_k is not None:
            logger.warning(
                "TrainingConfig.save_top_k=%d has no effect: nothing is %s.",
                config.save_top_k, "evaluated" if saves else "saved",
            )  # fmt: skip
        evaluation = self._run_callbacks.evaluating(self._evaluate_in_training)
        evaluate = EvalHook(periods.eval_is_due, evaluation, name_scope="evaluation")
        write = PeriodicWriter(lambda: self.build_writers(), periods.log_is_due)  # with the settings of each training
        self._on_request: dict[str, Any] = {"evaluate": evaluate, "log": write}
        save = PeriodicCheckpointer(
            self.checkpointer,
            periods.save_is_due,
            save=self._saving.save_step,
            saves_before_end=lambda: periods.saves_before_end(keeps_best=best is not None),
        )
        return ordered_hooks(
            timer=IterationTimer(facts=facts_of_objects),
            schedules=self._schedule_hooks(),
            train_metrics=self._train_metrics,
            save=save if saves else None,
            evaluate=evaluate if evaluates else None,
            plateau=self._plateau_hook(metric),
            best=best,
            callbacks=self._run_callbacks,
            profile=profile_hook(config.profile, self.output_dir),
            lines=self._progress_lines(best),
            write=write if is_main_process() else None,
            finish=CallbackHook(after_end=self._finish),
        )

    def _evaluate_in_training(self) -> dict[str, Any]:
        """Evaluate with callbacks seeing each batch."""
        self.storage.reduce()  # writers write a row for the evaluation
        self._evaluated_step = self.state.global_step
        with self.run.watching_hardest():
            return self._evaluation.evaluate_in_training(self._run_callbacks, self.eval_dataset, self.eval_dataloader)

    @contextmanager
    def _replaced_model(self, model: Any) -> Iterator[None]:
        """Evaluate ``model`` in place of the trainer's own, on the run's device and in its precision."""
        is_torchs = type(model).__module__.startswith("torch.")  # DistributedDataParallel and others
        if model is self.model or (is_torchs and getattr(model, "module", None) is self.model):
            yield
            return
        replaced = ("_step_model", "_contract", "_criterion", "_own_loss", "_records_outputs")
        own, before = {name: vars(self)[name] for name in replaced if name in vars(self)}, self.model
        place = next((parameter.device for parameter in model.parameters()), self.device)
        self.model = self._step_model = model.to(self.device)
        self._contract, self._records_outputs = None, False
        own_loss = getattr(model, "compute_loss", None)
        self._criterion, self._own_loss = optim.losses(self.loss, own_loss, self.run.autocast)
        try:
            with self.run.autocast() if self.run.autocast else nullcontext():
                yield
        finally:
            vars(self).pop("_records_outputs")
            vars(self).update(own)
            self.model = before
            model.to(place)

    def _finish(self, trainer: Any) -> None:
        """At the end of a training without failure, after the last save: load the best weights, write the card."""
        if trainer.has_failed:
            return
        if self.config.load_best_model_at_end:
            self._saving.load_best()
        if self.config.save_enabled and is_main_process():
            self.run.folder.write_card(self._card.text_of_run())
        if self.config.fast_dev_run and is_main_process():
            self._log_dev_run()

    def _log_dev_run(self) -> None:
        """Log what a ``fast_dev_run`` has done."""
        config, steps = self.config, self.state.global_step
        done = [f"{steps} training {'step' if steps == 1 else 'steps'}"]
        if self.last_eval_results:
            most = parts.dev_batches(config)
            done.append(f"evaluations of at most {most} {'batch' if most == 1 else 'batches'}")
        if config.save_enabled:
            done.append("checkpoints")
        logger.info(
            "fast_dev_run completed without errors: %s. Nothing was written to %s; the steps have changed the weights.",
            ", ".join(done), self._output_dir_of_user,
        )  # fmt: skip

    def _progress_lines(self, best: BestCheckpointer | None) -> HookBase | None:
        """A line per epoch beside a bar and beside lines by steps; in place of a bar, a line every half minute."""
        config, state, plan = self.config, self.state, self._plan
        if not config.progress_bar or config.print_steps is not None or not is_main_process():
            return None
        if config.log_steps or bar_stream() is not None:
            period = plan.updates(self._periods.evaluate or plan.steps_per_epoch) if self._evaluates else None
            log_period = plan.updates(self._periods.log)
            return epoch_lines(plan.updates_per_epoch, self.max_iter, log_period, eval_period=period, best=best)
        position = lambda: (state.epoch, state.epoch_step, plan.steps_per_epoch)  # noqa: E731
        return EpochProgress(config.num_epochs, position, steps_per_update=plan.accumulation)

    def _schedule_hooks(self) -> list[HookBase]:
        is_torchs = bool(self.config.lr_scheduler or self._is_given_schedule)
        if not isinstance(self.optimizer, NamedOptimizers):
            return [ScheduleHook(period=self._schedule_is_due if is_torchs else 1)]
        hooks: list[HookBase] = []
        for name, optimizer in self.optimizer.optimizers.items():
            schedule = self.lr_schedulers.get(name)
            period = partial(self._schedule_is_due, schedule) if is_torchs else 1
            hooks.append(ScheduleHook(optimizer, schedule, period=period, name=name))
        return hooks

    def _build_lr_scheduler(self, optimizer: Optimizer, num_updates: int) -> LRScheduler | None:
        return optim.build_lr_scheduler(self.config, optimizer, num_updates, lambda: self._best_metric.mode())

    def _plateau_hook(self, metric: str) -> HookBase:
        """Step by an evaluation result after each evaluation, or by a training metric at the end of each epoch."""

        def latest() -> float | None:
            value, _ = self.storage.latest().get(metric, (None, 0))
            return value

        if metric.startswith("evaluation/"):
            return ReduceOnPlateau(latest)
        value = self._run_callbacks.epoch_loss_of_all if metric == "total_loss" else latest
        return ReduceOnPlateau(value, self.state.is_epoch_end)

    def _schedule_is_due(self, schedule: LRScheduler | None = None) -> bool:
        """Whether to step a schedule of torch or the user: by default once an epoch. Others step after each update."""
        every = self._scheduling_steps(schedule or self.lr_scheduler)
        return self.state.has_passed(every) if every else True

    def _scheduling_steps(self, schedule: Any) -> int | None:
        """Steps between two steps of a schedule; None: it is stepped after each update."""
        if not (self.config.lr_scheduler or self._is_given_schedule):
            return None
        own = steps_of(self.config.lr_scheduling_steps, self.total_steps)
        return own or (None if isinstance(schedule, FormulaLR) else self._plan.steps_per_epoch)

    def _schedule_length(self, schedule: Any) -> int:
        every = self._scheduling_steps(schedule)
        return self.total_steps // every if every else self._plan.num_updates

    def _check_one_cycle(self) -> None:
        """Compare the length of a OneCycleLR, which torch refuses to exceed in the middle of a run, with the run.

        Raises:
            ConfigError: the run is longer.
        """
        schedule, plan = self.lr_scheduler, self._plan
        if not isinstance(schedule, OneCycleLR):
            return
        every, planned = self._scheduling_steps(schedule), self._schedule_length(schedule)
        length, often = schedule.total_steps, f"every {every} steps" if every else "after each update"
        fix = f"Set total_steps={planned}"
        if every not in (None, 1):
            fix += f", or lr_scheduling_steps=1 and total_steps={plan.total_steps}"
        if length < planned:
            raise ConfigError(
                f"OneCycleLR: got total_steps={length}, but this run steps it {planned} times ({often}). {fix}."
            )
        if length > planned:
            logger.warning(
                "OneCycleLR: got total_steps=%d, but this run steps it only %d times (%s), so the learning rate does"
                " not complete its cycle. %s.", length, planned, often, fix,
            )  # fmt: skip

    def build_writers(self) -> list[EventWriter]:
        """The writers of metrics: the console, ``metrics.json``, ``metrics.csv``, TensorBoard."""
        handler = vars(self).get("metrics_handler")  # None: the default handler, built on first use
        first = "accuracy" if handler is None else getattr(getattr(handler, "first", None), "key", None)
        batch_size = self._plan.samples(self._plan.steps(1))
        return parts.build_writers(
            self.config, self.output_dir, self.max_iter, batch_size, first_metric=first,
            updates_per_epoch=self._plan.updates_per_epoch,
        )  # fmt: skip

    def before_train(self) -> None:
        self.run.folder.prepare(self.config)
        if self.config.is_by_its_page:  # the page documents this list
            logger.log(logging.WARNING if is_main_process() else logging.INFO, "%s", repr(self.config))  # once
        self._saving.load_last_trained()
        self._add_built_in_callbacks()
        self._check_one_cycle()
        super().before_train()

    def after_train(self) -> None:
        # A failed update leaves steps that do not count.
        self.state.global_step = self._plan.steps(self.iterations_done)
        try:
            super().after_train()
        finally:
            self.max_iter = self._plan.num_updates
            self._close_loaders()

    def _calls(self) -> Calls:
        me: Any = weakref.proxy(self)

        def examples() -> Iterable[Any]:
            dataset = me.train_dataset if me.eval_dataset is None else me.eval_dataset
            data = next(iter(dataset.values())) if isinstance(dataset, Mapping) else dataset
            return loaders.batches_of_rank(me._evaluation.loader_of(data) if loaders.is_dataset(data) else data)

        def settings_of_copy(folder: Path, changes: dict[str, Any], **settings: bool) -> Any:
            return parts.settings_of_copy(me.config, folder, changes, **settings)

        def change_copy(new: Any, memo: dict[int, Any]) -> None:
            if isinstance(me.config.optimizer, GivenName) and id(me.optimizer) not in memo:
                new.set_optimizer(copy.deepcopy(me.optimizer, memo))
            if me.loss is not None and id(me.loss) not in memo:
                new.set_loss(copy.deepcopy(me.loss, memo))
            for callback in me.callbacks:
                if id(callback) not in memo and not any(callback is one for one in me._built_in_callbacks):
                    new.add_callback(copy.deepcopy(callback, memo), singleton=False)

        return Calls(
            prepare=lambda batch: me._evaluation.prepare(batch),
            prepare_eval=lambda batch: me._evaluation.prepare(batch),
            forward=forward,
            loss=lambda model, batch: me._evaluation.compute_loss(model, batch),
            evaluate=lambda: me.evaluate(),
            eval_loaders=lambda: [loader for loader in loaders.each(me.eval_dataloader) if loader is not None],
            examples=examples,
            save=lambda: me._saving.save_step(),
            facts=lambda: me._facts(),
            record=lambda: me._record(),
            next_commands=lambda: me._next_commands(),
            schedule_length=lambda schedule: me._schedule_length(schedule),
            use_learning_rate=lambda rate: me.config.update({"learning_rate": rate}),
            settings_of_copy=settings_of_copy,
            change_copy=change_copy,
            close_data=lambda: me._close_loaders(),
        )

    def _facts(self) -> dict[str, Any]:
        config = self.config
        facts: dict[str, Any] = {
            "task": config.task,
            "num_train": _length(self.train_dataset),
            "num_eval": sum(_length(one) or 0 for one in loaders.each(self.eval_dataset)) or None,
            "num_left_out": loaders.num_left_out(self.train_dataloader),
            "iterations_per_epoch": self._plan.updates_per_epoch,
            "metrics": ", ".join(map(str, getattr(self.metrics_handler, "metrics", None) or ())),
            "settings": "" if config.is_by_its_page else config.summary(),
        }
        named = config.lr_scheduler_type
        is_named = isinstance(named, str) and isinstance(self.lr_scheduler, FormulaLR)
        return facts | ({"schedule": f"{named} schedule"} if is_named else {})

    # Built before the first step.

    def _build_plan(self) -> None:
        """Compute the numbers of steps and updates, and the periods of saving and logging."""
        config = self.config
        max_steps = config.max_steps
        limit = config.overfit_batches or config.limit_train_batches
        self.train_dataloader = with_length(self.train_dataloader, limit, max_steps)
        if isinstance(max_steps, float):
            per_epoch = num_steps(self.train_dataloader, limit)
            share, max_steps = max_steps, steps_of(max_steps, per_epoch) * config.num_epochs
            logger.info(
                "TrainingConfig.max_steps=%g: %d steps in total, that fraction of %d epochs of %d batches. No epoch is"
                " shortened: training ends in epoch %d. limit_train_batches=%g shortens each epoch.",
                share, max_steps, config.num_epochs, per_epoch, -(-max_steps // per_epoch), share,
            )  # fmt: skip
        self._plan = make_plan(
            self.train_dataloader,
            num_epochs=config.num_epochs,
            max_steps=max_steps,
            accumulation=config.gradient_accumulation_steps,
            limit=limit,
        )
        if max_steps is not None and max_steps > self._plan.total_steps:
            logger.warning(
                "TrainingConfig.max_steps: %d exceeds the %d steps of num_epochs=%d, after which training ends.",
                max_steps, self._plan.total_steps, config.num_epochs,
            )  # fmt: skip
        self.total_steps, self.max_iter = self._plan.total_steps, self._plan.num_updates
        self.num_batches = self._plan.steps_per_epoch
        self.steps_in_epoch = min(self.num_batches, self.total_steps)

    def _update_plan(self) -> None:
        """Plan the training again if the user has changed its length on the config since it was planned."""
        before = self._plan
        self._build_plan()
        self._periods.plan(self.config, self._plan)
        if self._plan == before:
            return
        self.state.set_plan(self._plan)
        own = [] if self._is_given_schedule else [self.lr_scheduler, *self.lr_schedulers.values()]
        for schedule in filter(None, own):
            extend_schedule(schedule, lambda optimizer: self._build_lr_scheduler(optimizer, self.max_iter))

    def _build_state(self) -> None:
        """Build the training state, the checkpointer and the hooks that other parts call."""
        config = self.config
        self.state = TrainerState(
            self, self._plan, is_elastic=config.elastic, lr=config.learning_rate, seed=config.seed
        )
        self.run.state = self.state
        self.run.build_checkpointer(
            self.output_dir / config.checkpoints_dir,
            files=lambda: {"README.md": self._card.text().encode()},
            preprocessor=self.preprocessor,
        )
        self._periods = Periods(config, self._plan, self.state)
        self.run.folder = TrainerFolder(self.output_dir, config)
        self._card = RunCard(
            self.model_card,
            self.checkpointer,
            self.state,
            self.run.average,
            output_dir=self.output_dir,
            settings=lambda: self.config,
            results=self._current_results,
        )
        self._saving = Saving(
            self.checkpointer,
            self.state,
            self.run.folder,
            self._periods,
            self._card,
            settings=lambda: self.config,
            is_over=lambda: self.iter >= self.max_iter,
        )
        self._train_metrics = self._build_train_metrics()
        self._run_callbacks = RunCallbacks(
            self.callbacks,
            self.trainercontrol,
            steps_per_epoch=self._plan.steps_per_epoch,
            save=self._saving.save_step,
            evaluate=self._evaluate_now if self.eval_dataloader is not None else None,
            log=self._log_now,
            is_due=self._periods.check_is_due,
        )
        if self._train_metrics is not None:
            self._run_callbacks.logs.defer("epoch_metric", self._train_metrics.first)

    def _current_results(self) -> dict[str, Any]:
        """The results of an evaluation of the current weights, if there was one."""
        return dict(self.last_eval_results) if self._evaluated_step == self.state.global_step else {}

    def _build_train_metrics(self) -> TrainMetrics | None:
        if not self._has_train_metrics():
            return None
        if "metrics_handler" in vars(self) and not hasattr(self.metrics_handler, "train_copy"):
            return None
        return TrainMetrics(
            lambda: self.metrics_handler.train_copy(),  # with the first batch
            self._periods.metrics_are_due,
            self.state.is_epoch_end,
            self._evaluation.find_comparison_in_training,
            self._is_padding_batch,
        )

    def _evaluate_now(self) -> None:
        """Evaluate on a callback's request."""
        hook = self._on_request["evaluate"]
        hook.trainer = weakref.proxy(self)  # it is registered only if evaluations are due
        hook.evaluate()

    def _log_now(self) -> None:
        """Write metrics on a callback's request, in the main process."""
        if is_main_process():
            self._on_request["log"].write()

    def _register_hooks(self) -> None:
        state, periods = self.state, self._periods
        run = self.run
        run.own_step = OwnStep(OWN_STEP_METHODS, self._settings_of_step)
        hooks = run_hooks(
            run,
            self.build_hooks(),
            own_step=run.own_step,
            check_period=periods.check_is_due if get_world_size() > 1 else periods.log_is_due,
            save=self._saving.save_step if self.config.save_enabled else _do_not_save,
            steps_done=lambda: state.global_step,
            has_passed=lambda start, every: state.global_step > start and state.has_passed(every),
            total_steps=self.total_steps,
            steps_per_epoch=self._plan.steps_per_epoch,
        )
        self.register_hooks(hooks)
        run.num_own_hooks = len(run.hooks)

    def _record(self) -> dict[str, Any]:
        config, data = self.config, self.train_dataset
        tests = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {"eval": self.eval_dataset}
        return {
            "api": "Python",
            "samples_per_iteration": self._plan.samples(self._plan.steps(1)),
            "seed": config.seed,
            "precision": str(config.mixed_precision or "float32"),
            "data": {"train": getattr(self.train_dataloader, "dataset", None) if data is None else data}
            | {name if name == "eval" else f"eval {name}": one for name, one in tests.items()},
        }

    def _next_commands(self) -> list[str]:
        """What a user may do after a training."""
        config, folder = self.config, shlex.quote(self.config.output_dir)
        commands = [] if config.tensorboard is None else [f"tensorboard --logdir {folder}"]
        if config.save_enabled:
            has_stopped = any(getattr(one, "stopped_epoch", None) is not None for one in self.callbacks)  # early
            if has_stopped:
                longer = "early_stopping=None"
            elif isinstance(config.max_steps, float):
                longer = "max_steps=None"
            elif config.max_steps == self.total_steps:
                longer = f"max_steps={2 * self.total_steps}"
            else:
                longer = f"num_epochs={2 * config.num_epochs}"
            commands.append(f"resume_from_checkpoint=True with {longer} trains it longer")
        return commands

    def _settings_of_step(self) -> dict[str, str]:
        config, settings = self.config, {}
        if config.gradient_accumulation_steps > 1:
            settings["accumulation"] = f"gradient_accumulation_steps={config.gradient_accumulation_steps}"
        if self.run.grad_scaler is not None:
            settings["scaler"] = "the gradient scaler of mixed_precision='fp16'"
        for name in ("max_grad_norm", "clip_grad_value"):
            if getattr(config, name) is not None:
                settings["clipping"] = f"{name}={getattr(config, name)}"
        if config.non_finite == "skip":
            settings["skip"] = "non_finite='skip'"
        return settings

    def _before_first_step(self) -> None:
        if self.start_iter == 0:
            seed_everything(self.config.seed + get_data_parallel_rank())
        self.state.restore(in_place=self.run.folder.resume)
        log_untrained(self.model, self.optimizer, self.loss)
        self._warn_unsharded_loader()
        if self.config.eval_on_start and self.start_iter == 0 and self.eval_dataloader is not None:
            self._evaluate_now()
        self.set_train_mode()
        with without_compiler():
            self.optimizer.zero_grad()
        if getattr(self.model, "compute_loss", None) != self._loss_of_model:
            self._build_loss()  # the model's compute_loss has been replaced
        self._build_step()

    def _close_loaders(self) -> None:
        # They refer to the trainer.
        self._step = None
        self._compute_loss = None
        self._update.batch = None
        uninstall(self, *STEP_METHODS, "optimization_step")
        self.run.batches.close()
        if self._watching is not None:
            self._watching.remove()
        for loader in (self.train_dataloader, *loaders.each(self.eval_dataloader)):
            if isinstance(loader, BatchLoader):
                loader.close()

    def _run_own_epochs(self) -> None:
        """Epochs of a user's ``inner_training_loop``."""
        plan = self._plan
        while self.iter < self.max_iter:
            first = self.iter
            epoch = plan.steps(first) // plan.steps_per_epoch + 1
            self.inner_training_loop(epoch)
            if self.iter == first:  # it read the batches itself: they count as one iteration
                last = min(plan.updates(plan.steps_per_epoch * epoch), self.max_iter) - 1
                self.state.step_before, self.iter = plan.steps(first), last
                for _ in self._iterations(last + 1):
                    self.state.global_step = plan.steps(last + 1)

    def _add_built_in_callbacks(self) -> None:
        """Add the callbacks of the configuration behind the user's, except for classes that the user has passed."""
        for callback in self._built_in_callbacks:
            if any(callback is there for there in self.callbacks):
                self.callbacks.pop_callback(callback)
        own = {kind.__name__ for callback in self.callbacks for kind in type(callback).__mro__}
        built_in = parts.build_callbacks(
            self.config,
            self.trainercontrol,
            self._best_metric,
            evaluates=self._evaluates,
            print_steps=self._periods.print,
        )
        self._built_in_callbacks = [c for c in built_in if not own & {k.__name__ for k in type(c).__mro__[:-2]}]
        for callback in self._built_in_callbacks:
            self.callbacks.add_callback(callback, singleton=False)


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _do_not_save() -> None:
    """With save_enabled=False."""

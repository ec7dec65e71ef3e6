"""The run of a ``DefaultTrainer``: its parts, made of a configuration and by the methods that a user overrides."""

import copy
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau

from trainwright.base.dist import get_averaging_rank, get_data_parallel_size, get_world_size, is_main_process
from trainwright.base.errors import ConfigError, nearest_of
from trainwright.base.lazy_names import ring
from trainwright.checkpoint.folder import numbered_name
from trainwright.config import foreign_names
from trainwright.config.config_file.checks import validate
from trainwright.config.lazy.lazy_config import try_get_key
from trainwright.config.lazy.provenance import overrides_of, value_at
from trainwright.config.lazy.serialization import is_referenced, to_plain
from trainwright.config.secrets import remember_secrets, without_secrets
from trainwright.config.spec import spec_of_cfg
from trainwright.config.unread import warn_of_calls, warn_of_loader_keys
from trainwright.config.windows import Windows
from trainwright.config_trainer import setup
from trainwright.config_trainer.eager_trainer import EagerTrainer
from trainwright.config_trainer.own_methods import (
    check_own_methods,
    evaluator_part,
    loaders_part,
    part,
    schedule_part,
    warn_of_none,
    warn_of_unread,
)
from trainwright.data.loaders import set_position as set_loader_position
from trainwright.data.sampler import CyclicSampler
from trainwright.data.seeding import seed_everything
from trainwright.engine.best_metric import BestMetric
from trainwright.engine.extra_parameters import log_modes
from trainwright.engine.folder.run_folder import RunFolder
from trainwright.engine.late_changes import late_changes
from trainwright.engine.loss_fn import forward, sum_losses
from trainwright.engine.own_step import OwnStep
from trainwright.engine.pipeline_step import refuse_own_step, refuse_unseeded_loader
from trainwright.engine.resumed_settings import flat
from trainwright.engine.run import Run
from trainwright.engine.state import TrainingState
from trainwright.engine.step import Step
from trainwright.evaluation.loop import loader_names, watched_batches, without_table
from trainwright.events.epoch_means import EpochLength, epoch_around, epoch_at, first_of_epoch
from trainwright.events.formats import RECORD_NAME, read_starts
from trainwright.hooks import BestCheckpointer, HookBase, LRScheduler, PeriodicCheckpointer, ReduceOnPlateau
from trainwright.hooks.callbacks import RunCallbacks
from trainwright.hooks.callbacks.progress import EpochLines, LinePlan, line_plan
from trainwright.hooks.due import NEVER, Condition, Period, Recurring
from trainwright.hooks.method_overrides import is_overridden
from trainwright.hooks.timer import SettingNames
from trainwright.models.outputs import returned_losses, scalars_of, total_loss
from trainwright.optim.named import NamedOptimizers
from trainwright.optim.schedules import FormulaLR, check_cycle, warn_of_unit
from trainwright.parallel.meta_start import built_on
from trainwright.parallel.pipeline import pipeline_of
from trainwright.parallel.precision import half_of, without_autocast
from trainwright.parallel.rank_checks import check_same_settings, data_size

logger = logging.getLogger("trainwright.engine")


class ConfigRun(Run):
    """A run of a config file.

    Attributes:
        given: the configuration without the values that depend on the data; those are in ``cfg``.
        has_own_step: whether ``train_step`` is the user's.
        stepper: what makes the steps; ``built_stepper`` is the one that was built, which the user may have replaced.
        step: of a training whose steps are those of an EagerTrainer.
        planned_epoch: the iterations of an epoch, as they were at the start.
        feeds_callbacks: whether callbacks see each batch; in a run_step of the user's own, an iteration is one.
        counted: the batches of each iteration, as callbacks count them.
    """

    given: DictConfig
    cfg: DictConfig
    tokenizer: Any
    train_loader: Any
    test_loader: Any
    has_own_step: bool
    _has_checked_batch = False
    stepper: Any
    built_stepper: Any
    step: Step | None = None
    planned_epoch: EpochLength | None
    feeds_callbacks: bool
    counted: Windows

    # The parts, as build_run calls these.

    def start(self, given: DictConfig, cfg: DictConfig, records: list[logging.LogRecord]) -> None:
        """Use a configuration: as it was ``given``, and a copy into which values that depend on the data are written.

        The callbacks and hooks that it lists are made first: an error in one of them costs no other work. ``records``:
        what was logged before.
        """
        self.given, self.cfg = given, cfg
        has_test_data = try_get_key(cfg, "dataloader.test") or is_overridden(self.trainer, "build_test_loader")
        check_own_methods(self.trainer, evaluates=bool(cfg.train.evaluation.enabled and has_test_data))
        seed_everything(cfg.train.seed)  # equal on all ranks, for equal initial weights
        self.listed_hooks = setup.own_parts(given, "train.hooks")
        self.listed_callbacks = setup.own_parts(given, "train.callbacks")
        for callback in self.listed_callbacks:
            self.callbacks.add_callback(callback, singleton=False)
        seed_everything(cfg.train.seed)  # callbacks may have drawn numbers
        if not self.has_own_trainer:  # which may read them
            warn_of_calls(given)
            if not (self.listed_hooks or self.listed_callbacks):
                warn_of_loader_keys(given)
            setup.warn_of_order(value_at(given, "dataloader.train"))
            setup.warn_of_same_data(cfg)
        resume = bool(try_get_key(cfg, "train.resume", default=False))
        self.folder = RunFolder(cfg.train.output_dir, resume=resume, records=records)
        self.state = TrainingState(self.trainer)
        self.has_own_step, self.step_methods = is_overridden(self.trainer, "train_step"), ("run_step", "train_step")

    def build_data(self) -> None:
        """The tokenizer, the loaders, and the length of the run."""
        cfg, trainer = self.cfg, self.trainer
        self.tokenizer = trainer.build_tokenizer(cfg)
        built = trainer.build_train_loader(cfg, self.tokenizer)
        self.train_loader = built[0] if isinstance(built, tuple | list) else built
        if is_overridden(trainer, "build_train_loader"):
            is_loader, must = setup.is_iterable(self.train_loader), "a loader, or a tuple with it first"
            part(self.overrides, "build_train_loader", self.train_loader, is_right=is_loader, must=must)
        setup.check_loader(self.train_loader, cfg.train.train_micro_batch_size)
        setup.limit_data(cfg.train, self.train_loader)
        self.test_loader = loaders_part(self.overrides, trainer.build_test_loader(cfg, self.tokenizer))
        near = None if "test" in cfg.dataloader else nearest_of("test", map(str, cfg.dataloader))
        near = near or next((name for name in foreign_names.EVALUATED if name in cfg.dataloader), None)
        is_missing = not self.test_loader and cfg.train.evaluation.enabled and not self.has_own_trainer
        if near is not None and is_missing and not is_referenced(self.given, near):
            logger.warning("There is no dataloader.test, so nothing is evaluated. Is dataloader.%s it?", near)
        sizes = {place: data_size(getattr(one, "dataset", None)) for place, one in enumerate(self.test_loader)}
        check_same_settings({"dataloader": {"test": sizes}})
        if cfg.train.overfit_batches is not None:
            self.test_loader = [setup.overfit_loader(self.train_loader, cfg.train.train_micro_batch_size)]
        trainer.auto_scale_hyperparams(cfg, self.train_loader)
        setup.scale_shares(cfg.train)
        trainer.start_iter, trainer.max_iter = cfg.train.start_iter, cfg.train.train_iter
        trainer.samples_per_iter = self.samples_of_window(setup.windows_of(cfg.train).at(trainer.start_iter))
        trainer.samples_done = cfg.train.consumed_train_samples
        trainer.evaluates_on_start = bool(cfg.train.eval_on_start)
        self.read_settings()

    def read_settings(self) -> None:
        """Use the current configuration."""
        self.use_spec(spec_of_cfg(self.cfg, self.given, half_of(self.device)))

    def build_model(self) -> None:
        with built_on(meta=bool(self.cfg.train.dist.meta_init)):
            built = self.trainer.build_model(self.cfg)
        is_right = isinstance(built, nn.Module)
        self.model = part(self.overrides, "build_model", built, is_right=is_right, must="a torch.nn.Module")

    def place(self) -> None:
        """Put the model on its device, and spread it over the processes."""
        if not self.cfg.train.amp.get("evaluation", False):
            self.evaluated_precision = partial(without_autocast, self.model)
        self.place_model(splits_scores=not self.has_own_step, autocast=self.autocast)
        if (pipeline := pipeline_of(self.model)) is not None:
            setup.check_num_layers(self.cfg.train.dist, pipeline.layer_stages)

    def build_optimizers(self) -> None:
        """The optimizers and their schedules."""
        cfg, trainer = self.cfg, self.trainer
        built = trainer.build_optimizer(cfg, self.model)
        is_right = isinstance(built, Mapping) or (hasattr(built, "param_groups") and not isinstance(built, type))
        must = "an optimizer, or a dict of them by name"
        if isinstance(built, tuple | list):  # with schedules, as in Lightning
            must += "; build_lr_scheduler, or train.scheduler, makes the schedule"
        part(self.overrides, "build_optimizer", built, is_right=is_right, must=must)
        if not (trainer.is_copy or self.overrides.has("build_lr_scheduler") or is_referenced(self.given, "optim")):
            warn_of_unread(self.overrides, "build_optimizer", "optim", overrides_of(value_at(self.given, "optim")))
        self.optimizer = NamedOptimizers(built) if isinstance(built, Mapping) else built
        schedule = trainer.build_lr_scheduler(cfg, self.optimizer)
        schedule_part(self.overrides, schedule, several=isinstance(self.optimizer, NamedOptimizers))
        warn_of_none(self.overrides, "build_lr_scheduler", schedule, "the learning rate stays as it is")
        several = isinstance(schedule, Mapping)
        self.lr_scheduler, self.lr_schedulers = (None, dict(schedule)) if several else (schedule, {})
        seed_everything(cfg.train.seed + get_averaging_rank())  # from here on each of these draws other numbers

    def build_calls(self) -> None:
        """What calls the callbacks."""
        me = weakref.proxy(self)
        self.calls = RunCallbacks(
            self.callbacks,
            self.control,
            epoch_at=lambda steps: me.epoch_at(steps),
            evaluate=lambda: me.evaluate_now(),
            log=lambda: me.log_now(),
            is_due=lambda: Condition(me.log_is_due)(me.trainer),
            eval_is_due=lambda: me.eval_hook is not None and Condition(me.eval_is_due)(me.trainer),
            steps_done=lambda: me.counted.before(me.trainer.start_iter),
            is_optional=True,
            early_stopping="train.early_stopping",
        )

    def build_step(self) -> None:
        spec, kind, pipeline = self.spec, type(self.trainer).__name__, pipeline_of(self.model)
        steps = spec.gradient_accumulation_steps
        settings: dict[str, Any] = {
            "grad_scaler": self.grad_scaler,
            "skip_non_finite": spec.non_finite == "skip",
            "loss_ignores": spec.loss_ignores,
            "find_unused_parameters": spec.find_unused_parameters,
            "wraps_model": not self.has_own_step,
        }
        refuse_own_step(pipeline, kind, ["train_step"] if self.has_own_step else [])
        if pipeline is not None:
            refuse_unseeded_loader(self.train_loader, "dataloader.train")
            pipeline.check_length(spec.windows.largest, "train.num_accumulation_steps")
        if not self.trainer.is_copy:
            log_modes(self.model, spec)
        if not spec.graph:
            self.stepper = EagerTrainer(self.model, self.train_loader, self.optimizer, steps, **settings)
        else:
            graph = self.trainer.build_graph(self.cfg, self.model, self.optimizer, self.lr_scheduler)
            self.stepper = ring("graph.graph_trainer").GraphTrainer(graph, self.train_loader, steps, **settings)
        self.built_stepper = self.stepper
        self._built = {"model": self.model, "optimizer": self.optimizer, "train_loader": self.train_loader}
        self.batches, self.update = self.stepper.batches, self.stepper.steps.update
        self.own_step = OwnStep(self, ["train_step"], loops=["run_step"])
        self.see_stepper()

    def check_assigned(self) -> None:
        """Raise if a part was assigned to the trainer, and its step, which is not the user's, has the one before."""
        sections = {"model": "model", "optimizer": "optim", "train_loader": "dataloader.train"}
        for name, built in self._built.items() if self.stepper is self.built_stepper else ():
            if getattr(self, name) is not built:
                raise ConfigError(
                    f"DefaultTrainer.{name} was assigned, without effect on the steps: override build_{name}, or set"
                    f" cfg.{sections[name]} before the trainer is built."
                )

    def resume(self) -> None:
        self.trainer.resume_or_load(self.folder.resume)
        self.set_position()

    def prepare_folder(self) -> None:
        self.folder.prepare(self.given)
        self.planned_epoch = self.iterations_per_epoch()

    # The hooks.

    setting_names = SettingNames(
        workers="num_workers of dataloader.train",
        no_workers="num_workers=0 of dataloader.train",
        asynchronous="train.checkpointer.asynchronous=True",
        profile="train.profile=True",
        save="a larger period or save_model_after_n_epoch of train.checkpointer",
        evaluate="a larger eval_period or eval_after_n_epoch of train.evaluation",
    )

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        return bool(self.cfg.train.evaluation.enabled and self.test_loader)

    @cached_property
    def evaluator(self) -> Any:
        """That of the evaluations of the training."""
        return evaluator_part(self.overrides, self.trainer.build_evaluator(self.cfg))

    @cached_property
    def log_is_due(self) -> Period:  # type: ignore[override]
        return self._period("train.log_period")

    @property
    def check_is_due(self) -> Period:  # type: ignore[override]
        log, trainer = self.log_is_due, weakref.proxy(self.trainer)
        if get_world_size() == 1 or self.iterations_per_epoch() is None:
            return log
        if not isinstance(log, Recurring):  # the line of an epoch has the means of all processes, too
            every = int(self.cfg.train.log_period) or sys.maxsize
            log = Recurring(lambda: (trainer.iter + 1) % every == 0, lambda done: (done // every + 1) * every)
        return log | self.epoch_ends()

    @cached_property
    def eval_is_due(self) -> Period:  # type: ignore[override]
        return self._period("train.evaluation.eval_period", self.cfg.train.evaluation.get("eval_after_n_epoch"))

    def _period(self, key: str, epochs: int | None = None) -> Period:
        """The iterations at ``key``, or the ends of each ``epochs`` epochs, which may lie within an iteration."""
        per_epoch, trainer = self.iterations_per_epoch(), weakref.proxy(self.trainer)
        if epochs is None or per_epoch is None:
            if not isinstance(value_at(self.given, key), float):
                iterations: int = value_at(self.cfg, key)
                return iterations
            # A share of all iterations, which may become more or fewer before the next training.
            return Recurring(
                lambda: (trainer.iter + 1) % value_at(trainer.cfg, key) == 0,
                lambda done: (done // value_at(trainer.cfg, key) + 1) * value_at(trainer.cfg, key),
            )

        def periods(iteration: int) -> int:
            return epoch_at(per_epoch, iteration)[0] // epochs

        return Recurring(
            lambda: periods(trainer.iter + 1) > periods(trainer.iter),
            lambda done: first_of_epoch(per_epoch, (periods(done) + 1) * epochs),
        )

    def steps_done(self) -> int:
        done: int = self.trainer.iter
        return done

    def has_passed(self, start: int, every: int) -> bool:
        at: int = self.trainer.iter
        return at >= start and (at + 1) % every == 0

    def planned_length(self) -> tuple[int, int | None]:
        per_epoch = self.iterations_per_epoch()
        return self.trainer.max_iter, int(per_epoch) if isinstance(per_epoch, int | Fraction) else None

    def epoch_of(self) -> Callable[[int], Any] | None:
        per_epoch = self.iterations_per_epoch()
        return None if per_epoch is None else partial(epoch_around, per_epoch)

    def epoch_ends(self) -> Recurring:
        if self.iterations_per_epoch() is None:
            return NEVER
        ends = self._period("train.log_period", 1)
        assert isinstance(ends, Recurring)
        return ends

    def own_step_hook(self) -> HookBase | None:
        # In graph mode the hook that sees steps would keep the optimizer outside of the program.
        names = ("train_step",) if self.spec.graph else ("train_step", "run_step")
        return self.own_step if self.overrides.has(*names) else None

    def step_hooks(self) -> list[HookBase | None]:
        return [LRScheduler()]

    def after_evaluation(self) -> list[HookBase | None]:
        has_plateau = any(isinstance(one, ReduceLROnPlateau) for one in self.schedules())
        if not (has_plateau and self.evaluates) or self.best_metric.is_of_training:
            return []
        return [_Plateau(weakref.proxy(self).new_result, self.best_metric)]

    def save_hook(self) -> HookBase | None:
        saving = self.cfg.train.checkpointer
        period = self._period("train.checkpointer.period", saving.get("save_model_after_n_epoch"))
        return PeriodicCheckpointer(self.checkpointer, period, max_to_keep=saving.max_to_keep)

    def progress_lines(self, best: BestCheckpointer | None) -> list[HookBase | None]:
        me = weakref.proxy(self)
        return [EpochLines(lambda: me.line_plan(), best)] if is_main_process() else []

    def line_plan(self) -> LinePlan | None:
        train = self.cfg.train
        if not train.progress_bar:
            return None
        shown = train.evaluation.eval_period if self.evaluates else None
        return line_plan(self.iterations_per_epoch(), self.trainer.max_iter, train.log_period, eval_period=shown)

    def evaluate_in_training(self) -> dict[str, Any]:
        self.storage.reduce()  # writers write a row for the evaluation
        watching = watched_batches(self.calls.eval_batches)
        with self.evaluated_weights(), self.watching_hardest(), without_table(), watching:
            results: dict[str, Any] = self.trainer.test(self.cfg, self.test_loader, self.model, self.evaluator)
        return results

    # What is done with a run.

    def prepare(self, batch: Any, input_placement_device: Any = None, mixup_func: Any = None) -> Mapping[str, Any]:
        made: Mapping[str, Any] = self.trainer.get_batch(
            batch,
            self.device if input_placement_device is None else input_placement_device,
            getattr(self.batches.loader, "mixup_func", None) if mixup_func is None else mixup_func,
        )
        if not self._has_checked_batch:
            self._has_checked_batch = True
            is_own = self.overrides.has("get_batch") and not self.overrides.has("train_step", "run_step", "train")
            may_be = hasattr(made, "keys") or not is_own or self.stepper is not self.built_stepper
            part(self.overrides, "get_batch", made, is_right=may_be, must="a dict with the arguments of the model")
        return made

    def prepare_eval(self, batch: Any) -> Any:
        return self.trainer.get_batch(batch, self.device)

    def forward(self, batch: Any) -> Any:
        return forward(self.model, batch, takes_all=True)

    def loss(self, batch: Any) -> Tensor:
        return sum_losses(returned_losses(self.model(**batch)))

    def evaluate(self) -> dict[str, Any]:
        with self.evaluated_weights():
            results: dict[str, Any] = self.trainer.test(self.cfg, self.test_loader, self.model)
        return results

    def train_data(self) -> dict[str, Any]:
        return {"dataloader.train": self.train_loader}

    def eval_data(self) -> dict[str, Any]:
        return {f"dataloader.test[{number}]": loader for number, loader in enumerate(self.test_loader)}

    def eval_loaders(self) -> list[Any]:
        return list(self.test_loader)

    def examples(self) -> Any:
        if not self.test_loader:
            raise ConfigError("DefaultTrainer.export: there is no example; pass a batch, or set dataloader.test.")
        return self.test_loader[0]

    def position_of(self, update: int) -> tuple[int, int] | None:
        trainer, sampler = self.trainer, getattr(self.batches.loader, "batch_sampler", None)
        has_own = any(is_overridden(one, "run_step") for one in (self.built_stepper, trainer))
        has_own |= self.stepper is not self.built_stepper
        if has_own or not isinstance(sampler, CyclicSampler):
            return None
        first, now = update - 1, trainer.iterations_done
        windows = self.spec.windows
        place = trainer.samples_done + self.samples_of_window(windows.before(first) - windows.before(now))
        if place < sampler.first_known or (update <= trainer.start_iter and self._had_other_lengths()):
            return None  # the data had another length, and a checkpoint has only the latest one
        return place, windows.at(first)

    def _had_other_lengths(self) -> bool:
        starts = read_starts(self.folder.path / RECORD_NAME)
        return len({start.get("iterations_per_epoch") for start in starts}) > 1

    def samples_of_window(self, batches: int) -> int:
        return batches * int(self.cfg.train.train_micro_batch_size) * get_data_parallel_size()

    def set_position(self) -> None:
        batches, done, hooks = self.batches, self.trainer.samples_done, self.hooks
        is_positioned = set_loader_position(batches.loader, done)
        size = self.spec.batch_size * get_data_parallel_size()
        batches.start(done // size, is_positioned=is_positioned, keeps_generators=done > 0)
        batches.may_change = lambda: any(hook.may_change_data for hook in hooks)
        trainer, known = weakref.proxy(self.trainer), [self.num_samples()]

        def log_length() -> None:
            if (now := self.num_samples()) != known[-1]:
                logger.info(
                    "The training data have %s samples now (before: %s). The run keeps its %d iterations, and the"
                    " schedule and periods in epochs those of its start.", now, known[-1], trainer.max_iter,
                )  # fmt: skip
                known.append(now)

        batches.begin_epoch = log_length

    def save(self) -> None:
        iteration = self.trainer.iterations_done - 1
        self.checkpointer.save(numbered_name(iteration), iteration=iteration)

    def current_step(self) -> Step | None:
        return self.step

    @property
    def best_metric(self) -> BestMetric:  # type: ignore[override]
        me, has_own = weakref.proxy(self), is_overridden(self.trainer, "test")  # a user's may return more results
        are_named = not has_own and (names_loaders(self.cfg) or len(self.test_loader) > 1)
        return BestMetric(
            self.spec,
            lambda: me.evaluator if me.evaluates and not has_own else None,
            loader_names(self.test_loader) if are_named else (),
            evaluates=self.evaluates,
            has_own_results=lambda: has_own,
            prefix="",
        )

    def use_callbacks(self) -> None:
        if self.calls.is_idle and self.trainer._stepper is not None:
            raise ConfigError(
                "add_callback: the steps have begun without callbacks, and would not call it. Add the first one before"
                " train(), for example as train.callbacks."
            )
        self.calls.is_idle = False
        if self.step is not None:
            self.stepper.steps.use_after_batch(self.step, self.after_batch())

    def after_batch(self) -> Callable[[Any, Any], None] | None:
        """What the step calls after each micro-batch: the storage has values of complete updates only."""
        calls, is_pipeline, has_own = self.calls, pipeline_of(self.model) is not None, self.has_own_step
        if not calls.is_fed or not (has_own or is_pipeline or self.spec.windows.largest > 1):
            return None

        def after_batch(outputs: Mapping[str, Any], batch: Any) -> None:
            if is_pipeline:
                calls.next_batch()
                calls.record(outputs)
                return
            scalars = scalars_of(outputs)
            calls.record({**(scalars if has_own else {}), "step_loss": total_loss(scalars)})

        return after_batch

    def epoch_at(self, steps: int) -> tuple[int, int]:
        """The epoch, from 0, of the batch that follows so many, and the batches before it. It begins with an update."""
        if self.planned_epoch is None:
            return 0, 0
        iteration = self.counted.updates(steps + 1) - 1  # of the batch that follows
        epoch, first = epoch_at(self.planned_epoch, iteration)
        return epoch, self.counted.before(first)

    def num_samples(self) -> int | None:
        """Those of an epoch."""
        return setup.num_samples(self.batches.loader, self.spec.batch_size)

    def iterations_per_epoch(self) -> EpochLength | None:
        """None: unknown. A fraction where an epoch ends within an iteration."""
        return setup.iterations_per_epoch(self.cfg.train, self.num_samples())

    def own_facts(self) -> dict[str, Any]:
        tests, size = self.test_loader, self.cfg.train.test_micro_batch_size
        return {
            "num_train": self.num_samples(),
            "num_eval": sum(setup.num_samples(loader, size) or 0 for loader in tests),
            "epochs": setup.num_epochs(self.cfg.train, self.num_samples(), self.trainer.max_iter),
            "settings": setup.changed_settings(self.given),
        }

    def own_record(self) -> dict[str, Any]:
        named = enumerate(self.test_loader)
        tests = {str(getattr(one, "name", at)): getattr(one, "dataset", one) for at, one in named}
        data = {f"test {name}" if len(tests) > 1 else "test": one for name, one in tests.items()}
        train = getattr(self.batches.loader, "dataset", self.batches.loader)
        per_epoch, is_even = self.iterations_per_epoch(), not self.spec.windows.is_scheduled
        return {
            "samples_per_iteration": self.trainer.samples_per_iter if is_even else None,
            "iterations_per_epoch": float(per_epoch) if isinstance(per_epoch, int | Fraction) else None,
            "data": {"train": train} | data,
        }

    def next_commands(self) -> list[str]:
        has_ended = any(callback.has_ended_run for callback in self.built_in_callbacks)
        return setup.next_commands(self.cfg, self.given, is_own_trainer=self.has_own_trainer, has_ended_early=has_ended)

    def schedule_length(self, schedule: Any) -> int:
        length: int = self.trainer.max_iter
        return length

    def check_periods(self) -> None:
        """Before the first training: warn of periods that may be meant in epochs."""
        if not self.trainer.has_trained:
            setup.warn_of_periods(self.given.train, self.planned_epoch, evaluates=self.evaluates)

    def check_schedules(self) -> None:
        """Before a training: refuse a schedule that does not fit its length, and say when torch's are stepped."""
        epochs = 0 if self.spec.may_end_early else setup.epochs_of_schedules(self.given.train)
        often = "after each iteration"
        for schedule in self.schedules():
            planned = getattr(schedule, "last_epoch", 0) + self.trainer.max_iter - self.trainer.iter
            fix = f"Set total_steps={planned}"
            has_said = check_cycle(schedule, planned, often, fix, epochs=epochs, takes_shares=True)
            warn_of_unit(schedule, planned, often, num_batches=0, epoch=0)
            if not has_said and not isinstance(schedule, FormulaLR | ReduceLROnPlateau | ConstantLR):
                logger.info("%s is stepped after each iteration, not once an epoch.", type(schedule).__name__)

    def use_learning_rate(self, rate: float) -> None:
        self.keep_settings({"optim.lr": rate})
        self.settings_read["optim"]["lr"] = rate

    def settings_now(self) -> dict[str, Any]:
        return setup.sections_of(self.cfg)

    def late_changes(self) -> set[str]:
        from trainwright.config.settings import changed_of_key  # imports pydantic, which most runs do not need

        before, now = flat(self.settings_read), flat(self.settings_now())
        return late_changes(before, now, changed_of_key, kind=type(self.trainer).__name__, where="")

    def own_settings(self) -> dict[str, Any]:
        settings, _ = without_secrets(to_plain(self.given)[0])
        return {**flat(settings), "num_samples": self.num_samples()}

    def source_of(self, name: str) -> str:
        from trainwright.config.settings import source_of_key  # imports pydantic, which most runs do not need

        return "now" if name == "num_samples" else "" if name == "project_root" else source_of_key(name)

    def default_of(self, name: str) -> Any:
        from trainwright.config.settings import default_of_key  # imports pydantic, which most runs do not need

        return default_of_key(name)

    def keep_settings(self, settings: Mapping[str, Any]) -> None:
        for cfg in (self.given, self.cfg):
            for name, value in settings.items():
                OmegaConf.update(cfg, name, value, merge=False)
        self.read_settings()
        if self.folder.is_open and is_main_process():
            self.folder.write_config(self.given)

    def use_late_changes(self, names: set[str]) -> None:
        """Use settings that the user has changed in ``cfg`` after the trainer was built."""
        from trainwright.config.settings import key_above  # imports pydantic, which most runs do not need

        validate(self.cfg)
        self.keep_settings({key: value_at(self.cfg, key) for key in map(key_above, names)})
        remember_secrets(self.given)
        self.trainer.evaluates_on_start = bool(self.cfg.train.eval_on_start)
        if names & {"train.train_iter", "train.train_epoch"}:
            self.change_length()

    def change_length(self) -> None:
        """Compute again what depends on the length of the run, from what is given."""
        trainer, planned = self.trainer, copy.deepcopy(self.given)
        setup.mark_computed(planned.train)
        trainer.auto_scale_hyperparams(planned, self.train_loader)
        setup.scale_shares(planned.train)
        for key in setup.BY_LENGTH:
            OmegaConf.update(self.cfg, key, value_at(planned, key), merge=False)
        trainer.max_iter = self.cfg.train.train_iter
        setup.extend_schedules(self, lambda optimizer: trainer.build_lr_scheduler(self.cfg, optimizer))
        self.read_settings()

    def settings_of_copy(self, folder: Path, changes: dict[str, Any], **kind: bool) -> DictConfig:
        if self.stepper is not self.built_stepper:
            raise ConfigError(
                "check: trainer._trainer was replaced, and cannot be copied. Override train_step instead."
            )
        return setup.settings_of_copy(self.given, self.cfg, folder, changes, **kind)

    def change_copy(self, new: "ConfigRun", memo: dict[int, Any]) -> None:
        if not new.folder.resume:
            new.model.load_state_dict(self.model.state_dict())
        memo[id(self.model)] = new.model

    def rebuild_model(self) -> nn.Module:
        model: nn.Module = self.trainer.build_model(self.cfg)
        return model

    def see_stepper(self) -> None:
        """Find out what the steps are; before a training again, because the user may have replaced what makes them."""
        stepper = self.stepper
        has_own = not isinstance(stepper, EagerTrainer) or stepper.has_own_run_step()
        self.feeds_callbacks = not (has_own or is_overridden(self.trainer, "run_step"))
        self.counted = self.spec.windows if self.feeds_callbacks else Windows.of(1)


def names_loaders(cfg: DictConfig) -> bool:
    """Whether the test loaders are a dictionary, whose keys name the results."""
    is_named = isinstance(try_get_key(cfg, "dataloader.test", default=None), Mapping | DictConfig)
    return is_named and cfg.train.overfit_batches is None


class _Plateau(ReduceOnPlateau):
    """Steps a ReduceLROnPlateau by the metric of the best checkpoint, unless a hook of the user's does it."""

    def __init__(self, read_metric: Callable[[], float | None], metric: BestMetric) -> None:
        super().__init__(read_metric)
        self._metric = metric

    def before_train(self) -> None:
        hooks = [one for one in self.trainer.hooks if one is not self]
        self.is_idle = any(one.uses_results for one in hooks)
        several, mode = self.trainer.lr_schedulers or {}, self._metric.mode()
        for schedule in () if self.is_idle else (self.trainer.lr_scheduler, *several.values()):
            if isinstance(schedule, ReduceLROnPlateau) and schedule.mode != mode:
                raise ConfigError(
                    f"train.scheduler: got a ReduceLROnPlateau with mode={schedule.mode!r}, and the best"
                    f" {self._metric.key} is the {mode}imum. Write mode={mode!r} in its call, or set another"
                    " train.evaluation.eval_metric."
                )

    def after_step(self) -> None:
        if not self.is_idle:
            super().after_step()

"""The config-file API: a trainer built from a lazy configuration."""

import copy
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor, nn

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright._torch_compat.probing import real_tensors
from trainwright.base.batch import to_batch
from trainwright.base.dist import get_averaging_rank, get_averaging_size, get_data_parallel_size, is_main_process
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, MissingFileError, nearest_of
from trainwright.base.lazy_names import ring
from trainwright.config.lazy.instantiation import instantiate
from trainwright.config.lazy.lazy_config import try_get_key
from trainwright.config.lazy.serialization import to_plain
from trainwright.config.schema.checks import validate
from trainwright.config.schema.sections import total_iterations
from trainwright.config.secrets import safe_trackers, without_secrets
from trainwright.config_trainer import setup
from trainwright.config_trainer.eager_trainer import EagerTrainer
from trainwright.data.collate import mixed
from trainwright.data.loaders import build_image_test_loader
from trainwright.data.loaders import set_position as set_loader_position
from trainwright.data.sampler import CyclicSampler
from trainwright.data.seeding import seed_everything
from trainwright.data.streaming import eval_stream_loader, is_stream
from trainwright.engine.best_metric import BestMetric
from trainwright.engine.extra_parameters import log_modes, refuse_sparse_gradients, warn_of_untrained
from trainwright.engine.folder.run_folder import RunFolder
from trainwright.engine.late_changes import late_changes
from trainwright.engine.loaders import batches_of_rank, is_dataset, num_rounds
from trainwright.engine.loss_fn import forward, sum_losses
from trainwright.engine.own_step import OwnStep
from trainwright.engine.pipeline_step import refuse_own_step, refuse_unseeded_loader
from trainwright.engine.resumed_settings import flat
from trainwright.engine.run import Run
from trainwright.engine.run_hooks import run_hooks, timing_facts
from trainwright.engine.run_methods import RunMethods, part_of_run
from trainwright.engine.spec import spec_of_cfg
from trainwright.engine.state import TrainingState
from trainwright.engine.step import Step
from trainwright.evaluation.adapters import evaluator_of
from trainwright.evaluation.evaluator import DatasetEvaluator
from trainwright.evaluation.loop import evaluate_loaders, loader_names, watched_batches, without_table
from trainwright.events.epoch_means import epoch_around, epoch_at
from trainwright.events.writers import default_writers
from trainwright.events.writers.base import EventWriter
from trainwright.hooks import (
    BestCheckpointer,
    EvalHook,
    HookBase,
    IterationTimer,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from trainwright.hooks.base import Period, condition
from trainwright.hooks.callbacks import RunCallbacks
from trainwright.hooks.callbacks.progress import epoch_lines
from trainwright.hooks.method_overrides import is_overridden, overridable
from trainwright.hooks.profile import profile_hook
from trainwright.hooks.timer import SettingNames
from trainwright.models.outputs import returned_losses, scalars_of, total_loss
from trainwright.optim.build import build_lr_scheduler, build_optimizer
from trainwright.optim.named import NamedOptimizers
from trainwright.parallel.meta_start import built_on
from trainwright.parallel.pipeline import pipeline_of
from trainwright.parallel.precision import autocast_and_scaler, without_autocast
from trainwright.parallel.rank_checks import check_same_settings, data_size

if TYPE_CHECKING:
    from trainwright.graph.graph_trainer import GraphBase

logger = logging.getLogger("trainwright.engine")


class ConfigRun(Run):
    """A run of a config file.

    Attributes:
        given: the configuration without the values that depend on the data; those are in ``trainer.cfg``.
        stepper: what makes the steps; ``built_stepper`` is the one that was built, which the user may have replaced.
        step: of a training whose steps are those of an EagerTrainer.
        listed_hooks: those of ``train.hooks``.
        calls: calls the callbacks.
        planned_epoch: the iterations of an epoch, as they were at the start.
    """

    given: DictConfig
    stepper: Any
    built_stepper: Any
    step: Step | None = None
    listed_hooks: list[HookBase]
    calls: RunCallbacks
    planned_epoch: int | Fraction | None

    def prepare(self, batch: Any, input_placement_device: Any = None, mixup_func: Any = None) -> Mapping[str, Any]:
        made: Mapping[str, Any] = self.trainer.get_batch(
            batch,
            self.device if input_placement_device is None else input_placement_device,
            getattr(self.batches.loader, "mixup_func", None) if mixup_func is None else mixup_func,
        )
        return made

    def prepare_eval(self, batch: Any) -> Any:
        return self.trainer.get_batch(batch, self.device)

    def forward(self, batch: Any) -> Any:
        return forward(self.model, batch, takes_all=True)

    def loss(self, batch: Any) -> Tensor:
        return sum_losses(returned_losses(self.model(**batch)))

    def evaluate(self) -> dict[str, Any]:
        trainer = self.trainer
        with self.evaluated_weights():
            results: dict[str, Any] = trainer.test(trainer.cfg, trainer.test_loader, self.model)
        return results

    def eval_loaders(self) -> list[Any]:
        return list(self.trainer.test_loader)

    def examples(self) -> Any:
        if not self.trainer.test_loader:
            raise ConfigError("DefaultTrainer.export: there is no example; pass a batch, or set dataloader.test.")
        return self.trainer.test_loader[0]

    def position_of(self, update: int) -> tuple[int, int] | None:
        trainer, sampler = self.trainer, getattr(self.batches.loader, "batch_sampler", None)
        has_own = any(is_overridden(one, "run_step") for one in (self.built_stepper, trainer))
        has_own |= self.stepper is not self.built_stepper
        if has_own or not isinstance(sampler, CyclicSampler):
            return None
        done = trainer.samples_done + (update - 1 - trainer.iterations_done) * trainer.samples_per_iter
        return done, self.spec.gradient_accumulation_steps

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
        done = self.trainer.iterations_done
        self.checkpointer.save(f"model_{done - 1:07d}", iteration=done - 1)

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        return bool(self.trainer.cfg.train.evaluation.enabled and self.trainer.test_loader)

    @property
    def best_metric(self) -> BestMetric:  # type: ignore[override]
        trainer = self.trainer
        are_named = _names_loaders(trainer.cfg) or len(trainer.test_loader) > 1
        return BestMetric(
            self.spec,
            lambda: trainer._evaluator,
            loader_names(trainer.test_loader) if are_named else (),
            evaluates=self.evaluates,
            has_own_results=partial(is_overridden, trainer, "test"),
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
        calls, is_pipeline, has_own = self.calls, pipeline_of(self.model) is not None, self.trainer._has_own_step
        if not calls.is_fed or not (has_own or is_pipeline or self.spec.gradient_accumulation_steps > 1):
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
        epoch, first = epoch_at(self.planned_epoch, steps // self.batches_per_update)
        return epoch, first * self.batches_per_update

    @property
    def batches_per_update(self) -> int:
        """As callbacks count them."""
        return self.spec.gradient_accumulation_steps if self.trainer._feeds_callbacks else 1

    def num_samples(self) -> int | None:
        """Those of an epoch."""
        return setup.num_samples(self.batches.loader, self.spec.batch_size)

    def iterations_per_epoch(self) -> int | Fraction | None:
        """None: unknown. A fraction where an epoch ends within an iteration."""
        return setup.iterations_per_epoch(self.trainer.cfg.train, self.num_samples())

    def own_facts(self) -> dict[str, Any]:
        tests, size = self.trainer.test_loader, self.trainer.cfg.train.test_micro_batch_size
        return {
            "num_train": self.num_samples(),
            "num_eval": sum(setup.num_samples(loader, size) or 0 for loader in tests),
            "iterations_per_epoch": self.iterations_per_epoch(),
            "settings": setup.changed_settings(self.given),
        }

    def own_record(self) -> dict[str, Any]:
        named = enumerate(self.trainer.test_loader)
        tests = {str(getattr(one, "name", at)): getattr(one, "dataset", one) for at, one in named}
        data = {f"test {name}" if len(tests) > 1 else "test": one for name, one in tests.items()}
        train = getattr(self.batches.loader, "dataset", self.batches.loader)
        return {"samples_per_iteration": self.trainer.samples_per_iter, "data": {"train": train} | data}

    def next_commands(self) -> list[str]:
        has_ended = any(callback.has_ended_run for callback in self.built_in_callbacks)
        return setup.next_commands(
            self.trainer.cfg, self.given, is_own_trainer=self.has_own_trainer, has_ended_early=has_ended
        )

    def schedule_length(self, schedule: Any) -> int:
        length: int = self.trainer.max_iter
        return length

    def use_learning_rate(self, rate: float) -> None:
        self.trainer.cfg.optim.update({"lr": rate})
        self.settings_read["optim"]["lr"] = rate

    def settings_now(self) -> dict[str, Any]:
        return setup.sections_of(self.trainer.cfg)

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
        for cfg in (self.given, self.trainer.cfg):
            for name, value in settings.items():
                OmegaConf.update(cfg, name, value)

    def settings_of_copy(self, folder: Path, changes: dict[str, Any], **kind: bool) -> DictConfig:
        if self.stepper is not self.built_stepper:
            raise ConfigError(
                "check: trainer._trainer was replaced, and cannot be copied. Override train_step instead."
            )
        return setup.settings_of_copy(self.given, self.trainer.cfg, folder, changes, **kind)

    def change_copy(self, new: "DefaultTrainer", memo: dict[int, Any]) -> None:
        if not new.run.folder.resume:
            new.model.load_state_dict(self.model.state_dict())
        memo[id(self.model)] = new.model

    def rebuild_model(self) -> nn.Module:
        model: nn.Module = self.trainer.build_model(self.trainer.cfg)
        return model


@overridable
class DefaultTrainer(RunMethods):
    """Train as a configuration describes: ``DefaultTrainer(cfg).train()``.

    Every part comes from a ``build_*`` method that a subclass may override. ``self._trainer``, an :class:`EagerTrainer`
    or :class:`GraphTrainer`, defines the steps; it may be replaced after ``__init__``.

    The path of a batch: ``train`` (engine/loop.py) calls ``Step.run`` (engine/step.py), which ``EagerTrainer.new_step``
    has built; that calls ``EagerTrainer.train_micro_batch``, which calls the model. ``run_step`` and ``train_step`` of
    this class are called in between only if they are overridden.

    Attributes:
        cfg: the complete configuration of the run, with defaults; the caller's ``cfg`` is not changed.
        model, optimizer, lr_scheduler, train_loader, test_loader, checkpointer, device: as built.
    """

    run: ConfigRun
    run_kind = ConfigRun
    _trainer: Any = part_of_run("stepper")
    _evaluator: DatasetEvaluator | None = None
    _eval_hook: EvalHook | None = None  # and the others: by build_hooks, unless a user's builds its own list
    _write_hook: PeriodicWriter | None = None
    _eval_period: Period = 0

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__()
        run = self.run
        as_given, run.device = setup.started(cfg)
        self.cfg = cfg = copy.deepcopy(as_given)  # values that depend on the data are written into it below
        seed_everything(cfg.train.seed)  # equal on all ranks, for equal initial weights
        self._build_callbacks(as_given)
        seed_everything(cfg.train.seed)  # callbacks may have drawn numbers
        run.folder = RunFolder(cfg.train.output_dir, resume=bool(try_get_key(cfg, "train.resume", default=False)))
        run.folder.recover()
        run.given, self._has_own_step = as_given, is_overridden(self, "train_step")
        self._build_data()
        run.use_spec(spec_of_cfg(cfg, run.device, run.given))
        self._build_weights()
        self._build_step()
        run.state = TrainingState(self)
        run.build_checkpointer(run.folder.path)
        self.resume_or_load(run.folder.resume)
        run.fill_weights()
        run.set_position()
        run.watch_hardest()
        run.folder.prepare(as_given)
        self._register_hooks()
        run.settings_read = run.settings_now()

    # The parts of a run, in the order in which they need each other.

    def _build_callbacks(self, given: DictConfig) -> None:
        """The callbacks and hooks of the configuration, and what calls the callbacks."""
        run, me = self.run, weakref.proxy(self)
        run.listed_hooks = setup.own_parts(given, "train.hooks")
        run.listed_callbacks = setup.own_parts(given, "train.callbacks")
        for callback in run.listed_callbacks:
            run.callbacks.add_callback(callback, singleton=False)
        run.calls = RunCallbacks(
            run.callbacks,
            run.control,
            epoch_at=lambda steps: me.run.epoch_at(steps),
            evaluate=lambda: me._evaluate_now(),
            log=lambda: me._log_now(),
            is_due=lambda: bool(condition(me.cfg.train.log_period)(me)),
            eval_is_due=lambda: bool(condition(me._eval_period)(me)),
            steps_done=lambda: me.start_iter * me.run.batches_per_update,
            is_optional=True,
            early_stopping="train.early_stopping",
        )

    def _build_data(self) -> None:
        """The tokenizer, the loaders, and the length of the run."""
        cfg = self.cfg
        self.tokenizer = self.build_tokenizer(cfg)
        with real_tensors():  # in an estimate, too
            built = self.build_train_loader(cfg, self.tokenizer)
            self.train_loader: Any = built[0] if isinstance(built, tuple | list) else built
            setup.check_loader(self.train_loader, cfg.train.train_micro_batch_size)
            setup.limit_data(cfg.train, self.train_loader)
            self.test_loader: Any = self.build_test_loader(cfg, self.tokenizer)
            near = None if "test" in cfg.dataloader else nearest_of("test", map(str, cfg.dataloader))
            if near is not None and not self.test_loader:
                logger.warning("There is no dataloader.test, so nothing is evaluated. Is dataloader.%s it?", near)
            sizes = {place: data_size(getattr(one, "dataset", None)) for place, one in enumerate(self.test_loader)}
            check_same_settings({"dataloader": {"test": sizes}})
        if cfg.train.overfit_batches is not None:
            self.test_loader = [setup.overfit_loader(self.train_loader, cfg.train.train_micro_batch_size)]
        self.auto_scale_hyperparams(cfg, self.train_loader)
        setup.scale_shares(cfg.train)
        self.samples_per_iter, self.samples_done = cfg.train.global_batch_size, cfg.train.consumed_train_samples
        self.start_iter, self.max_iter = cfg.train.start_iter, cfg.train.train_iter
        self.evaluates_on_start = bool(cfg.train.eval_on_start)

    def _build_weights(self) -> None:
        run, cfg = self.run, self.cfg
        with built_on(meta=bool(cfg.train.dist.meta_init)):
            run.model = self.build_model(cfg)
        run.autocast, run.grad_scaler = autocast_and_scaler(run.device) if cfg.train.amp.enabled else (None, None)
        if not cfg.train.amp.get("evaluation", False):
            run.evaluated_precision = partial(without_autocast, run.model)
        run.place_model(splits_scores=not self._has_own_step, autocast=run.autocast)
        if (pipeline := pipeline_of(run.model)) is not None:
            setup.check_num_layers(cfg.train.dist, pipeline.layer_stages)
        built: Any = self.build_optimizer(cfg, run.model)
        run.optimizer = NamedOptimizers(built) if isinstance(built, Mapping) else built
        schedule: Any = self.build_lr_scheduler(cfg, run.optimizer)
        several = isinstance(schedule, Mapping)
        run.lr_scheduler, run.lr_schedulers = (None, dict(schedule)) if several else (schedule, {})
        seed_everything(cfg.train.seed + get_averaging_rank())  # from here on each of these draws other numbers

    def _build_step(self) -> None:
        run, cfg = self.run, self.cfg
        steps, pipeline = run.spec.gradient_accumulation_steps, pipeline_of(run.model)
        settings: dict[str, Any] = {
            "grad_scaler": run.grad_scaler,
            "skip_non_finite": run.spec.non_finite == "skip",
            "loss_ignores": run.spec.loss_ignores,
            "find_unused_parameters": run.spec.find_unused_parameters,
            "wraps_model": not self._has_own_step,
        }
        refuse_own_step(pipeline, type(self).__name__, ["train_step"] if self._has_own_step else [])
        if pipeline is not None:
            refuse_unseeded_loader(self.train_loader, "dataloader.train")
            pipeline.check_length(steps, "train.num_accumulation_steps")
        if not self.is_copy:
            log_modes(run.model, run.spec)
        if not run.spec.graph:
            self._trainer = EagerTrainer(run.model, self.train_loader, run.optimizer, steps, **settings)
        else:
            graph = self.build_graph(cfg, run.model, run.optimizer, run.lr_scheduler)
            self._trainer = ring("graph.graph_trainer").GraphTrainer(graph, self.train_loader, steps, **settings)
        run.built_stepper = self._trainer
        run.batches, run.update = self._trainer.batches, self._trainer.steps.update
        run.own_step, run.step_methods = OwnStep(run, ["train_step"]), ("run_step", "train_step")

    # Parts that a subclass may build differently.

    @classmethod
    def build_tokenizer(cls, cfg: DictConfig) -> Any:
        """The tokenizer that ``cfg.tokenization.tokenizer`` describes; None without that section.

        With ``tokenization.make_vocab_size_divisible_by`` the model gets the tokenizer's padded ``vocab_size``.
        """
        node = try_get_key(cfg, "tokenization.tokenizer")
        if node is None:
            return None
        tokenizer = instantiate(node)
        multiple = try_get_key(cfg, "tokenization.make_vocab_size_divisible_by")
        settings = try_get_key(cfg, "model.cfg", "model")
        if multiple and isinstance(settings, DictConfig) and "vocab_size" in settings:
            settings.vocab_size = tokenizer.padded_vocab_size(multiple)
        return tokenizer

    @classmethod
    def build_model(cls, cfg: DictConfig) -> nn.Module:
        """The model that ``cfg.model`` describes."""
        model = instantiate(cfg.model)
        if isinstance(model, DictConfig | dict) and "_target_" not in cfg.model:
            raise ConfigTypeError(
                "model: has no _target_, so there is nothing to call. Describe the model with "
                "model = LazyCall(Net)(...), in YAML model: {_target_: module.Net}, or override build_model."
            )
        if not isinstance(model, nn.Module):
            raise ConfigTypeError(f"model: got {type(model).__name__}; it must be a torch.nn.Module.")
        return model

    @classmethod
    def build_optimizer(cls, cfg: DictConfig, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer that ``cfg.optim`` describes, over the model's parameters; or several by name, in a dict."""
        return build_optimizer(cfg.optim, model)

    @classmethod
    def build_lr_scheduler(
        cls, cfg: DictConfig, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The schedule that ``cfg.train.scheduler`` describes; of several optimizers, a dict of schedules by name."""
        return build_lr_scheduler(cfg.train.scheduler, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: DictConfig, tokenizer: Any = None) -> Any:
        """The training loader that ``cfg.dataloader.train`` describes, or a tuple whose first item it is."""
        if try_get_key(cfg, "dataloader.train") is None:
            raise ConfigKeyError(
                "dataloader.train: missing. A training needs its loader, for example "
                "dataloader.train = LazyCall(build_image_train_loader)(dataset=...)."
            )
        given = {
            "train_batch_size": cfg.train.train_micro_batch_size,
            "test_batch_size": cfg.train.test_micro_batch_size,
            "consumed_samples": cfg.train.consumed_train_samples,
            "seed": cfg.train.seed,
            "tokenizer": tokenizer,
        }
        return setup.call_with_known(cfg.dataloader.train, given)

    @classmethod
    def build_test_loader(cls, cfg: DictConfig, tokenizer: Any = None) -> list[Any]:
        """The loaders that ``cfg.dataloader.test`` lists, or has by name; an empty list without one."""
        nodes = try_get_key(cfg, "dataloader.test", default=None)
        if nodes is None:
            return []
        if not isinstance(nodes, list | tuple | ListConfig | Mapping | DictConfig):
            raise ConfigTypeError(f"dataloader.test: got {type(nodes).__name__}; it must be a list of loaders.")
        given = {"test_batch_size": cfg.train.test_micro_batch_size, "seed": cfg.train.seed, "tokenizer": tokenizer}
        if not isinstance(nodes, Mapping | DictConfig):
            return [setup.call_with_known(node, given) for node in nodes]
        named = {str(name): setup.call_with_known(node, given) for name, node in nodes.items()}
        for name, loader in named.items():
            loader.name = name  # of its results
        return list(named.values())

    @classmethod
    def build_graph(
        cls,
        cfg: DictConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        is_train: bool = True,
    ) -> "GraphBase":
        """The compiled model of graph mode."""
        graph: GraphBase = ring("graph.graph_trainer").GraphBase(
            model, optimizer if is_train else None, backend=cfg.graph.backend
        )
        return graph

    @classmethod
    def build_evaluator(cls, cfg: DictConfig) -> DatasetEvaluator:
        """The evaluator that ``cfg.train.evaluation.evaluator`` describes."""
        evaluator = instantiate(cfg.train.evaluation.evaluator)
        return evaluator_of(evaluator, "train.evaluation.evaluator")

    def build_hooks(self) -> list[HookBase | None]:
        """The hooks, in the order of their calls."""
        train, evaluation, saving = self.cfg.train, self.cfg.train.evaluation, self.cfg.train.checkpointer
        checkpointer, per_epoch = self.run.checkpointer, self.run.iterations_per_epoch()
        save_period = self._period(saving.period, saving.get("save_model_after_n_epoch"))
        eval_hook: EvalHook | None = None
        best: BestCheckpointer | None = None
        if self.run.evaluates:
            self._evaluator = evaluator = self.build_evaluator(self.cfg)
            metric = str(evaluation.eval_metric)
            if not is_overridden(self, "test"):  # a user's may return more results
                setup.check_eval_metric(evaluation, evaluator)
                metric = self.run.best_metric.key
            eval_period = self._period(evaluation.eval_period, evaluation.get("eval_after_n_epoch"))
            eval_hook = EvalHook(eval_period, self.run.calls.evaluating(partial(self._evaluate, evaluator)))
            self._eval_period = eval_period
            best = BestCheckpointer(
                eval_period, checkpointer, metric, evaluation.eval_mode, top_k=saving.save_top_k or 1
            )
        elif saving.save_top_k is not None:
            logger.warning("train.checkpointer.save_top_k has no effect: nothing is evaluated.")
        lines: HookBase | None = None
        if train.progress_bar:
            shown = None if eval_hook is None else evaluation.eval_period
            lines = epoch_lines(per_epoch, self.max_iter, train.log_period, eval_period=shown, best=best)
        epoch_of = None if per_epoch is None else partial(epoch_around, per_epoch)
        writer = PeriodicWriter(lambda: self.build_writers(), train.log_period, epoch_of=epoch_of)
        self._eval_hook, self._write_hook = eval_hook, writer
        hooks = [
            IterationTimer(facts=lambda trainer: timing_facts(trainer.run, SETTING_NAMES)),
            LRScheduler(),
            PeriodicCheckpointer(checkpointer, save_period, max_to_keep=saving.max_to_keep),
            eval_hook,  # the final evaluation may take long: after the save
            best,
            self.run.calls,
            *self.run.listed_hooks,
            profile_hook(train.profile, self.run.folder.path),
            lines,
            writer if is_main_process() else None,
        ]
        return [hook for hook in hooks if hook is not None]

    def _period(self, iterations: int, epochs: int | None) -> Period:
        """``iterations``, or the ends of each ``epochs`` epochs, which may lie within an iteration."""
        per_epoch = self.run.iterations_per_epoch()
        if epochs is None or per_epoch is None:
            return iterations
        whole, parts = (per_epoch * epochs).as_integer_ratio()
        return lambda: (self.iter + 1) * parts // whole > self.iter * parts // whole

    def build_writers(self) -> list[EventWriter]:
        """The writers of metrics: the console, ``metrics.json``, TensorBoard, and those of ``train.trackers``."""
        train, trackers = self.cfg.train, None
        settings, _ = without_secrets(to_plain(self.cfg)[0])
        if train.trackers:
            from trainwright.config.validation import trackers_of  # imports pydantic, which most runs do not need

            trackers = trackers_of(to_plain(train.trackers)[0])
        return default_writers(
            self.run.folder.path,
            self.max_iter,
            batch_size=train.global_batch_size,
            progress_bar=train.progress_bar,
            trackers=safe_trackers(trackers),
            settings=settings,
            iterations_per_epoch=self.run.iterations_per_epoch(),
        )

    @classmethod
    def get_batch(cls, data: Any, input_placement_device: Any = None, mixup_func: Any = None) -> Mapping[str, Any]:
        """The model's arguments: the fields of ``data`` on the device, ``mixup_func(images, labels)`` applied."""
        batch: dict[str, Any] = to_batch(data, "cpu" if input_placement_device is None else input_placement_device)
        return batch if mixup_func is None else mixed(mixup_func, batch)

    @classmethod
    def auto_scale_hyperparams(cls, cfg: DictConfig, data_loader: Any) -> None:
        """Resolve in ``cfg`` what depends on the data: iterations, warm-up, milestones, periods in epochs."""
        setup.scale_to_data(cfg, data_loader)

    @classmethod
    def test(
        cls,
        cfg: DictConfig,
        test_loaders: Sequence[Any],
        model: nn.Module,
        evaluator: DatasetEvaluator | None = None,
    ) -> dict[str, Any]:
        """Evaluate ``model`` on each loader: the results of a single one in a list, or of each by name."""
        settings = cfg.train
        return evaluate_loaders(
            model,
            test_loaders,
            cls.build_evaluator(cfg) if evaluator is None else evaluator,
            batch_size=settings.test_micro_batch_size * get_averaging_size(),
            eval_iter=settings.evaluation.eval_iter,
            limit=settings.overfit_batches or settings.limit_eval_batches,
            are_named=_names_loaders(cfg),
            get_batch=cls.get_batch,
            loss_ignores=settings.loss_ignores,
        )

    def predict(self, data: Any = None, *, iterate: bool = False) -> Any:
        """The model's outputs for a data set, a list of samples or a loader, on the CPU, in the order of the samples.

        By default for the first loader of ``dataloader.test``. Data sets and lists are read with
        ``train.test_micro_batch_size`` samples per process. Outputs of batches are joined, or with ``iterate`` returned
        one after another, as by :meth:`Trainer.predict <trainwright.Trainer.predict>`. Every process must call it.

        Raises:
            ConfigError: there is neither ``data`` nor a loader in ``dataloader.test``.
        """
        if data is None and not self.test_loader:
            raise ConfigError("DefaultTrainer.predict: there is no data; pass some, or set dataloader.test.")
        loader, train = self.test_loader[0] if data is None else data, self.cfg.train
        if is_dataset(loader) and is_stream(loader):  # each rank reads it completely and keeps its batches
            loader = eval_stream_loader(loader, train.test_micro_batch_size, 0, None)
        elif is_dataset(loader):
            datasets = [loader] if isinstance(loader, list) else loader  # a list would be several data sets
            loader = build_image_test_loader(datasets, train.test_micro_batch_size, num_workers=0, seed=train.seed)
        return self.run.predict(
            lambda: map(self.run.prepare_eval, batches_of_rank(loader)),
            self.run.forward,
            iterate=iterate,
            num_batches=num_rounds(loader),
        )

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue from the latest checkpoint of the folder, or start with the weights of ``train.load_weight``."""
        continues = resume and self.checkpointer.has_checkpoint()
        if resume and not continues:
            logger.warning("%s holds no checkpoint to resume from: starting from step 0.", self.cfg.train.output_dir)
        elif resume:
            self.run.folder.resume = True  # also if a program calls this method
        try:
            self.checkpointer.resume_or_load(self.cfg.train.load_weight or "", resume=resume)
        except MissingFileError as error:
            if continues:
                raise
            raise MissingFileError(f"train.load_weight: {error}") from error
        self.run.set_position()

    # Called by a user's own step.

    def train_step(self, model: Any, inputs: Any) -> Mapping[str, Any]:
        """One micro-batch: forward and backward; returns the outputs to log.

        An override also steps: it calls :meth:`backward` and :meth:`step` (see ``docs/custom-training.md``).
        """
        outputs: Mapping[str, Any] = self._trainer.train_micro_batch(model, inputs)
        return outputs

    # Implementation.

    def _register_hooks(self) -> None:
        run, me = self.run, weakref.proxy(self)
        run.planned_epoch = run.iterations_per_epoch()
        self.register_hooks(
            run_hooks(
                run,
                setup.with_parts(self.build_hooks(), [run.calls, *run.listed_hooks]),
                own_step=run.own_step if self._has_own_step else None,
                check_period=self.cfg.train.log_period,
                save=lambda: me.run.save(),
                steps_done=lambda: self.iter,
                has_passed=lambda start, every: self.iter >= start and (self.iter + 1) % every == 0,
                total_steps=self.max_iter,
                steps_per_epoch=int(self.run.iterations_per_epoch() or 0) or None,
            )
        )
        run.own_hooks = tuple(run.hooks)

    @property
    def _feeds_callbacks(self) -> bool:
        """Whether callbacks see each batch; in a run_step of the user's own, an iteration is one."""
        stepper = self._trainer
        has_own = not isinstance(stepper, EagerTrainer) or stepper.has_own_run_step()
        return not (has_own or is_overridden(self, "run_step"))

    def run_step(self) -> None:
        """One iteration of ``self._trainer``, whose step ``train`` calls directly unless this method is overridden."""
        self._trainer.iter = self.iter
        self._step_of_stepper()()

    def _bind_run_step(self) -> tuple[Any, Any]:
        self._trainer.phases, self.run.batches = self.phases, self.run.built_stepper.batches
        if isinstance(self._trainer, EagerTrainer):
            self.run.update = self._trainer.steps.update
        has_own_batch = is_overridden(self, "get_batch")
        is_own = is_overridden(self, "run_step")
        has_own = is_own or has_own_batch or is_overridden(self.run.built_stepper, "run_step")
        # Not if a method of the user's may draw random numbers.
        self.run.batches.prefetches_to = None if has_own else self.device
        self._warn_of_replaced_stepper()
        step = self._step_of_stepper()
        return self._trainer, self.run_step if is_own else step

    def _warn_of_replaced_stepper(self) -> None:
        """Settings that ``self._trainer``, perhaps the user's replacement, was not built with."""
        stepper, steps = self._trainer, self.cfg.train.num_accumulation_steps
        kind, own_steps = type(stepper).__name__, getattr(stepper, "grad_acc_steps", None)
        if stepper is self.run.built_stepper:
            instead = "override build_optimizer, or set cfg.optim"
            stepper.steps.check_assigned("DefaultTrainer", {"optimizer": (self.optimizer, instead)})
        if is_overridden(self, "train_step") and not self._has_own_step:
            raise ConfigError("DefaultTrainer.train_step: was assigned after __init__; override it in a subclass.")
        if self._has_own_step and getattr(stepper, "has_own_run_step", lambda: True)():
            logger.warning(
                "%s.train_step has no effect: trainer._trainer, a %s, has its own run_step.", type(self).__name__, kind
            )
        if own_steps not in (None, steps):
            logger.warning(
                "train.num_accumulation_steps=%d has no effect: trainer._trainer, a %s, was built with"
                " grad_acc_steps=%d. Pass cfg.train.num_accumulation_steps to it.", steps, kind, own_steps,
            )  # fmt: skip

    def _step_of_stepper(self) -> Callable[[], None]:
        stepper = self._trainer
        if isinstance(stepper, EagerTrainer) and not stepper.has_own_run_step():
            get_batch, run = self.run.prepare if is_overridden(self, "get_batch") else None, self.run
            stepper.callbacks = run.calls if run.calls.is_fed else None
            run.step = stepper.new_step(get_batch, self.device, self.train_step if self._has_own_step else None)
            stepper.steps.use_after_batch(run.step, run.after_batch())
            return run.step.run
        return setup.bind_arguments(stepper.run_step, self.run.prepare, self.device)

    def _apply_settings(self, names: set[str]) -> None:
        train = self.cfg.train
        validate(self.cfg)
        if names & {"train.train_iter", "train.train_epoch"}:
            length = total_iterations(train, self.run.num_samples(), train.global_batch_size)
            longer = copy.deepcopy(self.run.given)
            longer.train.update({"train_iter": length, "train_epoch": 0})
            longer.train.update({name: train[name] for name in setup.BATCH_SIZES})
            self.auto_scale_hyperparams(longer, self.train_loader)
            train.update({"train_iter": length, "scheduler": longer.train.scheduler})
            train.warmup_iter = longer.train.warmup_iter
            self.max_iter = length
            setup.extend_schedules(self.run, lambda optimizer: self.build_lr_scheduler(self.cfg, optimizer))
        self.evaluates_on_start = bool(train.eval_on_start)
        self.run.use_spec(spec_of_cfg(self.cfg, self.run.device, self.run.given))

    def _before_first_step(self) -> None:
        with without_compiler():
            self.optimizer.zero_grad()
        self.run.state.restore()
        self.run.hold_batch_norms(self.model)
        calls = self.run.calls
        calls.is_fed = self._feeds_callbacks and not calls.is_idle
        self.run.update.clear_also(warn_of_untrained(self))
        refuse_sparse_gradients(self.run)

    def after_train(self) -> None:
        try:
            super().after_train()
        finally:
            self.run.step, planned = None, self.run.calls.planned_end
            self.max_iter = self.max_iter if planned is None else planned

    def _evaluate_now(self) -> None:
        if self._eval_hook is None:
            raise ConfigError(
                "A callback has set trainercontrol.should_evaluate, and this training evaluates nothing: it needs"
                " dataloader.test, train.evaluation.enabled and the hooks of build_hooks."
            )
        self._eval_hook.evaluate()

    def _log_now(self) -> None:
        if self._write_hook is None:
            raise ConfigError("A callback has set trainercontrol.should_log, and build_hooks has no hook that writes.")
        if is_main_process():
            self._write_hook.write()

    def _evaluate(self, evaluator: DatasetEvaluator) -> dict[str, Any]:
        self.storage.reduce()  # writers write a row for the evaluation
        watching = watched_batches(self.run.calls.eval_batches)
        with self.run.evaluated_weights(), self.run.watching_hardest(), without_table(), watching:
            return self.test(self.cfg, self.test_loader, self.model, evaluator)


SETTING_NAMES = SettingNames(
    workers="num_workers of dataloader.train",
    no_workers="num_workers=0 of dataloader.train",
    asynchronous="train.checkpointer.asynchronous=True",
    profile="train.profile=True",
    save="a larger period or save_model_after_n_epoch of train.checkpointer",
    evaluate="a larger eval_period or eval_after_n_epoch of train.evaluation",
)


def _names_loaders(cfg: DictConfig) -> bool:
    """Whether the test loaders are a dictionary, whose keys name the results."""
    is_named = isinstance(try_get_key(cfg, "dataloader.test", default=None), Mapping | DictConfig)
    return is_named and cfg.train.overfit_batches is None

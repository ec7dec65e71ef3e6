"""The config-file API: a trainer built from a lazy configuration."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from trainwright._torch_compat.probing import real_tensors
from trainwright.config.errors import ConfigError
from trainwright.config.lazy.lazy_config import try_get_key
from trainwright.data.batch import to_batch
from trainwright.data.collate import mixed
from trainwright.data.loaders import set_position
from trainwright.data.seeding import seed_everything
from trainwright.engine.default import parts
from trainwright.engine.default.eager_trainer import EagerTrainer
from trainwright.engine.default.hooks import build_hooks
from trainwright.engine.default.length import (
    iterations_per_epoch,
    num_samples,
    scale_shares,
    scale_to_data,
    update_length,
)
from trainwright.engine.default.setup import (
    bind_arguments,
    changed_settings,
    check_num_layers,
    limit_data,
    next_commands,
    overfit_loader,
    started,
)
from trainwright.engine.default.stepper import build_stepper, settings_of_step, warn_of_settings_without_effect
from trainwright.engine.extra_parameters import log_untrained
from trainwright.engine.folder.run_folder import RunFolder
from trainwright.engine.folder.summary import log_recomputed
from trainwright.engine.hardest_samples import hardest_samples
from trainwright.engine.loss_fn import explain_forward, returned_losses, sum_losses
from trainwright.engine.own_step import OwnStep
from trainwright.engine.run_trainer import RunTrainer
from trainwright.engine.spec import spec_of_cfg
from trainwright.engine.state import TrainingState
from trainwright.engine.trainer.loaders import batches_of_rank, is_dataset, num_rounds
from trainwright.engine.update import Update
from trainwright.evaluation.evaluator import DatasetEvaluator
from trainwright.evaluation.loop import evaluate_loaders, shown_in_epoch_line
from trainwright.events.writers import EventWriter
from trainwright.hooks import HookBase
from trainwright.hooks.method_overrides import is_overridden, overridable
from trainwright.lazy_names import ring
from trainwright.optim.build import build_lr_scheduler, build_optimizer
from trainwright.optim.named import NamedOptimizers, by_name
from trainwright.parallel.dist import get_data_parallel_rank, get_data_parallel_size
from trainwright.parallel.parallelize import parallelize
from trainwright.parallel.pipeline import pipeline_of
from trainwright.parallel.precision import autocast_and_scaler
from trainwright.parallel.rank_checks import check_same_settings, data_size

if TYPE_CHECKING:
    from trainwright.graph.graph_trainer import GraphBase

logger = logging.getLogger("trainwright.engine")


@overridable
class DefaultTrainer(RunTrainer):
    """Train as a configuration describes: ``DefaultTrainer(cfg).train()``.

    Every part comes from a ``build_*`` method that a subclass may override. ``self._trainer``, an :class:`EagerTrainer`
    or :class:`GraphTrainer`, defines the steps; it may be replaced after ``__init__``.

    The path of a batch: ``train`` (engine/loop.py) calls ``Step.run`` (engine/step.py), which ``EagerTrainer.new_step``
    has built; that calls ``EagerTrainer._train_micro_batch``, which calls the model. ``run_step`` and ``train_step`` of
    this class are called in between only if they are overridden.

    Attributes:
        cfg: the complete configuration of the run, with defaults; the caller's ``cfg`` is not changed.
        model, optimizer, lr_scheduler, train_loader, test_loader, checkpointer, device: as built.
    """

    _step_methods = ("run_step", "train_step")

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__()
        as_given, self.device = started(cfg)
        self.cfg = cfg = copy.deepcopy(as_given)  # values that depend on the data are written into it below
        seed_everything(cfg.train.seed)  # equal on all ranks, for equal initial weights
        resume = bool(try_get_key(cfg, "train.resume", default=False))
        self._folder = RunFolder(cfg.train.output_dir, resume=resume)
        self._folder.recover()

        self.tokenizer = self.build_tokenizer(cfg)
        with real_tensors():  # in an estimate, too
            loaders = self.build_train_loader(cfg, self.tokenizer)
            self.train_loader = loaders[0] if isinstance(loaders, tuple | list) else loaders
            limit_data(cfg.train, self.train_loader)
            self.test_loader = self.build_test_loader(cfg, self.tokenizer)
            sizes = {place: data_size(getattr(one, "dataset", None)) for place, one in enumerate(self.test_loader)}
            check_same_settings({"dataloader": {"test": sizes}})
        if cfg.train.overfit_batches is not None:
            self.test_loader = [overfit_loader(self.train_loader, cfg.train.train_micro_batch_size)]
        self.auto_scale_hyperparams(cfg, self.train_loader)
        scale_shares(cfg.train)
        self.run.spec = spec_of_cfg(cfg, self.device)

        self.model, recompute = self.build_model(cfg), cfg.train.activation_checkpoint.enabled
        self._autocast, self._grad_scaler = autocast_and_scaler(self.device) if cfg.train.amp.enabled else (None, None)
        recomputed = parallelize(
            self.model, self.device, recompute=recompute, autocast=self._autocast,
            splits_scores=not is_overridden(self, "train_step"),
            find_unused_parameters=cfg.train.dist.find_unused_parameters,
        )  # fmt: skip
        if recompute:
            log_recomputed(recomputed)
        if (pipeline := pipeline_of(self.model)) is not None:
            check_num_layers(cfg.train.dist, pipeline.layer_stages)
        optimizer: Any = self.build_optimizer(cfg, self.model)
        self.optimizer = NamedOptimizers(optimizer) if isinstance(optimizer, Mapping) else optimizer
        schedule: Any = self.build_lr_scheduler(cfg, self.optimizer)
        self.lr_schedulers = dict(schedule) if isinstance(schedule, Mapping) else {}
        self.lr_scheduler = None if isinstance(schedule, Mapping) else schedule
        seed_everything(cfg.train.seed + get_data_parallel_rank())  # from here on each data rank draws other numbers

        self.optimizers = by_name(self.optimizer)
        self._has_own_step = is_overridden(self, "train_step")
        self._trainer: Any = build_stepper(self)
        self.evaluates_on_start = bool(cfg.train.eval_on_start)
        self._built_stepper = self._trainer
        lr, seed = try_get_key(cfg, "optim.lr"), cfg.train.seed
        self._state = TrainingState(self, lr=lr, seed=seed, num_samples=self._num_samples())
        saving = cfg.train.checkpointer
        self._build_checkpointer(
            cfg.train.output_dir, trainable_only=saving.save_trainable_only, asynchronous=saving.asynchronous
        )
        self.samples_per_iter = cfg.train.global_batch_size
        self.start_iter, self.max_iter = cfg.train.start_iter, cfg.train.train_iter
        self._given, self._planned = as_given, self.max_iter
        self.samples_done = cfg.train.consumed_train_samples
        self.resume_or_load(resume)
        self._set_position()

        self._watching_hardest = hardest_samples(
            self, cfg.train.evaluation.hardest_samples, self._folder, "train.evaluation.hardest_samples",
            is_compiled=cfg.graph.enabled,
        )  # fmt: skip
        self._folder.prepare(as_given)
        self._own_step = OwnStep(["train_step"], partial(settings_of_step, self))
        self._register_run_hooks(
            self._own_step if self._has_own_step else None,
            check_period=cfg.train.log_period,
            save=self._save,
            steps_done=lambda: self.iter,
            has_passed=lambda start, every: self.iter >= start and (self.iter + 1) % every == 0,
            total_steps=self.max_iter,
            steps_per_epoch=int(self._iterations_per_epoch() or 0) or None,
        )

    # Parts that a subclass may build differently.

    @classmethod
    def build_tokenizer(cls, cfg: DictConfig) -> Any:
        """The tokenizer that ``cfg.tokenization.tokenizer`` describes; None without that section.

        With ``tokenization.make_vocab_size_divisible_by`` the model gets the tokenizer's padded ``vocab_size``.
        """
        return parts.build_tokenizer(cfg)

    @classmethod
    def build_model(cls, cfg: DictConfig) -> nn.Module:
        """The model that ``cfg.model`` describes."""
        return parts.build_model(cfg)

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
        return parts.build_train_loader(cfg, tokenizer)

    @classmethod
    def build_test_loader(cls, cfg: DictConfig, tokenizer: Any = None) -> list[Any]:
        """The loaders that ``cfg.dataloader.test`` lists, or has by name; an empty list without one."""
        return parts.build_test_loaders(cfg, tokenizer)

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
        return parts.build_evaluator(cfg)

    def build_hooks(self) -> list[HookBase | None]:
        """The hooks, in the order of their calls."""
        return build_hooks(self)

    def build_writers(self) -> list[EventWriter]:
        """The writers of metrics: the console, ``metrics.json``, TensorBoard."""
        return parts.build_writers(self.cfg, self.max_iter, self._iterations_per_epoch())

    @classmethod
    def get_batch(cls, data: Any, input_placement_device: Any = None, mixup_func: Any = None) -> Mapping[str, Any]:
        """The model's arguments: the fields of ``data`` on the device, ``mixup_func(images, labels)`` applied."""
        batch: dict[str, Any] = to_batch(data, "cpu" if input_placement_device is None else input_placement_device)
        return batch if mixup_func is None else mixed(mixup_func, batch)

    @classmethod
    def auto_scale_hyperparams(cls, cfg: DictConfig, data_loader: Any) -> None:
        """Resolve in ``cfg`` what depends on the data: iterations, warm-up, milestones, periods in epochs."""
        scale_to_data(cfg, data_loader)

    @classmethod
    def test(
        cls,
        cfg: DictConfig,
        test_loaders: Sequence[Any],
        model: nn.Module,
        evaluator: DatasetEvaluator | None = None,
    ) -> dict[str, Any]:
        """Evaluate ``model`` on each loader: the results of a single loader, or of several by data set class."""
        settings = cfg.train
        return evaluate_loaders(
            model,
            test_loaders,
            cls.build_evaluator(cfg) if evaluator is None else evaluator,
            batch_size=settings.test_micro_batch_size * get_data_parallel_size(),
            eval_iter=settings.evaluation.eval_iter,
            limit=settings.overfit_batches or settings.limit_eval_batches,
            get_batch=cls.get_batch,
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
        loader = self.test_loader[0] if data is None else data
        if is_dataset(loader):
            loader = parts.prediction_loader(loader, self.cfg.train)
        return self._predict(
            lambda: map(self._prepare_batch, batches_of_rank(loader)),
            self._forward,
            iterate=iterate,
            num_batches=num_rounds(loader),
        )

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue from the latest checkpoint of the folder, or start with the weights of ``train.load_weight``."""
        if resume and not self.checkpointer.has_checkpoint():
            logger.warning("%s holds no checkpoint to resume from: starting from step 0.", self.cfg.train.output_dir)
        elif resume:
            self._folder.resume = True  # also if a program calls this method
        self.checkpointer.resume_or_load(self.cfg.train.load_weight, resume=resume)

    def _set_position(self) -> None:
        """Start the training data after ``samples_done`` samples."""
        batches, size = self._built_stepper.batches, self.cfg.train.train_micro_batch_size * get_data_parallel_size()
        batches.start(
            self.samples_done // size,
            is_positioned=set_position(self.train_loader, self.samples_done),
            keeps_generators=self.samples_done > 0,
        )
        batches.may_change = lambda: any(hook.may_change_data for hook in self._hooks)

    # Called by a user's own step.

    def train_step(self, model: Any, inputs: Any) -> Mapping[str, Any]:
        """One micro-batch: forward and backward; returns the outputs to log.

        An override also steps: it calls :meth:`backward` and :meth:`step` (see ``docs/several-optimizers.md``).
        """
        outputs: Mapping[str, Any] = self._trainer._train_micro_batch(model, inputs)
        return outputs

    # Implementation.

    @property
    def _loader(self) -> Any:
        return self._built_stepper.data_loader

    def _use_loader(self, loader: Any) -> None:
        self._built_stepper.data_loader = loader

    def _prepare_batch(self, batch: Any) -> Any:
        return self.get_batch(batch, self.device)

    def _prepare_training_batch(self, batch: Any) -> Any:
        return self._get_batch(batch)

    @property
    def _listed_eval_loaders(self) -> list[Any]:
        return list(self.test_loader)

    def _loss_of(self, batch: Any) -> Tensor:
        return sum_losses(returned_losses(self.model(**batch)))

    def _evaluate_weights(self) -> dict[str, Any]:
        with self._evaluated_weights():
            return self.test(self.cfg, self.test_loader, self.model)

    def _use_learning_rate(self, rate: float) -> None:
        self.cfg.optim.lr = rate

    def _settings_of_copy(self, folder: Path, changes: dict[str, Any], *, resumes: bool, is_endless: bool) -> Any:
        if self._trainer is not self._built_stepper:
            raise ConfigError(
                "check: trainer._trainer was replaced, and cannot be copied. Override train_step instead."
            )
        return parts.settings_of_copy(self._given, self.cfg, folder, changes, resumes=resumes, is_endless=is_endless)

    def _change_copy(self, new: Self, memo: dict[int, Any]) -> None:
        if not new._folder.resume:
            new.model.load_state_dict(self.model.state_dict())
        memo[id(self.model)] = new.model

    def _built_again(self) -> nn.Module:
        return self.build_model(self.cfg)

    def _example_batches(self) -> Any:
        if not self.test_loader:
            raise ConfigError("DefaultTrainer.export: there is no example; pass a batch, or set dataloader.test.")
        return self.test_loader[0]

    def loader_state(self) -> dict[str, Any] | None:
        # Before the first step a loader of torchdata would draw its order now.
        return self._built_stepper.loader_state() if self.iterations_done else None

    def load_loader_state(self, state: dict[str, Any]) -> None:
        self._built_stepper.load_loader_state(state)

    @property
    def _update(self) -> Update:  # type: ignore[override]  # of the current stepper
        update: Update = self._trainer._update
        return update

    def run_step(self) -> None:
        """One iteration of ``self._trainer``, whose step ``train`` calls directly unless this method is overridden."""
        self._trainer.iter = self.iter
        self._step_of_stepper()()

    def _bind_run_step(self) -> tuple[Any, Any]:
        self._trainer.phases = self.phases
        has_own_batch = is_overridden(self, "get_batch")
        is_own = is_overridden(self, "run_step")
        has_own = is_own or has_own_batch or is_overridden(self._built_stepper, "run_step")
        # Not if a method of the user's may draw random numbers.
        self._built_stepper.batches.prefetches_to = None if has_own else self.device
        warn_of_settings_without_effect(self)
        step = self._step_of_stepper()
        return self._trainer, self.run_step if is_own else step

    def _step_of_stepper(self) -> Callable[[], None]:
        """The call that makes a step of ``self._trainer``, perhaps the user's own."""
        stepper = self._trainer
        if isinstance(stepper, EagerTrainer) and not stepper.has_own_run_step():
            return stepper.new_step(self._get_batch, self.device, self.train_step if self._has_own_step else None).run
        return bind_arguments(stepper.run_step, self._get_batch, self.device)

    def _continue(self) -> None:
        update_length(self)
        super()._continue()

    def _before_first_step(self) -> None:
        self._state.restore()
        log_untrained(self.model, self.optimizer)

    def _save(self) -> None:
        """Save the current training state, named by the last completed iteration."""
        self.checkpointer.save(f"model_{self.iterations_done - 1:07d}", iteration=self.iterations_done - 1)

    def _get_batch(self, data: Any, input_placement_device: Any = None, mixup_func: Any = None) -> Mapping[str, Any]:
        """``get_batch`` with this run's device and the loader's mixup function."""
        return self.get_batch(
            data,
            self.device if input_placement_device is None else input_placement_device,
            getattr(self.train_loader, "mixup_func", None) if mixup_func is None else mixup_func,
        )

    def _evaluate(self, evaluator: DatasetEvaluator) -> dict[str, Any]:
        self.storage.reduce()  # writers write a row for the evaluation
        line_follows = any(hook.shows_results for hook in self.hooks)
        with self._evaluated_weights(), self._watching_hardest(), shown_in_epoch_line(line_follows):
            return self.test(self.cfg, self.test_loader, self.model, evaluator)

    def _iterations_per_epoch(self) -> int | Fraction | None:
        """None: unknown. A fraction where an epoch ends within an iteration."""
        return iterations_per_epoch(self.cfg.train, self._num_samples())

    def _forward(self, batch: Mapping[str, Any]) -> Any:
        try:
            return self.model(**batch)
        except TypeError as error:
            explain_forward(error, self.model, batch)
            raise

    def _facts(self) -> dict[str, Any]:
        train = self.cfg.train
        evaluated = [num_samples(loader, train.test_micro_batch_size) for loader in self.test_loader]
        return {
            "num_train": self._num_samples(),
            "num_eval": sum(number or 0 for number in evaluated) or None,
            "iterations_per_epoch": self._iterations_per_epoch(),
            "settings": changed_settings(self._given),
        }

    def _next_commands(self) -> list[str]:
        return next_commands(self.cfg, self._given)

    def _record(self) -> dict[str, Any]:
        train = self.cfg.train
        tests = {str(getattr(one, "name", at)): getattr(one, "dataset", one) for at, one in enumerate(self.test_loader)}
        return {
            "api": "config file",
            "samples_per_iteration": train.global_batch_size,
            "seed": train.seed,
            "precision": self.run.spec.precision.mixed_precision or "float32",
            "data": {"train": getattr(self.train_loader, "dataset", self.train_loader)}
            | {f"test {name}" if len(tests) > 1 else "test": one for name, one in tests.items()},
        }

    def _num_samples(self) -> int | None:
        return num_samples(self.train_loader, self.cfg.train.train_micro_batch_size)

"""The config-file API: a trainer built from a lazy configuration."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, ListConfig
from torch import nn

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.base.batch import to_batch
from trainwright.base.dist import get_averaging_size
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, checked_arguments
from trainwright.base.lazy_names import ring
from trainwright.config.foreign_names import key_hint_of_argument
from trainwright.config.lazy.instantiation import instantiate
from trainwright.config.lazy.lazy_config import try_get_key
from trainwright.config.lazy.serialization import to_plain
from trainwright.config.secrets import safe_trackers, without_secrets
from trainwright.config.windows import Windows
from trainwright.config_trainer import setup
from trainwright.config_trainer.eager_trainer import EagerTrainer
from trainwright.config_trainer.run import ConfigRun, names_loaders
from trainwright.data.collate import mixed
from trainwright.data.loaders import build_image_test_loader
from trainwright.data.streaming import eval_stream_loader, is_stream
from trainwright.engine.build import build_run
from trainwright.engine.extra_parameters import extra_optimizers, warn_of_untrained
from trainwright.engine.initial_weights import load_initial_weights
from trainwright.engine.loaders import batches_of_rank, is_dataset, num_rounds, warn_of_left_out, warn_of_predicted
from trainwright.engine.run_hooks import inner_hooks
from trainwright.engine.run_methods import RunMethods, part_of_run
from trainwright.engine.update import refuse_sparse_gradients
from trainwright.evaluation.adapters import evaluator_of
from trainwright.evaluation.evaluator import DatasetEvaluator
from trainwright.evaluation.loop import evaluate_loaders
from trainwright.events.writers import default_writers
from trainwright.events.writers.base import EventWriter
from trainwright.hooks import (
    HookBase,
)
from trainwright.hooks.method_overrides import is_overridden, overridable
from trainwright.optim.build import build_lr_scheduler, build_optimizer

if TYPE_CHECKING:
    from trainwright.graph.graph_trainer import GraphBase

logger = logging.getLogger("trainwright.engine")


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
        model: as built, like ``optimizer``, ``lr_scheduler``, ``train_loader``, ``test_loader``, ``checkpointer``
            and ``device``.
    """

    run: ConfigRun
    run_kind = ConfigRun
    cfg: DictConfig = part_of_run()
    tokenizer: Any = part_of_run()
    train_loader: Any = part_of_run()
    test_loader: Any = part_of_run()
    _trainer: Any = part_of_run("stepper")

    @checked_arguments(key_hint_of_argument, usage="DefaultTrainer(LazyConfig.load('config.py'))")
    def __init__(self, cfg: DictConfig) -> None:
        super().__init__()
        given, self.run.device, records = setup.started(cfg)
        self.run.start(given, copy.deepcopy(given), records)
        build_run(self.run)

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
            of_lightning = "class_path" in cfg.model
            raise ConfigTypeError(
                "model: has no _target_, so there is nothing to call. "
                + (
                    "class_path is of LightningCLI: write _target_, and the keys of init_args beside it."
                    if of_lightning
                    else "Describe the model with model = LazyCall(Net)(...), in YAML model: {_target_: module.Net}, or"
                    " override build_model."
                )
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
        is_named = isinstance(nodes, Mapping | DictConfig)
        each = nodes.items() if isinstance(nodes, Mapping | DictConfig) else enumerate(nodes)
        named = {str(name): setup.call_with_known(node, given) for name, node in each}
        for name, loader in named.items():
            setup.refuse_other_than_loader(loader, f"dataloader.test.{name}")
            warn_of_left_out(loader, f"dataloader.test.{name}")
        if not is_named:
            return list(named.values())
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
        return inner_hooks(self.run)

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
            batch_size=train.global_batch_size or 0,
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
            are_named=names_loaders(cfg),
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
        warn_of_predicted(loader, "DefaultTrainer.predict")
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
        if continues:
            with setup.model_of_run_in_errors(self.cfg, self.checkpointer.get_checkpoint_file):
                self.checkpointer.resume_or_load("", resume=True)
        else:
            load_initial_weights(self.run.spec, self.checkpointer)
        self.run.set_position()

    # Called by a user's own step.

    def train_step(self, model: Any, inputs: Any) -> Mapping[str, Any]:
        """One micro-batch: forward and backward; returns the outputs to log.

        An override also steps: it calls :meth:`backward`, or this method, and then :meth:`step` (see
        ``docs/custom-training.md``).
        """
        self.run.own_step.see_base()
        outputs: Mapping[str, Any] = self._trainer.train_micro_batch(model, inputs)
        return outputs

    # Implementation.

    def run_step(self) -> None:
        """One iteration of ``self._trainer``, whose step ``train`` calls directly unless this method is overridden."""
        self._trainer.iter = self.iter
        if self._stepper is None or self.run.step is None:  # in a train() of the user's own, or with another stepper
            self._step_of_stepper()()
        else:
            self.run.step.run()

    def _bind_run_step(self) -> tuple[Any, Any]:
        self._trainer.phases, self.run.batches = self.phases, self.run.built_stepper.batches
        if isinstance(self._trainer, EagerTrainer):
            self.run.update = self._trainer.steps.update
            self._trainer.prepare_own_steps()
        self._warn_of_replaced_stepper()
        step = self._step_of_stepper()
        return self._trainer, self.run_step if is_overridden(self, "run_step") else step

    def _warn_of_replaced_stepper(self) -> None:
        """Settings that ``self._trainer``, perhaps the user's replacement, was not built with."""
        stepper, windows = self._trainer, self.run.spec.windows
        kind, own_steps = type(stepper).__name__, getattr(stepper, "grad_acc_steps", None)
        is_ours = isinstance(stepper, EagerTrainer)
        own = stepper.windows if is_ours else None if own_steps is None else Windows.of(own_steps)
        if is_overridden(self, "train_step") and not self.run.has_own_step:
            raise ConfigError("DefaultTrainer.train_step: was assigned after __init__; override it in a subclass.")
        if self.run.has_own_step and getattr(stepper, "has_own_run_step", lambda: True)():
            logger.warning(
                "%s.train_step has no effect: trainer._trainer, a %s, has its own run_step.", type(self).__name__, kind
            )
        if own not in (None, windows):
            logger.warning(
                "train.num_accumulation_steps=%s has no effect: trainer._trainer, a %s, was built with"
                " grad_acc_steps=%s. Pass cfg.train.num_accumulation_steps to it.",
                windows.setting, kind, own.setting,
            )  # fmt: skip

    def _step_of_stepper(self) -> Callable[[], None]:
        stepper = self._trainer
        if isinstance(stepper, EagerTrainer) and not stepper.has_own_run_step():
            get_batch, run = self.run.prepare if is_overridden(self, "get_batch") else None, self.run
            stepper.callbacks = run.calls if run.calls.is_fed else None
            own_step = self.train_step if run.has_own_step else None
            reads_ahead = not is_overridden(self, "run_step")  # which may read batches itself
            run.step = stepper.new_step(get_batch, self.device, own_step, reads_ahead=reads_ahead)
            stepper.steps.use_after_batch(run.step, run.after_batch())
            if own_step is not None:
                run.own_step.watch_returned(run.step)
            return run.step.run
        return setup.bind_arguments(stepper.run_step, self.run.prepare, self.device)

    def _apply_settings(self, names: set[str]) -> None:
        self.run.use_late_changes(names)

    def before_train(self) -> None:
        self.run.see_stepper()
        super().before_train()

    def _before_first_step(self) -> None:
        self.run.check_assigned()
        if not self.is_copy:
            self.run.check_schedules()
            self.run.check_periods()
        with without_compiler():
            self.optimizer.zero_grad()
        self.run.state.restore()
        self.run.hold_batch_norms(self.model)
        calls = self.run.calls
        calls.is_fed = self.run.feeds_callbacks and not calls.is_idle
        self.run.update.clear_also(warn_of_untrained(self.model, self.optimizer, extra_optimizers(self)))
        if not self.run.spec.graph:
            refuse_sparse_gradients(self.run.model, self.run.optimizer, self.run.update)

    def after_train(self) -> None:
        try:
            super().after_train()
        finally:
            self.run.step = None

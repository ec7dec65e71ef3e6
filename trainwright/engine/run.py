"""``Run``: the parts of a run, and what is done with them. Checks, finders, replay and estimates work on a run."""

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from trainwright.base.batch import named_tensors
from trainwright.base.dist import broadcast_object, get_data_parallel_size, get_world_size, is_main_process
from trainwright.base.errors import ConfigError
from trainwright.base.files import Content
from trainwright.base.lazy_names import ring
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.config.spec import RunSpec
from trainwright.data.batch_loader import BatchLoader
from trainwright.data.batches import Batches, source_of
from trainwright.data.same_samples import check_same_samples
from trainwright.data.sampler import sampler_of
from trainwright.data.seeding import kept_generators
from trainwright.data.streaming import is_stream
from trainwright.engine.best_metric import BestMetric, check_monitors, early_stopping
from trainwright.engine.folder.mirrored import mirror_of
from trainwright.engine.folder.run_folder import RunFolder
from trainwright.engine.folder.summary import described_model, described_optimizers, described_stages
from trainwright.engine.loaders import shared_data
from trainwright.engine.loop import TrainerBase
from trainwright.engine.resumed_settings import TAKEN, Settings, differences
from trainwright.engine.state import TrainerState, TrainingState
from trainwright.engine.step import Step
from trainwright.engine.update import Update
from trainwright.evaluation.evaluator import warn_of_no_results
from trainwright.evaluation.hardest_samples.table import watch_hardest
from trainwright.evaluation.prediction import iterate_predictions, predict
from trainwright.events.formats import RECORD_NAME, read_starts
from trainwright.events.storage import EventStorage, find_event_storage
from trainwright.hooks import BestCheckpointer, EvalHook, HookBase, PeriodicWriter
from trainwright.hooks.callbacks import RunCallbacks
from trainwright.hooks.callbacks.base import Callback, CallbackList, TrainerControl
from trainwright.hooks.checkpoint import names_of_metric
from trainwright.hooks.due import Period
from trainwright.hooks.method_overrides import Overrides
from trainwright.hooks.signals import evaluation_may_stop
from trainwright.hooks.timer import SettingNames
from trainwright.hooks.unfreezing import Unfreezing
from trainwright.models.adapters import TrainableNames, adapter_files
from trainwright.models.checkpoint_files import checkpoint_files
from trainwright.models.outputs import TOKENS
from trainwright.models.targets import loss_inside
from trainwright.optim.freeze import freeze_bn
from trainwright.optim.named import by_name, deep_copied, each_optimizer
from trainwright.optim.weight_average import WeightAverage, build_average
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.meta_start import check_filled
from trainwright.parallel.parallelize import parallelize, use_replaced_parameters
from trainwright.parallel.simulated import simulation

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig

logger = logging.getLogger("trainwright.engine")

NEEDED_TO_EVALUATE = {
    "Python": "an eval_dataset",
    "config file": "dataloader.test, train.evaluation.enabled",
}
_DATA = ("train_dataset", "eval_dataset", "train_dataloader", "eval_dataloader", "preprocessor", "model_card")


class Run:
    """The parts of a run of either API, in the order in which they are built.

    A subclass says what differs between the APIs, or may be the user's own method.

    Attributes:
        trainer: the one that trains this run, and has the methods that a user overrides; not kept alive.
        arguments: those of its constructor.
        batches: of the training.
        watching_hardest: entered around each evaluation of a training, to keep its hardest samples.
        evaluated_precision: entered around each evaluation, in that of its forward passes.
        hooks: the registered hooks, in the order of their calls; ``own_hooks`` are those that the user has not added.
        own_step: what a step of the user's own calls; ``step_methods`` are those whose override is one, or its loss.
        overrides: finds the methods that a user overrides.
        callbacks, control: the callbacks of the training, and what they request.
        calls: calls the callbacks.
        eval_hook, write_hook: of evaluations and writers; None if a user's build_hooks makes its own list.
        listed_hooks, listed_callbacks: those that the user lists in the settings; ``built_in_callbacks`` are those that
            the settings of the current training make.
        preprocessor: saved with the model.
        best_weights: those of the best checkpoint, which the model may get at the end of a training.
    """

    device: torch.device
    folder: RunFolder
    batches: Batches
    model: nn.Module
    optimizer: Optimizer
    lr_scheduler: Any = None
    grad_scaler: torch.amp.GradScaler | None = None
    autocast: Callable[[], torch.autocast] | None = None
    update: Update
    state: TrainingState
    checkpointer: Checkpointer
    average: WeightAverage | None = None
    watching_hardest: Callable[[], AbstractContextManager[Any]] = nullcontext
    own_step: Any  # an OwnStep, which has the run
    best_weights: Any  # a BestWeights, which has the run
    evaluated_precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    step_methods: tuple[str, ...] = ()
    own_hooks: tuple[HookBase, ...] = ()
    calls: RunCallbacks
    eval_hook: EvalHook | None = None
    write_hook: PeriodicWriter | None = None
    preprocessor: Any = None
    _fill: Callable[[], None] | None = None  # gives values to weights that were on the meta device
    # What a subclass defines:
    prepare: Callable[[Any], Any]  # makes of a batch of the training data what the model gets
    prepare_eval: Callable[[Any], Any]
    forward: Callable[[Any], Any]  # the model's outputs for a prepared batch
    loss: Callable[[Any], Tensor]  # of a prepared batch, in the modes that the modules have
    evaluate: Callable[[], dict[str, Any]]  # the current weights; it is not logged
    eval_loaders: Callable[[], list[Any]]  # with `overfit_batches` they have the training data
    train_data: Callable[[], dict[str, Any]]  # the loader of the training, by the name of the user's data
    eval_data: Callable[[], dict[str, Any]]  # those of evaluations
    examples: Callable[[], Iterable[Any]]  # the first batch is an example of the model's input
    position_of: Callable[[int], tuple[int, int] | None]  # the sampler's at an update (from 1), and its micro-batches
    save: Callable[[], None]  # the training state between two iterations
    own_facts: Callable[[], dict[str, Any]]  # of the start
    own_record: Callable[[], dict[str, Any]]  # in `run.json`
    next_commands: Callable[[], list[str]]
    schedule_length: Callable[[Any], int]  # the number of steps of a schedule
    use_learning_rate: Callable[[float], None]  # writes the base rate into the settings
    own_settings: Callable[[], dict[str, Any]]  # all of them by name, in the types of JSON
    source_of: Callable[[str], str]  # where a resume takes a setting from, as the table of settings says
    default_of: Callable[[str], Any]  # the default of a setting, in the types of JSON
    settings_now: Callable[[], Any]  # those of the user, to compare with what the trainer has read
    late_changes: Callable[[], set[str]]  # the names of those that differ; raises for what `train` cannot change
    settings_read: Any = None
    keep_settings: Callable[[Mapping[str, Any]], None]  # uses those of the checkpoint that the run resumes from
    settings_of_copy: Callable[..., Any]  # by a folder and changes
    change_copy: Callable[[Any, dict[int, Any]], None]  # the run of a copy, as the user has changed this one since
    use_callbacks: Callable[[], None]  # that there are now, also within a training
    evaluates: bool  # whether the training has evaluations
    best_metric: BestMetric  # of the current settings
    # Its parts, as build_run calls these:
    build_data: Callable[[], None]  # the loaders, the batches and the length of the run
    place: Callable[[], None]  # the model on its device and processes, in the precision of the settings
    build_optimizers: Callable[[], None]  # and their schedules
    build_calls: Callable[[], None]  # what calls the callbacks
    build_step: Callable[[], None]
    current_step: Callable[[], Step | None]  # of a training
    resume: Callable[[], None]  # or load initial weights
    prepare_folder: Callable[[], None]
    # Its hooks:
    setting_names: SettingNames
    eval_prefix = ""  # of the results of evaluations in the storage
    log_is_due: Period
    eval_is_due: Period
    check_is_due: Period  # when values are checked, and computed over several processes
    steps_done: Callable[[], int]  # before the next iteration, for settings that count steps
    has_passed: Callable[[int, int], bool]  # whether they are more than the first number, and now reach a multiple
    samples_of_window: Callable[[int], int]  # of so many micro-batches; 0: the state counts them by its plan
    planned_length: Callable[[], tuple[int, int | None]]  # the steps of the run and of an epoch; None: unknown
    epoch_of: Callable[[], Callable[[int], Any] | None]
    epoch_ends: Callable[[], Any]  # the period of an epoch
    own_step_hook: Callable[[], HookBase | None]  # for a step of the user's own
    step_hooks: Callable[[], list[HookBase | None]]  # the schedules, and metrics of the training
    save_hook: Callable[[], HookBase | None]
    name_of_save: Callable[[], str] | None = None  # the number in the names of the best checkpoints
    progress_lines: Callable[[BestCheckpointer | None], list[HookBase | None]]
    evaluate_in_training: Callable[[], dict[str, Any]]

    def __init__(self, trainer: TrainerBase, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._trainer, self.arguments = weakref.ref(trainer), (arguments, named)
        self.overrides = Overrides(trainer)
        self.lr_schedulers: dict[str, Any] = {}  # of several optimizers
        self.hooks: list[HookBase] = []
        self.callbacks, self.control = CallbackList(), TrainerControl()
        self.listed_hooks: list[HookBase] = []
        self.built_in_callbacks, self.listed_callbacks = list[Callback](), list[Callback]()
        self._own_parts: frozenset[str] = frozenset()  # names of checkpointables that are not the user's
        self._model_files: dict[str, bytes] | None = None  # once they are known
        self._spec: RunSpec | None = None
        self._freezes_bn = False  # as the settings of the latest training request

    @property
    def trainer(self) -> Any:
        trainer = self._trainer()
        assert trainer is not None
        return trainer

    @property
    def spec(self) -> RunSpec:
        """The settings."""
        assert self._spec is not None
        return self._spec

    def use_spec(self, spec: RunSpec) -> None:
        """Use these settings from now on."""
        self._spec = spec

    @property
    def storage(self) -> EventStorage:
        """The metrics of the training."""
        storage: EventStorage = self.trainer.storage
        return storage

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name; a single one is ``{"optimizer": ...}``."""
        return by_name(self.optimizer)

    def schedules(self) -> list[Any]:
        """The learning-rate schedules."""
        return [one for one in (self.lr_scheduler, *self.lr_schedulers.values()) if one is not None]

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Entered around each evaluation: with an average of the weights, the model has that average."""
        with nullcontext() if self.average is None else self.average.applied(), self.evaluated_precision():
            if (storage := find_event_storage()) is not None:
                is_average = self.average is not None and self.average.is_applied
                storage.evaluated_weights = self.average.name if self.average is not None and is_average else ""
            yield

    def hold_batch_norms(self, model: nn.Module) -> None:
        """Freeze the running statistics of batch norms if the settings request it now, or no longer."""
        if self.spec.freeze_bn or self._freezes_bn:
            freeze_bn(model, self.spec.freeze_bn)
        self._freezes_bn = self.spec.freeze_bn

    def use_built_in_callbacks(self) -> None:
        """Add the callbacks that the settings request now behind the user's, except for classes that the user has."""
        for callback in self.built_in_callbacks:
            if any(callback is there for there in self.callbacks):
                self.callbacks.pop_callback(callback)
        best, has_own_code = self.best_metric, self._logs_by_user()
        built_in = early_stopping(self.spec, self.control, best, evaluates=self.evaluates, is_put_by_user=has_own_code)
        built_in += self.more_callbacks()
        own = {kind.__name__ for callback in self.callbacks for kind in type(callback).__mro__}
        check_monitors(self.spec, self.callbacks, best, evaluates=self.evaluates, is_put_by_user=has_own_code)
        added = [c for c in built_in if not own & {kind.__name__ for kind in type(c).__mro__[:-2]}]
        for callback in added:
            self.callbacks.add_callback(callback, singleton=False)
        if added:
            self.use_callbacks()
        self.built_in_callbacks = added

    def check_metrics(self) -> None:
        """Check that evaluations return results, and what selects checkpoints, unless the user's code may log it."""
        name = "evaluate" if self.spec.api == "Python" else "test"
        if self.evaluates and self.overrides.has(name):
            warn_of_no_results(getattr(self.trainer, name), f"{self.overrides.kind}.{name}")
        if self.evaluates and self.spec.save_enabled:
            for one in (self.best_metric, *self.best_metric.others()):
                one.check_results(is_put_by_user=self._logs_by_user())

    def _logs_by_user(self) -> bool:
        """Whether the user's code is called, which may log values in evaluations."""
        model, loss = self.model, loss_inside(getattr(self, "criterion", None))
        return (
            self.has_own_trainer
            or any(map(_is_of_user, self.callbacks))
            or any(_is_of_user(hook) or hook not in self.own_hooks for hook in self.hooks)
            or (hasattr(model, "compute_loss") and _is_of_user(model))
            or (loss is not None and not (getattr(loss, "__module__", "") or "").startswith(_OF_LIBRARIES))
        )

    def stop(self, reason: str) -> None:
        """End the training after the current iteration: see :meth:`TrainerBase.stop`."""
        self.trainer.stop(reason)

    def evaluate_now(self) -> None:
        """Evaluate between two iterations, because a callback or a setting requests it."""
        if self.eval_hook is None:
            raise ConfigError(
                f"A callback (trainercontrol.should_evaluate) or {self.spec.name_of('eval_on_start')} requests an"
                " evaluation, and this training evaluates nothing: it needs"
                f" {NEEDED_TO_EVALUATE[self.spec.api]} and the hooks of build_hooks."
            )
        self.eval_hook.trainer = weakref.proxy(self.trainer)  # it is registered only if evaluations are due
        with evaluation_may_stop():
            self.eval_hook.evaluate()
        if self.trainer.iterations_done:  # the initial weights are no result of the training
            for hook in self.hooks:
                hook.use_results()

    def log_now(self) -> None:
        """Write the metrics between two iterations, because a callback requests it."""
        if self.write_hook is None:
            raise ConfigError("A callback has set trainercontrol.should_log, and build_hooks has no hook that writes.")
        if is_main_process():
            self.write_hook.write()

    @property
    def has_evaluation(self) -> bool:
        """Whether there is something to evaluate, when a callback requests it."""
        return self.evaluates

    def check_data(self) -> None:
        """Raise on all processes if one has other data of which each reads a share."""
        if simulation() is None:
            found = {name: shared_data(one, is_evaluated=False) for name, one in self.train_data().items()}
            found |= {name: shared_data(one, is_evaluated=True) for name, one in self.eval_data().items()}
            check_same_samples({name: one for name, one in found.items() if one is not None})

    def build_model(self) -> None:
        """Build the model, if the user has not passed one."""

    def after_evaluation(self) -> list[HookBase | None]:
        """Hooks between the evaluation and the best checkpoint."""
        return []

    def new_result(self) -> float | None:
        """The result that chooses the best checkpoint, if the evaluation of this iteration has it, on all processes."""
        values = self.trainer.storage.latest()
        names = names_of_metric(self.best_metric.key, is_of_training=False)
        value, at = next((values[name] for name in names if name in values), (0.0, -1))
        found: float | None = broadcast_object(value if at >= self.trainer.iterations_done - 1 else None)
        return found

    def more_hooks(self) -> list[HookBase | None]:
        """Hooks that only this API has, behind all others."""
        return []

    def more_callbacks(self) -> list[Callback]:
        """Callbacks of the settings that only this API has."""
        return []

    def watch_hardest(self) -> None:
        """Find the hardest samples in the evaluations of the training, if the settings request them."""
        number, me = self.spec.hardest_samples, weakref.proxy(self)
        if number is not None:
            reads_losses = not self.spec.graph
            self.watching_hardest = watch_hardest(number, self.folder, lambda: me.storage, reads_losses=reads_losses)

    def saved_model(self) -> nn.Module:
        """The module whose weights checkpoints hold as the model's."""
        return self.model if self.average is None else self.average.saved_model()

    def rebuild_model(self) -> nn.Module | None:
        """The model of the settings, built again; None if the user has passed one."""
        return None

    def set_position(self) -> None:
        """Start the training data behind the iterations of a loaded checkpoint."""

    def use_loaded_plan(self) -> None:
        """Plan the training as a loaded checkpoint does, whose epochs may have had other lengths."""

    def predict(
        self,
        read_batches: Callable[[], Iterable[Any]],
        step: Callable[[Any], Any],
        *,
        iterate: bool,
        num_batches: int | None,
        is_single_pass: bool = True,
    ) -> Any:
        """The outputs of ``step`` for all batches, with the weights of evaluations."""
        settings: dict[str, Any] = {"is_single_pass": is_single_pass}
        if iterate:
            return iterate_predictions(self.model, read_batches, step, weights=self.evaluated_weights, **settings)
        with self.evaluated_weights():
            return predict(self.model, read_batches, step, num_batches=num_batches, **settings)

    def close_data(self) -> None:
        """Stop reading, and end the workers of our loaders; the next step or evaluation starts new ones."""
        self.batches.close()
        for loader in self.eval_loaders():
            if isinstance(loader, BatchLoader):
                loader.close()

    def rows(self) -> dict[str, object]:
        """What the start of the run shows, by title; empty values are not shown."""
        spec, trainer, own = self.spec, self.trainer, self.own_facts()
        ranks, left_out, epochs = get_data_parallel_size(), own.get("num_left_out"), own["epochs"]
        processes = f"{ranks} data rank{'s' if ranks > 1 else ''}"
        if (world := get_world_size()) == ranks:
            processes = "1 process" if ranks == 1 else f"{ranks} processes"
        size, lengths = spec.batch_size, [length for _, length in spec.windows.lengths]
        updates = ", then ".join(f"{size * length * ranks:,}" for length in lengths)
        accumulation = ", then ".join(map(str, lengths))
        left_out = f"; each epoch leaves out {left_out:,}: dataloader_drop_last" if left_out else ""
        epochs = f" ({epochs:.1f} epochs)" if epochs else ""
        schedule = ", ".join(sorted({getattr(one, "name", type(one).__name__) for one in self.schedules()}))
        mode = "graph mode" if spec.graph else "eager mode"
        iterations = f"{trainer.start_iter + 1} to {trainer.max_iter}{epochs}"
        if trainer.start_iter >= trainer.max_iter:
            is_evaluated = self.evaluates and self.state.is_end_pending
            iterations = f"nothing to train{', the final evaluation is made' if is_evaluated else ''}{epochs}"
        return {
            "Task": own.get("task"),
            "Model": described_model(self.model),
            "Frozen": next((hook.described() for hook in self.hooks if isinstance(hook, Unfreezing)), None),
            "Stage": described_stages(self.model),
            "Data": self._described_data(own["num_train"], own["num_eval"], left_out),
            "Iterations": iterations,
            "Batch": f"{updates} samples = {size} x {accumulation} accumulation x {processes}",
            "Layout": f"{world} process{'es' * (world > 1)}: {mesh.layout}" if (mesh := current_mesh()) else None,
            "Optimizer": described_optimizers(self.optimizers, schedule),
            "Device": ", ".join(filter(None, [self.device.type, spec.mixed_precision, mode])),
            "Metrics": own.get("metrics"),
            "Evaluation": f"of the {self.average.name}" if self.average is not None and own["num_eval"] else None,
            "Folder": spec.output_dir,
            "Settings": own["settings"],
        }

    def _described_data(self, num_train: int | None, num_eval: int | None, left_out: str) -> str | None:
        """The samples to train and to evaluate; a stream has no number. None: nothing is known."""
        used = {"to train": (num_train, [self.batches.loader]), "to evaluate": (num_eval, self.eval_loaders())}
        streams = {
            name: not number and any(is_stream(getattr(source_of(one), "dataset", ())) for one in loaders)
            for name, (number, loaders) in used.items()
        }
        unit = " samples" if any(streams.values()) else ""
        parts = [
            f"a stream {name}" if streams[name] else f"{number:,}{unit} {name}"
            for name, (number, _) in used.items()
            if number or streams[name]
        ]
        note = left_out.removeprefix("; ") if unit else f"samples{left_out}"
        if self.batches.length != 1 and isinstance(sampler_of(source_of(self.batches.loader)), SequentialSampler):
            note = f"{note}; each epoch in the same order: shuffle=False".removeprefix("; ")
        return ", ".join(parts) + (f" ({note})" if note else "") if parts else None

    def record(self) -> dict[str, Any]:
        """What ``run.json`` has of the run."""
        precision = self.spec.mixed_precision or "float32"
        known = {"api": self.spec.api, "seed": self.spec.seed, "precision": str(precision)}
        return known | self.own_record()

    # Settings at a resume.

    @property
    def has_own_trainer(self) -> bool:
        """Whether the class of the trainer is the user's, which only a program of theirs builds."""
        return not type(self.trainer).__module__.startswith("trainwright.")

    def recorded_settings(self) -> dict[str, Any]:
        """What a checkpoint holds of the settings, by name."""
        name = type(self.trainer).__name__
        return {"trainer": name if self.has_own_trainer else f"trainwright.{name}", **self.own_settings()}

    def resume_with(self, before: Settings) -> dict[str, str]:
        """Use those settings of a checkpoint that its states keep; returns the effect of the others that differ.

        Raises:
            ConfigError: another class of trainer has made the checkpoint.
        """
        now, effects, kept = self.recorded_settings(), dict[str, str](), dict[str, Any]()
        self._refuse_other_trainer(before["trainer"], now["trainer"])
        has_formula = all(isinstance(one, LambdaLR) for one in self.schedules())  # which no state has
        for name in differences(before, now):
            if name not in before and now[name] == self.default_of(name):
                continue  # a setting that the version which wrote the checkpoint did not have
            source = "now" if name == "trainer" else self.source_of(name)
            if source == "now" or (source == "lr_scheduler" and has_formula):
                effects[name] = TAKEN
            elif source and name in before and name in now:
                kept[name] = before[name]
        if kept:
            self.keep_settings(kept)
        return effects

    def _refuse_other_trainer(self, before: str, now: str) -> None:
        if before == now or self.spec.allow_other_trainer:
            return
        starts = read_starts(self.folder.path / RECORD_NAME)
        command = next((start["command"] for start in reversed(starts) if start.get("command")), None)
        started = f" (`{command}` has started the run)" if command else ""
        setting = f"{self.spec.name_of('allow_other_trainer')}=True"
        setting = f"TrainingConfig({setting})" if self.spec.api == "Python" else setting
        raise ConfigError(
            f"The checkpoint is of a run of the trainer {before}; this is {now}, which may train something else. Resume"
            f" with {before}{started}, or set {setting} to continue with {now}, or start a new run with the weights"
            " only."
        )

    def place_model(self, *, splits_scores: bool, autocast: Any, optimizer: Any = None) -> None:
        """Put the model on its device and spread it over the processes, as the settings request.

        ``splits_scores``: nothing but the model's loss uses its scores. ``optimizer``: the user's own, which gets the
        parameters that replace its own.
        """
        spec, mesh = self.spec, current_mesh()
        _check_graph(spec)
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, nn.UninitializedParameter):
                raise ConfigError(
                    f"The model's parameter {name} has no shape yet, as those of lazy modules: call model(inputs) with"
                    " a batch once before the trainer is built."
                )
        # Kept only for the user's optimizer: they would keep each divided parameter in memory.
        before = [] if optimizer is None else [*self.model.named_parameters(remove_duplicate=False)]
        gathered_as = spec.zero_gather_precision
        if gathered_as and (mesh is None or mesh.layout.zero_stage == 0 or not mesh.layout.is_sharded):
            logger.warning("zero_gather_precision=%r has no effect without ZeRO over several processes.", gathered_as)
            gathered_as = None
        recompute = spec.gradient_checkpointing
        if recompute == "offload" and (spec.graph or spec.compile_blocks):
            recompute = True
        recomputed, self._fill = parallelize(
            self.model, self.device, recompute=recompute, autocast=autocast,
            splits_scores=splits_scores, find_unused_parameters=spec.find_unused_parameters,
            compiles_blocks=spec.compile_blocks and not spec.graph, gathered_as=gathered_as,
        )  # fmt: skip
        for one in () if optimizer is None else each_optimizer(optimizer):
            use_replaced_parameters(one, before, self.model)
        if recomputed:
            logger.info("The backward pass recomputes %d blocks: %s.", len(recomputed), ", ".join(recomputed))
        elif spec.gradient_checkpointing:
            logger.warning(
                "Activation checkpointing: the model has no repeated blocks (children of nn.ModuleList or nn.Sequential"
                " with parameters) and no set_activation_checkpoint, so nothing is recomputed."
            )

    def fill_weights(self) -> None:
        """Give initial values to weights that have none, after initial weights or a checkpoint are loaded.

        Raises:
            ConfigError: nothing gives a weight a value.
        """
        if self._fill is None:
            return
        self._fill()
        self._fill = None
        if simulation() is None:
            check_filled(self.model)

    # Checkpoints.

    @property
    def checkpoints_dir(self) -> Path:
        """The folder of checkpoints."""
        return self.folder.path

    def card_files(self) -> Mapping[str, Content]:
        """Files of a checkpoint beside those that load it as a model."""
        return {}

    def build_checkpointer(self) -> None:
        """Build the checkpointer, and the average of the weights that it saves."""
        only = TrainableNames(self.model) if self.spec.save_trainable_only else None
        self.average = build_average(self.model, self.optimizer, self.spec.ema, only)

        def attachments() -> dict[str, Content]:
            if self._model_files is None:
                self._model_files = checkpoint_files(self.model, self.preprocessor, has_all_weights=only is None)
            return {**self.card_files(), **self._model_files, **adapter_files(self.saved_model())}

        self.checkpointer = Checkpointer(
            self.model,
            self.checkpoints_dir,
            asynchronous=self.spec.save_asynchronously,
            attachments=attachments,
            weights=None if self.average is None else self.average.saved_model,
            only=only,
            mirror=mirror_of(
                self.spec.checkpoint_mirror if self.spec.save_enabled else None,
                self.spec.where("checkpoint_mirror"),
                self.folder.files,
            ),
        )
        self.set_checkpoint_parts()

    def set_checkpoint_parts(self) -> None:
        """Save the current optimizer and schedule; what the user has added to the checkpointer stays."""
        kept = {name: part for name, part in self.checkpointer.checkpointables.items() if name not in self._own_parts}
        schedule = self.lr_schedulers or self.lr_scheduler
        parts = self.state.with_parts(self.optimizer, schedule, self.grad_scaler, self.average)
        self._own_parts = frozenset(parts)
        self.checkpointer.checkpointables = parts | kept

    def update_statistics(self, average: WeightAverage) -> None:
        """Compute the statistics of normalization layers for averaged weights, by a pass over the training data."""
        from trainwright.data.loaders import one_pass  # here: loads omegaconf

        with kept_generators(in_checkpoints=True):
            average.update_statistics(lambda: map(self.prepare, one_pass(self.batches.loader)), self.forward)

    def num_targets(self, update: int) -> Any:
        """How many labels count in the mean loss of an update (from 1), by what is declared; None: unknown.

        It is the ``num_tokens`` that the model has returned, or a number found in the batch: when the loss was
        computed, or if the batch can be read again, now. Unknown for updates of several batches or processes: without
        targets their loss is 0 already.
        """
        if self.update.is_weighed:
            return None
        tokens = self.trainer.storage.histories().get(TOKENS)
        if tokens is not None:
            return next((value for value, at in tokens.values_since(update - 1) if at == update - 1), None)
        if self.update.counted_targets is not None:
            return self.update.counted_targets.get(update - 1)
        if self.trainer.sample_ids(update) is None:
            return None
        first, _ = self.position_of(update) or (0, 0)
        counter = copy.copy(self.update.mean.counter)  # in such updates nothing else decides what counts
        with kept_generators(in_checkpoints=True):
            batch = self.batches.prepare(self.batches.loader.read_again(first))
            counter.decide(None, batch)
            return counter.count(batch, 1)

    def non_finite_fields(self, update: int) -> tuple[int, list[str]] | None:
        """The first micro-batch of an update (both from 1) with NaN or infinity, and where; None: none or unknown."""
        if self.trainer.sample_ids(update) is None:
            return None
        first, number = self.position_of(update) or (0, 0)
        with kept_generators(in_checkpoints=True):
            for place in range(number):
                batch = self.batches.loader.read_again(first, place)
                if names := [name for name, one in named_tensors(batch) if not one.isfinite().all()]:
                    return place + 1, names
        return None

    # Copies.

    def copy(self, folder: Path, *, resumes: bool = False, constant_rate: bool = False, **changes: Any) -> Any:
        """A trainer like this one, to train and discard. Its files are in ``folder``; its run is ``copy.run``.

        Data sets are shared; the model, the optimizer, the loss, the callbacks and what the user has added later are
        copied. It has the current weights and starts at the first step. It has no hooks that write or handle signals.

        Args:
            resumes: it resumes from the checkpoints in ``folder``.
            constant_rate: with the base learning rate instead of the schedule, and without an end.
            changes: settings, by their names in ``TrainingConfig``; both APIs have ``batch_size`` and
                ``gradient_accumulation_steps``.
        """
        arguments, named = self.arguments
        settings = self.settings_of_copy(folder, changes, resumes=resumes, is_endless=constant_rate)
        kind: Any = self.trainer.__class__
        new = kind.__new__(kind, *arguments, **named)
        memo = {id(self.trainer): new, **self._memo(settings)}
        try:
            for one in (part for part in (*arguments, *named.values()) if isinstance(part, Optimizer)):
                deep_copied(one, memo)
            arguments, named = copy.deepcopy((arguments, named), memo)
            new.__init__(*arguments, **named)
            new.is_copy = True
            self.change_copy(new.run, memo)
            self._copy_later_changes(new, memo)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            if "deepcopy" not in str(error) and "pickle" not in str(error):
                raise
            raise ConfigError(f"check: the trainer cannot be copied: {error}") from error
        new.run.hooks[:] = [h for h in new.hooks if h.in_copies and not (constant_rate and h.steps_schedule)]
        if constant_rate:
            for one in each_optimizer(new.run.optimizer):
                for group in one.param_groups:
                    group["lr"] = group.get("initial_lr", group.get("lr"))
        return new

    def _memo(self, settings: Any) -> dict[int, Any]:
        """The memo of ``copy.deepcopy`` with the parts that are replaced, and with those that are shared."""
        trainer, (arguments, named) = self.trainer, self.arguments
        given = (*arguments, *named.values())
        memo: dict[int, Any] = {
            id(part): settings for part in given if type(part) is type(settings) and part is not None
        }
        data = [getattr(trainer, name, None) for name in _DATA]
        for one in (*data, *given):
            for part in (one, *(one.values() if isinstance(one, dict) else ())):
                if any(part is each for each in data) or isinstance(part, Dataset | DataLoader):
                    memo[id(part)] = part
        for callback in self.callbacks:
            memo[id(getattr(callback, "trainer", None))] = None
        handler = vars(trainer).get("metrics_handler")
        if handler is not None:
            memo[id(handler)] = plain = copy.copy(handler)
            if hasattr(plain, "trainer"):
                plain.trainer = None
        return memo

    def _copy_later_changes(self, new: Any, memo: dict[int, Any]) -> None:
        trainer = self.trainer
        for name in vars(trainer).keys() - vars(new).keys():
            if not name.startswith("_") and not hasattr(trainer.__class__, name):
                setattr(new, name, copy.deepcopy(vars(trainer)[name], memo))
        for name, part in self.checkpointer.checkpointables.items():
            if name not in new.checkpointer.checkpointables:
                new.checkpointer.add_checkpointable(name, copy.deepcopy(part, memo))
        for callback in self.callbacks:
            by_settings = (*self.built_in_callbacks, *self.listed_callbacks)
            if id(callback) not in memo and not any(callback is one for one in by_settings):
                new.add_callback(copy.deepcopy(callback, memo), singleton=False)
        for hook in [one for one in self.hooks if one not in self.own_hooks]:
            memo[id(vars(hook).get("trainer"))] = None
            new.register_hooks([copy.deepcopy(hook, memo)])


class TrainerRun(Run):
    """The parts of a run of the Python API.

    Attributes:
        config: the current one.
        criterion: the loss of outputs and target; None if the model computes its loss.
    """

    config: "TrainingConfig"
    criterion: Any = None
    state: TrainerState

    def set_position(self) -> None:
        done = self.state.global_step
        self.batches.start(done, epoch=self.state.plan.epoch_at(done))

    def declared_criterion(self, own_loss: Any) -> Any:
        """The criterion, which says what a loss averages; None if ``own_loss``, the model's, computes it instead.

        A step or loss of the user's own may use it, if the user has set it.
        """
        is_own = self.overrides.has("train_step", "training_step", "compute_loss")
        return None if own_loss is not None or (is_own and not self.spec.is_set("loss")) else self.criterion


_OF_LIBRARIES = ("torch.", "trainwright.")


def _is_of_user(part: object) -> bool:
    return not type(part).__module__.startswith("trainwright.")


def _check_graph(spec: RunSpec) -> None:
    if spec.graph:
        ring("graph.compile_graph").check_backend(spec.graph_backend, spec.where("graph_backend"))
        if current_mesh() is not None:
            raise ConfigError(
                f"{spec.where('graph')}: got True with tensor, pipeline or context parallel, or ZeRO, which are not"
                f" compiled as one program; use {spec.name_of('compile_blocks')}=True."
            )

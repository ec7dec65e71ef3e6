"""What the trainers of both APIs have in common: a run in an output folder, its hooks, and what works on copies of it.

An API translates its settings, and builds the model, the data and the step.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.engine.folder.record import RunRecord
from trainwright.engine.folder.run_folder import OpenRunFolder, RunFolder
from trainwright.engine.folder.summary import RunFacts, RunSummary, log_start
from trainwright.engine.own_step import OwnStep, StepMethods
from trainwright.engine.run import Run
from trainwright.engine.state import TrainingState
from trainwright.evaluation.loop import preserve_rng
from trainwright.evaluation.prediction import iterate_predictions, predict
from trainwright.hooks import FiniteCheck, Float32MatmulPrecision, HookBase, Interruptions
from trainwright.hooks.base import Period
from trainwright.hooks.signals import max_time_of
from trainwright.hooks.tensor_parallel import tensor_parallel_hook
from trainwright.hooks.torch_settings import deterministic_hook
from trainwright.hooks.unfreezing import unfreezing_hook
from trainwright.hooks.weight_average import averaging_hook
from trainwright.lazy_names import ring
from trainwright.models.adapters import TrainableNames, adapter_files
from trainwright.models.checkpoint_files import checkpoint_files
from trainwright.optim.weight_average import WeightAverage, build_average

if TYPE_CHECKING:
    from trainwright.inspect.check.finding import Report
    from trainwright.inspect.finders.batch_size import BatchSizes
    from trainwright.inspect.finders.learning_rate import RateCurve
    from trainwright.inspect.replay import Replay


class RunTrainer(StepMethods):
    """Base of :class:`~trainwright.Trainer` and :class:`~trainwright.DefaultTrainer`."""

    run: Run
    device: torch.device
    checkpointer: Checkpointer
    lr_scheduler: Any
    lr_schedulers: dict[str, Any] = {}  # of several optimizers  # noqa: RUF012  # replaced, never changed
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _folder: RunFolder
    _state: TrainingState
    _autocast: Callable[[], AbstractContextManager[Any]] | None = None
    _average: WeightAverage | None = None
    _evaluated_weights: Callable[[], AbstractContextManager[Any]] = nullcontext  # in evaluations
    _grad_scaler: torch.amp.GradScaler | None
    _step_methods: tuple[str, ...]  # those whose override is a step of the user's own, or its loss
    _model_files: dict[str, bytes] | None = None  # once they are known
    _own_parts: frozenset[str] = frozenset()  # names of checkpointables that are not the user's

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        new = super().__new__(cls)
        new._arguments = (arguments, named)  # those of a subclass, whatever it passes on
        new.run = Run(new)
        return new

    def check(self, *, max_seconds: float = 60.0, only: "list[str] | None" = None) -> "Report":
        """Check on copies of this trainer whether it can learn, its data are right, it is exact (``docs/checks.md``).

        Nothing of this trainer is changed: weights, states, random generators, output folder. A check that does not fit
        into ``max_seconds`` is skipped and reported. The report is true if there is no problem.

        >>> report = trainer.check()  # doctest: +SKIP
        >>> report.print()  # doctest: +SKIP
        """
        report: Report = ring("inspect.check.run").check_run(self.run, max_seconds=max_seconds, only=only)
        return report

    def find_lr(
        self,
        *,
        lowest: float = 1e-7,
        highest: float = 10.0,
        updates: int = 100,
        plot: "str | Path | None" = None,
        apply: bool = False,
    ) -> "RateCurve":
        """Learning-rate range test: train a copy with a growing rate; suggests the rate where the loss falls fastest.

        ``plot``: a file for a picture of the curve (needs matplotlib). ``apply``: train with the suggestion; otherwise
        nothing of this trainer is changed.
        """
        finder = ring("inspect.finders.learning_rate")
        curve: RateCurve = finder.find_learning_rate(
            self.run, lowest=lowest, highest=highest, updates=updates, plot=plot
        )
        if apply and curve.suggestion is not None:
            finder.use_learning_rate(self.run, curve.suggestion)
        return curve

    def find_batch_size(self, *, memory: int | None = None, max_size: int | None = None) -> "BatchSizes":
        """The largest micro-batch that fits into the memory, by updates of copies; this trainer is not changed.

        ``memory``: bytes that a step may use, in place of what this device has. The result has the settings for a new
        trainer.
        """
        sizes: BatchSizes = ring("inspect.finders.batch_size").find_batch_size(
            self.run, memory=memory, max_size=max_size
        )
        return sizes

    def replay(self, step: int, *, stops: bool = False) -> "Replay":
        """Run update ``step`` (from 1) of the run in the output folder again, bitwise; call it instead of ``train``.

        It starts at the nearest checkpoint before it, and writes nothing. ``stops``: with the debugger of Python in the
        user's code. Returns the samples, losses and gradient norms of the update.
        """
        replayed: Replay = ring("inspect.replay").replay(self.run, step, stops=stops)
        return replayed

    def export(self, path: str | os.PathLike[str], batch: Any = None, *, tolerance: float = 1e-4) -> Path:
        """Write the model for other programs, and compare what was written with the model; returns the path.

        Args:
            path: ``….onnx``, ``….pt2`` (torch.export), or a folder for ``model.safetensors``.
            batch: an example; by default the first batch of the evaluation data, or of the ``Trainer``'s training data.
            tolerance: the largest difference, relative to the largest value of an output.

        Raises:
            ExportError: the model cannot be exported, or the exported one computes something else.
        """
        from trainwright.models.export import export_of_run

        if batch is None:
            batches = self.run.batches.examples()
            with preserve_rng(self.device):
                batch = next(iter(batches))
        with self._evaluated_weights():
            return export_of_run(self.model, path, self._prepare_batch(batch), tolerance=tolerance)

    def print_info(self) -> None:
        """Log the model, the data, the length of the run and its settings."""
        log_start(self.run.facts())

    def _run_facts(self) -> RunFacts:
        spec = self.run.spec
        facts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": ", ".join(sorted({type(one).__name__ for one in self.run.lr_schedulers})),
            "device": self.device,
            "folder": spec.saving.output_dir,
            "batch_size": spec.batch.batch_size,
            "accumulation": spec.batch.gradient_accumulation_steps,
            "precision": spec.precision.mixed_precision,
            "mode": "graph" if spec.layout.graph else "eager",
            "first_iter": self.start_iter,
            "last_iter": self.max_iter,
        }
        return RunFacts(**facts | self._facts())

    def autocast(self) -> AbstractContextManager[Any]:
        """The run's precision, for computations of a step outside the model's ``forward``."""
        return nullcontext() if self._autocast is None else self._autocast()

    def before_train(self) -> None:
        self._folder.lock()
        self.print_info()
        super().before_train()

    def after_train(self) -> None:
        try:
            super().after_train()
        finally:
            self.start_iter = self.iterations_done  # a later train() continues from here
            self.checkpointer.close()
            self._folder.close()

    # What an API defines.

    @property
    @abstractmethod
    def _loader(self) -> Any:
        """The loader that the steps read."""

    @abstractmethod
    def _use_loader(self, loader: Any) -> None:
        """Let the steps read another loader of the same kind."""

    @property
    @abstractmethod
    def _listed_eval_loaders(self) -> list[Any]:
        """The loaders of evaluations."""

    @abstractmethod
    def _prepare_batch(self, batch: Any) -> Any:
        """A batch of a loader as the model gets it."""

    def _prepare_training_batch(self, batch: Any) -> Any:
        """A batch of the training data as the model gets it."""
        return self._prepare_batch(batch)

    @abstractmethod
    def _forward(self, batch: Any) -> Any:
        """The model's outputs for a prepared batch."""

    @abstractmethod
    def _loss_of(self, batch: Any) -> torch.Tensor:
        """The training loss of a prepared batch, by a forward pass in the current modes."""

    @abstractmethod
    def _evaluate_weights(self) -> dict[str, Any]:
        """The results of an evaluation of the current weights, which is not logged."""

    @abstractmethod
    def _save(self) -> None:
        """Save the training state between two iterations."""

    def _set_position(self) -> None:
        """Start the training data behind the iterations of a loaded checkpoint, if the first step does not do it."""

    def _close_loaders(self) -> None:
        """Stop what reads the data ahead."""

    def _schedule_length(self, schedule: Any) -> int:
        """The number of steps of a schedule in the run."""
        return self.max_iter

    @abstractmethod
    def _example_batches(self) -> Iterable[Any]:
        """The batches whose first one is an example of the model's input."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Further :class:`RunFacts`."""

    @abstractmethod
    def _use_learning_rate(self, rate: float) -> None:
        """Write the base learning rate into the settings."""

    @abstractmethod
    def _settings_of_copy(self, folder: Path, changes: dict[str, Any], *, resumes: bool, is_endless: bool) -> Any:
        """The argument of this API with the settings of a copy that a check trains in ``folder``.

        ``changes``: further settings by their names in ``TrainingConfig``.

        Raises:
            ConfigError: this trainer cannot be copied.
        """

    @abstractmethod
    def _change_copy(self, new: Any, memo: dict[int, Any]) -> None:
        """Change a new copy as the user has changed this trainer since it was built."""

    def _built_again(self) -> torch.nn.Module | None:
        """The model of the settings, built again; None: the user has passed a model."""
        return None

    @abstractmethod
    def build_hooks(self) -> list[HookBase | None]:
        """The hooks, in the order of their calls."""

    # Implementation.

    def _build_checkpointer(
        self,
        folder: str | Path,
        *,
        trainable_only: bool,
        asynchronous: bool = True,
    ) -> None:
        """Build the checkpointer, and the average of the weights that it saves."""
        only = TrainableNames(self.model) if trainable_only else None
        weights = None
        if (ema := self.run.spec.learning.ema) is not None:
            self._average = build_average(self.model, ema, only)
            self._evaluated_weights, weights = self._average.applied, self._average.saved_model
        self.checkpointer = Checkpointer(
            self.model, folder, asynchronous=asynchronous, attachments=self._attachments, weights=weights, only=only
        )
        self._set_checkpoint_parts()

    def _set_checkpoint_parts(self) -> None:
        """Save the current optimizer and schedule; what the user has added to the checkpointer stays."""
        kept = {name: part for name, part in self.checkpointer.checkpointables.items() if name not in self._own_parts}
        schedule = self.lr_schedulers or self.lr_scheduler
        parts = self._state.with_parts(self.optimizer, schedule, self._grad_scaler, self._average)
        self._own_parts = frozenset(parts)
        self.checkpointer.checkpointables = parts | kept

    def _attachments(self) -> Mapping[str, bytes]:
        """Files stored with the weights, so that a checkpoint can be loaded as a model."""
        if self._model_files is None:
            has_all = self.checkpointer.only is None
            preprocessor = getattr(self, "preprocessor", None)
            self._model_files = checkpoint_files(self.model, preprocessor, has_all_weights=has_all)
        return {**self._model_files, **adapter_files(self._saved_model())}

    def _saved_model(self) -> torch.nn.Module:
        """The module whose weights checkpoints hold as the model's."""
        return self.model if self._average is None else self._average.saved_model()

    def _register_run_hooks(
        self,
        own_step: OwnStep | None,
        *,
        check_period: Period,
        save: Callable[[], None],
        steps_done: Callable[[], int],
        has_passed: Callable[[int, int], bool],
        total_steps: int,
        steps_per_epoch: int | None,
    ) -> None:
        """Register the hooks that every run needs, around those that a user may change.

        Args:
            steps_done: the number of steps before the next iteration, for settings that count steps.
            has_passed: whether the steps so far are more than the first number and, just now, a multiple of the second.
        """
        spec = self.run.spec
        precision, output_dir = spec.precision.float32_matmul_precision, spec.saving.output_dir
        lengths: dict[str, Any] = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
        self.register_hooks(
            [
                None if precision is None else Float32MatmulPrecision(precision),
                deterministic_hook(spec.safety.deterministic),
                tensor_parallel_hook(),
                OpenRunFolder(self._folder),
                own_step,
                FiniteCheck(check_period, spec.safety.non_finite),
                averaging_hook(self._average, spec.learning.ema, has_passed, self._update_statistics, total_steps),
                unfreezing_hook(self.model, spec.learning.unfreeze, steps_done, **lengths),
                RunRecord(self._folder, lambda trainer: trainer._record()),
                *self.build_hooks(),
                RunSummary(output_dir, lambda trainer: trainer._next_commands()),
                Interruptions(self.checkpointer, save, max_time_s=max_time_of(spec.length)),
            ]
        )
        self.run.num_own_hooks = len(self.hooks)

    def _update_statistics(self, average: WeightAverage) -> None:
        from trainwright.data.loaders import one_pass  # here: loads omegaconf

        with preserve_rng(self.device):
            average.update_statistics(lambda: map(self._prepare_training_batch, one_pass(self._loader)), self._forward)

    def _predict(
        self,
        read_batches: Callable[[], Iterable[Any]],
        step: Callable[[Any], Any],
        *,
        iterate: bool,
        num_batches: int | None,
        is_single_pass: bool = True,
    ) -> Any:
        """The outputs of ``step`` for all batches, with the weights of evaluations."""
        settings: dict[str, Any] = {"device": self.device, "is_single_pass": is_single_pass}
        if iterate:
            return iterate_predictions(self.model, read_batches, step, weights=self._evaluated_weights, **settings)
        with self._evaluated_weights():
            return predict(self.model, read_batches, step, num_batches=num_batches, **settings)

    def _continue(self) -> None:
        if self._state.continue_here():
            self._folder.reopen()

    def _is_end_pending(self) -> bool:
        return self._state.is_end_pending

"""The public methods and parts that the trainers of both APIs have, each over ``self.run``."""

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Never, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.base.errors import ConfigError
from trainwright.base.files import read_regular
from trainwright.base.lazy_names import ring
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.data.sample_names import shown_samples
from trainwright.data.seeding import kept_generators
from trainwright.engine.best_weights import BEST
from trainwright.engine.folder.summary import table
from trainwright.engine.label_checks import check_known_labels
from trainwright.engine.loop import TrainerBase
from trainwright.engine.run import Run
from trainwright.events.formats import METRICS_NAME, RECORD_NAME, parse_rows, read_starts
from trainwright.events.storage import EvaluationStorage, get_event_storage, logged_scalars
from trainwright.hooks.callbacks.base import Callback, CallbackList, TrainerControl
from trainwright.models.packed_texts import check_packed_texts

logger = logging.getLogger("trainwright.engine")

T = TypeVar("T")

if TYPE_CHECKING:
    from trainwright.inspect.check.finding import Report
    from trainwright.inspect.find.batch_size import BatchSizes
    from trainwright.inspect.find.learning_rate import RateCurve
    from trainwright.inspect.replay import Replay


class _Part(property):
    """Read without a call of Python code: hooks read parts in each iteration."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        part = self._name or name
        super().__init__(attrgetter(f"run.{part}"), lambda trainer, value: setattr(trainer.run, part, value))


def part_of_run(name: str = "") -> Any:
    """An attribute of a trainer that is one of its run, by default of the same name."""
    return _Part(name)


class replaceable_property(Generic[T]):  # noqa: N801  # a decorator, as property is
    """Computed when it is read. A subclass of the user's may have an attribute of its own by this name."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        return self if instance is None else self._compute(instance)  # type: ignore[return-value]


class RunMethods(TrainerBase):
    """A trainer of a :class:`~trainwright.engine.run.Run`: base of ``Trainer`` and ``DefaultTrainer``.

    ``optimizer`` of a method is an optimizer or its name.

    Attributes:
        optimizers: several optimizers by name; a single one is ``{"optimizer": ...}``.
        lr_schedulers: the schedules of several optimizers by name.
        callbacks, trainercontrol: see :class:`~trainwright.hooks.Callback`.
    """

    run: Run
    run_kind = Run
    device: torch.device = part_of_run()
    model: nn.Module = part_of_run()
    optimizer: Optimizer = part_of_run()
    optimizers: dict[str, Optimizer] = part_of_run()
    lr_scheduler: Any = part_of_run()
    lr_schedulers: dict[str, Any] = part_of_run()
    checkpointer: Checkpointer = part_of_run()
    callbacks: CallbackList = part_of_run()
    trainercontrol: TrainerControl = part_of_run("control")

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        new = super().__new__(cls)
        new.run = cls.run_kind(new, arguments, named)  # those of a subclass, whatever it passes on
        return new

    def __init__(self) -> None:
        super().__init__()
        self._hooks = self.run.hooks

    def add_callback(self, callback: Callback, singleton: bool = True) -> None:
        """Register ``callback``. ``singleton``: replaces registered callbacks of its class."""
        self.run.callbacks.add_callback(callback, singleton)
        self.run.use_callbacks()

    @replaceable_property
    def history(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.json`` so far, also of the run that this one resumes: values by name, with "iteration".

        A table is ``pandas.DataFrame(trainer.history)``. Values that are not finite are None.
        """
        if not (self.has_trained or self.run.folder.resume):
            return []  # the files of an earlier run
        path = self.run.folder.path / METRICS_NAME
        return list(parse_rows(read_regular(path).decode().splitlines())) if path.is_file() else []

    @replaceable_property
    def best_checkpoint(self) -> Path | None:
        """The best checkpoint by the metric of the best model; None if there is none.

        Those by the metrics of ``save_best`` are beside it, as ``model_{metric}_best``.
        """
        path = Path(self.run.checkpointer.save_dir, BEST)
        return path if (self.has_trained or self.run.folder.resume) and path.exists() else None

    def log(self, values: Mapping[str, Any], *others: Never, **options: Never) -> None:
        """Log values by name, numbers or tensors of one element, in each writer; tensors are read later, at a log line.

        * In a step: the mean over the micro-batches of the update and over all processes, weighted as the loss is. Of
          several values in one micro-batch the latest counts.
        * Elsewhere in a training, as in ``after_step`` or ``on_epoch_end``: the value of the current iteration; with
          several processes, of the main one.
        * In an evaluation: the mean over its batches on all processes, weighted as its loss is, among the results; the
          writers get it as ``eval_<name>``.

        Raises:
            NoEventStorageError: there is no training and no evaluation.
            ConfigError: the name is taken, or an update would have two values of it.
        """
        scalars, storage = logged_scalars(values, *others, **options), get_event_storage()
        step = self.run.current_step() if self._stepper is not None and self.iterations_done == self.iter else None
        if isinstance(storage, EvaluationStorage):
            storage.log(scalars)
        elif step is not None:
            step.log(scalars)
        else:
            storage.admit_logged(scalars, "a hook or callback")
            for name, value in scalars.items():
                storage.put_scalar(name, value)
            if self.run.write_hook is not None and self.is_training:
                self.run.write_hook.warn_of_late(scalars, storage.iter)

    # Called by a user's own step.

    def autocast(self) -> AbstractContextManager[Any]:
        """The run's precision, for computations of a step outside the model's ``forward``."""
        return nullcontext() if self.run.autocast is None else self.run.autocast()

    def backward(
        self,
        loss: Tensor,
        *,
        optimizer: Optimizer | str | None = None,
        inputs: Sequence[Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradients of the mean loss of this batch, weighted by its share of the accumulation window.

        ``optimizer``: only those of its parameters; the other network of a GAN gets none. ``inputs``: only those of
        these tensors.
        """
        self.run.own_step.backward(loss, optimizer=optimizer, inputs=inputs, retain_graph=retain_graph)

    def clip_gradients(
        self, max_norm: float | None = None, norm_type: float = 2.0, *, optimizer: Optimizer | str | None = None
    ) -> Tensor | None:
        """Clip the gradients of an optimizer (default: the only one) to a norm (default: the configured one).

        Returns the norm before clipping; None within an accumulation window, where nothing is done. The following
        :meth:`step` does not clip again.
        """
        norm: Tensor | None = self.run.own_step.clip_gradients(max_norm, norm_type, optimizer)
        return norm

    def step(self, optimizer: Optimizer | str | None = None) -> None:
        """Clip, step an optimizer (by default all) and set its gradients to None; at a window's end only."""
        self.run.own_step.step(optimizer)

    def zero_grad(self, optimizer: Optimizer | str | None = None) -> None:
        """Set the gradients of an optimizer (by default all) to None, at the beginning of a window only."""
        self.run.own_step.zero_grad(optimizer)

    def toggled(self, optimizer: Optimizer | str) -> AbstractContextManager[None]:
        """A context in which parameters of the other optimizers require no gradient: their part costs no memory."""
        context: AbstractContextManager[None] = self.run.own_step.toggled(optimizer)
        return context

    # The run, and copies of it.

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
        finder = ring("inspect.find.learning_rate")
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
        sizes: BatchSizes = ring("inspect.find.batch_size").find_batch_size(self.run, memory=memory, max_size=max_size)
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
            batches = self.run.examples()
            with kept_generators(in_checkpoints=True):
                batch = next(iter(batches))
        with self.run.evaluated_weights():
            return export_of_run(self.model, path, self.run.prepare_eval(batch), tolerance=tolerance)

    def sample_ids(self, update: int) -> list[list[int]] | None:
        """The indices of the samples of update ``update`` (from 1): for each micro-batch those of all processes.

        They are computed from the sampler, for past and coming updates. None: the loader is of a stream, or the user's
        own, whose order is unknown, or the run was resumed since the length of the data has changed.
        :func:`~trainwright.data.sample_name` gives the data set's name of an index.

        Raises:
            ConfigError: the run has no such update, or an earlier start of the run with another batch size made it.
        """
        run = self.run
        if not 1 <= update <= self.max_iter:
            raise ConfigError(f"sample_ids: got update {update}; the run has the updates 1 to {self.max_iter:,}.")
        starts = read_starts(run.folder.path / RECORD_NAME) if update <= self.start_iter else []
        if len(sizes := {start.get("samples_per_iteration") for start in starts}) > 1:
            raise ConfigError(
                f"sample_ids: update {update} is of an earlier start of the run, and its starts had"
                f" {' and '.join(str(size) for size in sorted(sizes, key=str))} samples per update, so the samples of"
                " earlier updates are unknown."
            )
        found = run.position_of(update)
        ids: list[list[int]] | None = None if found is None else run.batches.loader.batch_sampler.micro_batches(*found)
        return ids

    def described_samples(self, update: int) -> str:
        """Sentences for messages that name the samples of an update; empty if they are unknown."""
        ids = self.sample_ids(update)
        if ids is None:
            return ""
        indices = [index for batch in ids for index in batch]
        try:
            shown = shown_samples(self.run.batches.loader.dataset, indices)
        except Exception as error:  # of the data set's own code: the message is about something else
            logger.debug("The data set has failed to name its samples: %r", error)
            shown = shown_samples(None, indices)
        how = f"trainer.replay({update}), in place of trainer.train(),"
        if self.run.spec.api == "config file" and not self.run.has_own_trainer:
            how = f"`trainwright replay {self.run.spec.output_dir} --step {update}`"
        return f"Samples of update {update}: {shown}. {how} shows the loss of each."

    def print_info(self) -> None:
        """Log the model, the data, the length of the run and its settings."""
        logger.info("%s", table("Training", self.run.rows()))

    # Called by the loop.

    def _use_settings(self) -> None:
        """Use what the user has changed in the settings since the last training, or since the trainer was built.

        Raises:
            ConfigError: a setting was changed that only the constructor reads.
        """
        run = self.run
        if run.settings_now() != run.settings_read:
            self._apply_settings(run.late_changes())
            run.settings_read = run.settings_now()

    def _apply_settings(self, names: set[str]) -> None:
        """Use the current values of these settings."""

    @contextmanager
    def _training(self, start_iter: int | None = None, max_iter: int | None = None) -> Iterator[Callable[[], None]]:
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself looks at it
            raise ConfigError(
                "This process is a worker that has only begun: multiprocessing (spawn or forkserver) imports the"
                ' program in it, which would train again. Put the training below `if __name__ == "__main__":`.'
            )
        if start_iter is not None and max_iter is None and start_iter != self.start_iter:
            raise ConfigError(
                f"train: got {start_iter!r}. It takes nothing, or the iteration to start at (from 0) and that to stop"
                f" before: train({self.start_iter}, {self.max_iter}). The length of a run is a setting:"
                f" {self.run.spec.name_of('num_epochs')}, or {self.run.spec.name_of('max_steps')}."
            )
        with super()._training(start_iter, max_iter) as run_step:
            is_done = max_iter is None and self.start_iter >= self.max_iter
            yield run_step
        if is_done and not self.last_eval_results:  # no hook has evaluated
            self.last_eval_results = self.run.folder.last_results()
            self.run.best_weights.use()

    def before_train(self) -> None:
        self.run.best_weights.check()  # the settings may have been changed
        self.run.best_weights.undo()
        self.run.check_metrics()
        self.run.use_built_in_callbacks()
        check_known_labels(self.run)
        check_packed_texts(self.run.model, self.run.batches.loader)
        folder = self.run.folder
        folder.lock()
        if self.run.checkpointer.mirror is not None and not folder.resume:
            self.run.checkpointer.mirror.check_empty()
        if folder.is_open or folder.resume:  # otherwise the checkpoints in it are moved, not continued
            self.run.checkpointer.check_newest()
        self.print_info()
        super().before_train()

    def after_train(self) -> None:
        try:
            super().after_train()
        finally:
            self.start_iter = self.iterations_done  # a later train() continues from here
            self.run.close_data()
            self.run.checkpointer.close()
            self.run.folder.close()

    def _continue(self) -> None:
        if not self.run.state.is_complete:  # an update that has failed is made again, from its first batch
            self.run.set_position()
        if self.run.state.continue_here():
            self.run.folder.reopen()

    def _is_end_pending(self) -> bool:
        return self.run.state.is_end_pending

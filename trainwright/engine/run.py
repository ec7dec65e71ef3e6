"""``Run``: the parts of a run, and what is done with them. Checks, finders, replay and estimates work on a run."""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.config.errors import ConfigError
from trainwright.data.batch_loader import BatchLoader
from trainwright.engine.folder.run_folder import RunFolder
from trainwright.engine.folder.summary import RunFacts
from trainwright.engine.spec import RunSpec
from trainwright.engine.state import TrainingState
from trainwright.engine.update import Update
from trainwright.events.storage import EventStorage
from trainwright.hooks.base import HookBase
from trainwright.optim.named import each_optimizer

_DATA = ("train_dataset", "eval_dataset", "train_dataloader", "eval_dataloader", "preprocessor", "model_card")


class Batches:
    """The data of a run: the loader that the steps read, and those of evaluations."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def loader(self) -> Any:
        """The loader that the steps read."""
        return self._trainer._loader

    @property
    def eval_loaders(self) -> list[Any]:
        """The loaders of evaluations; with ``overfit_batches`` they have the training data."""
        found: list[Any] = self._trainer._listed_eval_loaders
        return found

    def first(self, number: int) -> list[Any]:
        """The first batches of the loader, as it gives them."""
        found = list(islice(iter(self.loader), number))
        for one in (self.loader, getattr(self.loader, "loader", None)):
            if isinstance(one, BatchLoader):
                one.close()
        return found

    def repeat(self, batches: Sequence[Any]) -> None:
        """Let the steps read copies of these batches, again and again."""
        loader = self.loader
        kind = type(loader)

        def iterate(_: Any) -> Iterator[Any]:
            return map(copy.deepcopy, cycle(batches))

        repeating: Any = object.__new__(type(kind.__name__, (kind,), {"__iter__": iterate}))
        vars(repeating).update(vars(loader))
        self._trainer._use_loader(repeating)

    def examples(self) -> Iterable[Any]:
        """The batches whose first one is an example of the model's input."""
        found: Iterable[Any] = self._trainer._example_batches()
        return found

    def set_position(self) -> None:
        """Start the training data behind the iterations of a loaded checkpoint, if the first step does not do it."""
        self._trainer._set_position()

    def close(self) -> None:
        """Stop what reads the data ahead."""
        self._trainer._close_loaders()


class Run:
    """The parts of the run of ``trainer``, which is of either API.

    Attributes:
        spec: the settings; set before the model is built.
        batches: the data, :class:`Batches`.
        is_copy: whether a check or a finder trains this run and discards it.
        step_methods: the methods whose override is a step of the user's own, or its loss.
    """

    spec: RunSpec
    is_copy = False
    num_own_hooks = 0  # the hooks behind them are the user's

    def __init__(self, trainer: Any) -> None:
        self._reference = weakref.ref(trainer)  # a plain reference would make a cycle
        self.batches = Batches(weakref.proxy(trainer))

    @property
    def trainer(self) -> Any:
        """The trainer whose run this is: it trains, and has the methods that a user overrides."""
        return self._reference()

    @property
    def step_methods(self) -> tuple[str, ...]:
        names: tuple[str, ...] = self.trainer._step_methods
        return names

    @property
    def device(self) -> torch.device:
        return torch.device(self.trainer.device)

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.trainer.model
        return model

    @property
    def optimizer(self) -> Any:
        """The optimizer, or several by name as a :class:`~trainwright.optim.named.NamedOptimizers`."""
        return self.trainer.optimizer

    @property
    def lr_schedulers(self) -> list[Any]:
        """The learning-rate schedules."""
        several = [self.trainer.lr_scheduler, *self.trainer.lr_schedulers.values()]
        return [one for one in several if one is not None]

    @property
    def checkpointer(self) -> Checkpointer:
        found: Checkpointer = self.trainer.checkpointer
        return found

    @property
    def storage(self) -> EventStorage:
        storage: EventStorage = self.trainer.storage
        return storage

    @property
    def folder(self) -> RunFolder:
        """The output folder."""
        folder: RunFolder = self.trainer._folder
        return folder

    @property
    def state(self) -> TrainingState:
        """What a checkpoint stores beside model, optimizer and schedule."""
        state: TrainingState = self.trainer._state
        return state

    @property
    def update(self) -> Update:
        """The update of the weights by the gradients."""
        update: Update = self.trainer._update
        return update

    @property
    def hooks(self) -> list[HookBase]:
        """The registered hooks, in the order of their calls."""
        return self.trainer._hooks  # type: ignore[no-any-return]

    @hooks.setter
    def hooks(self, hooks: Iterable[HookBase]) -> None:
        self.trainer._hooks = [*hooks]

    # One batch.

    def prepare(self, batch: Any) -> Any:
        """A batch of the training data, as the model gets it."""
        return self.trainer._prepare_training_batch(batch)

    def prepare_eval(self, batch: Any) -> Any:
        """A batch of an evaluation, as the model gets it."""
        return self.trainer._prepare_batch(batch)

    def forward(self, batch: Any) -> Any:
        """The model's outputs for a prepared batch."""
        return self.trainer._forward(batch)

    def loss(self, batch: Any) -> Tensor:
        """The training loss of a prepared batch, in the modes that the modules have."""
        loss: Tensor = self.trainer._loss_of(batch)
        return loss

    # The run.

    def step_call(self) -> Callable[[], None]:
        """The call that makes a step; restores the training state of a resumed run first."""
        self.trainer._before_first_step()
        _, call = self.trainer._bind_run_step()
        step: Callable[[], None] = call
        return step

    @property
    def has_trained(self) -> bool:
        """Whether ``train()`` or a replay has made steps with these parts."""
        return bool(self.trainer._has_trained)

    def steps_before(self, until: int) -> Iterator[Callable[[], None]]:
        """The call that makes a step, once for each iteration before ``until``, for the caller to make."""
        trainer = self.trainer
        trainer._before_first_step()
        trainer._stepper, call = trainer._bind_run_step()
        trainer._has_trained = True
        try:
            for _ in trainer._iterations(until):
                yield call
        finally:
            trainer._stepper = None

    def skip_train_metrics(self) -> None:
        """Compute no metrics of training steps from now on."""
        metrics = getattr(self.trainer, "_train_metrics", None)
        if metrics is not None:
            metrics.is_on = False

    def evaluate(self) -> dict[str, Any]:
        """The results of an evaluation of the current weights, which is not logged."""
        results: dict[str, Any] = self.trainer._evaluate_weights()
        return results

    def save(self) -> None:
        """Save the training state between two iterations."""
        self.trainer._save()

    def facts(self) -> RunFacts:
        """What the start of the run shows."""
        facts: RunFacts = self.trainer._run_facts()
        return facts

    def rebuild_model(self) -> nn.Module | None:
        """The model of the settings, built again; None: the user has passed a model."""
        model: nn.Module | None = self.trainer._built_again()
        return model

    def schedule_length(self, schedule: Any) -> int:
        """The number of steps of a schedule in the run."""
        return int(self.trainer._schedule_length(schedule))

    def use_learning_rate(self, rate: float) -> None:
        """Write the base learning rate into the settings."""
        self.trainer._use_learning_rate(rate)

    def copy(self, folder: Path, *, resumes: bool = False, constant_rate: bool = False, **changes: Any) -> Any:
        """A trainer like this one, to train and discard. Its files are in ``folder``; its run is ``copy.run``.

        Data sets are shared; the model, the optimizer, the loss, the callbacks and what the user has added later are
        copied. It has the current weights and starts at the first step. It has no hooks that write or handle signals.

        Args:
            resumes: it resumes from the checkpoints in ``folder``.
            constant_rate: with the base learning rate instead of the schedule, and without an end.
            changes: settings, by their names in ``TrainingConfig``; both APIs have ``batch_size`` and
                ``gradient_accumulation_steps``.

        Raises:
            ConfigError: a part of the trainer cannot be copied.
        """
        trainer = self.trainer
        kind, (arguments, named) = trainer.__class__, trainer._arguments
        settings = trainer._settings_of_copy(folder, changes, resumes=resumes, is_endless=constant_rate)
        new = kind.__new__(kind, *arguments, **named)
        memo = self._memo(new, settings)
        try:
            arguments, named = copy.deepcopy((arguments, named), memo)
            new.__init__(*arguments, **named)
            new.run.is_copy = new._is_copy = True
            trainer._change_copy(new, memo)
            self._copy_later_changes(new, memo)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            if "deepcopy" not in str(error) and "pickle" not in str(error):
                raise
            raise ConfigError(f"check: the trainer cannot be copied: {error}") from error
        new.run.hooks = [h for h in new.hooks if h.in_copies and not (constant_rate and h.steps_schedule)]
        if constant_rate:
            for one in each_optimizer(new.optimizer):
                for group in one.param_groups:
                    group["lr"] = group.get("initial_lr", group.get("lr"))
        return new

    def _memo(self, new: Any, settings: Any) -> dict[int, Any]:
        """The memo of ``copy.deepcopy`` with the parts that are replaced, and with those that are shared."""
        trainer = self.trainer
        arguments, named = trainer._arguments
        given = (*arguments, *named.values())
        memo: dict[int, Any] = {id(trainer): new}
        memo |= {id(part): settings for part in given if type(part) is type(settings) and part is not None}
        data = [getattr(trainer, name, None) for name in _DATA]
        for one in (*data, *given):
            for part in (one, *(one.values() if isinstance(one, dict) else ())):
                if any(part is each for each in data) or isinstance(part, Dataset | DataLoader):
                    memo[id(part)] = part
        for callback in getattr(trainer, "callbacks", ()):
            memo[id(getattr(callback, "trainer", None))] = None
        handler = vars(trainer).get("metrics_handler")
        if handler is not None:
            memo[id(handler)] = plain = copy.copy(handler)
            if hasattr(plain, "trainer"):
                plain.trainer = None
        return memo

    def _copy_later_changes(self, new: Any, memo: dict[int, Any]) -> None:
        """Copy what the user has added since the trainer was built."""
        trainer = self.trainer
        for name in vars(trainer).keys() - vars(new).keys():
            if not name.startswith("_") and not hasattr(trainer.__class__, name):
                setattr(new, name, copy.deepcopy(vars(trainer)[name], memo))
        for name, part in trainer.checkpointer.checkpointables.items():
            if name not in new.checkpointer.checkpointables:
                new.checkpointer.add_checkpointable(name, copy.deepcopy(part, memo))
        for hook in self.hooks[self.num_own_hooks :]:
            memo[id(vars(hook).get("trainer"))] = None
            new.register_hooks([copy.deepcopy(hook, memo)])

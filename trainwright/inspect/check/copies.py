"""Copies of a trainer: a check trains one of them and throws it away, so that nothing of the user's is changed."""

import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainwright.config.errors import ConfigError
from trainwright.data.batch_loader import BatchLoader
from trainwright.data.seeding import rng_states, set_rng_states
from trainwright.engine.run_summary import logging_only_above
from trainwright.hooks import (
    HookBase,
)
from trainwright.hooks.method_overrides import is_overridden
from trainwright.inspect.check.finding import Skipped
from trainwright.parallel.dist import get_world_size

_DATA = ("train_dataset", "eval_dataset", "train_dataloader", "eval_dataloader", "preprocessor", "model_card")


class Copies:
    """Copies of ``trainer``, of either API, with their files in ``folder``.

    Data sets are shared by the copies; the model, the optimizer, the loss and the callbacks are copied. A copy has the
    current weights of the trainer and starts at its first step.

    Attributes:
        output_dir: the folder of the run, to which nothing is written.
        has_own_step: whether the step is the user's, so that its loss is unknown.
        has_own_loss: whether the step or its loss is the user's.
    """

    def __init__(self, trainer: Any, folder: Path, *, end: float) -> None:
        """``end``: the time (of ``time.perf_counter``) at which trainings stop."""
        self.trainer, self.folder, self._end, self._number = trainer, folder, end, 0
        self.output_dir = str(trainer.run.folder.path)
        own = {name for name in trainer.run.step_methods if is_overridden(trainer, name)}
        self.has_own_step, self.has_own_loss = bool(own - {"compute_loss"}), bool(own)
        assigned = [name for name in (*trainer.run.step_methods, "evaluate") if callable(vars(trainer).get(name))]
        if get_world_size() > 1:
            raise ConfigError(
                "check, find_lr and find_batch_size run in one process: start the program without a launcher."
            )
        if assigned:
            raise ConfigError(
                f"check: {type(trainer).__name__}.{assigned[0]} was assigned to the object, so a copy of the trainer"
                " would train the original. Override it in a subclass."
            )

    @property
    def device(self) -> torch.device:
        return torch.device(self.trainer.device)

    def seconds_left(self) -> float:
        return self._end - time.perf_counter()

    def make(
        self, *, folder: Path | None = None, resumes: bool = False, constant_rate: bool = False, **changes: Any
    ) -> Any:
        """A new copy.

        ``constant_rate``: with the base learning rate instead of the schedule, and without an end. ``changes``:
        settings, by their names in ``TrainingConfig``; both APIs have ``batch_size`` and
        ``gradient_accumulation_steps``.
        """
        if self.seconds_left() <= 0:
            raise Skipped("no time was left")
        self._number += 1
        folder = folder or self.folder / str(self._number)
        return self.trainer.run.copy(folder, resumes=resumes, constant_rate=constant_rate, **changes)

    def train(
        self,
        new: Any,
        iterations: int,
        *,
        before: Callable[[Any], object] | None = None,
        after: Callable[[Any], object] | None = None,
        needed: int | None = None,
    ) -> int:
        """Train a copy and return the number of iterations made: fewer if the time is over.

        ``before`` and ``after`` are called with the copy before and after each. Raises Skipped if fewer than
        ``needed`` (default: all) were made.
        """
        watch = _Watch(new, new.start_iter + iterations, self._end, before, after)
        new.register_hooks([watch])
        try:
            new.train()
        finally:
            new.run.hooks.remove(watch)
        if watch.done < min(iterations if needed is None else needed, iterations) and watch.is_late:
            raise Skipped(f"the time ended after {watch.done} iterations")
        return watch.done

    def eval_loaders(self, new: Any) -> list[Any]:
        """The loaders of evaluations, none of the training data (``overfit_batches``)."""
        if self.setting("overfit_batches") is not None:
            return []
        found: list[Any] = new.run.batches.eval_loaders
        return found

    def setting(self, name: str) -> Any:
        """A setting that both APIs have by one name."""
        spec = self.trainer.run.spec
        return getattr(spec.learning if name == "unfreeze" else spec.limits, name)

    def batches(self, new: Any, number: int) -> list[Any]:
        """The first batches of the loader, as it gives them."""
        loader = new.run.batches.loader
        first = list(islice(iter(loader), number))
        for one in (loader, getattr(loader, "loader", None)):
            if isinstance(one, BatchLoader):
                one.close()
        return first

    def prepared(self, new: Any, batch: Any) -> Any:
        """The batch as the model gets it."""
        return new.run.prepare(copy.deepcopy(batch))

    def loss(self, new: Any, batch: Any) -> Tensor:
        """The training loss of a prepared batch, with the modes that the modules have.

        Raises:
            Skipped: the step is the user's.
        """
        if self.has_own_step:
            raise Skipped("the step is your own, and may have several losses")
        value: Tensor = new.run.loss(batch)
        return value


class _Watch(HookBase):
    """Calls functions around each step, and stops the training after an iteration or at a time."""

    def __init__(self, new: Any, last: int, end: float, before: Any, after: Any) -> None:
        self._new, self._last, self._end, self._before, self._after = new, last, end, before, after
        self.done, self.is_late = 0, False

    def before_step(self) -> None:
        if self._before is not None:
            self._before(self._new)

    def after_step(self) -> None:
        self.done += 1
        if self._after is not None:
            self._after(self._new)
        self.is_late = time.perf_counter() > self._end
        if self._new.iter + 1 >= self._last or self.is_late:
            self._new.max_iter = self._new.iter + 1


@contextmanager
def restored_generators(device: torch.device) -> Iterator[None]:
    """Restore the random generators afterwards; checkpoints inside have the states that they have there."""
    states = rng_states(device)
    try:
        yield
    finally:
        set_rng_states(states, device)


@contextmanager
def quiet() -> Iterator[None]:
    """Without log lines, warnings and printed lines of the copies."""
    with logging_only_above(logging.CRITICAL), warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield

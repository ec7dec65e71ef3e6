"""Copies of a trainer: a check trains one of them and throws it away, so that nothing of the user's is changed."""

import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.base.dist import get_world_size
from trainwright.base.errors import ConfigError
from trainwright.engine.logs import logging_only_above
from trainwright.engine.run import Run
from trainwright.hooks import CallbackHook
from trainwright.hooks.method_overrides import is_overridden
from trainwright.inspect.check.finding import Skipped
from trainwright.optim.named import each_optimizer
from trainwright.parallel.mesh import current_mesh


class Copies:
    """Copies of the trainer of ``run``, of either API, with their files in ``folder``.

    Attributes:
        output_dir: the folder of the run, to which nothing is written.
        has_own_step: whether the step is the user's, so that its loss is unknown.
        has_own_loss: whether the step or its loss is the user's.
    """

    def __init__(self, run: Run, folder: Path, *, end: float) -> None:
        """``end``: the time (of ``time.perf_counter``) at which trainings stop."""
        self.run, self.folder, self.end, self._number = run, folder, end, 0
        self.output_dir = str(run.folder.path)
        trainer = run.trainer
        own = {name for name in run.step_methods if is_overridden(trainer, name)}
        self.has_own_step, self.has_own_loss = bool(own - {"compute_loss"}), bool(own)
        assigned = [name for name in (*run.step_methods, "evaluate") if callable(vars(trainer).get(name))]
        if trainer.is_training:
            raise ConfigError(
                "check, find_lr and find_batch_size train copies of a trainer that does not train: call them before"
                " train(), not in a callback or a hook."
            )
        if get_world_size() > 1 or current_mesh() is not None:
            raise ConfigError(
                "check, find_lr and find_batch_size run in one process, without zero_offload: start the program without"
                " a launcher."
            )
        if assigned:
            raise ConfigError(
                f"check: {type(trainer).__name__}.{assigned[0]} was assigned to the object, so a copy of the trainer"
                " would train the original. Override it in a subclass."
            )

    def seconds_left(self) -> float:
        return self.end - time.perf_counter()

    def make(
        self, *, folder: Path | None = None, resumes: bool = False, constant_rate: bool = False, **changes: Any
    ) -> "Copy":
        """A new copy: see :meth:`~trainwright.engine.run.Run.copy`."""
        if self.seconds_left() <= 0:
            raise Skipped("no time was left")
        self._number += 1
        new = self.run.copy(
            folder or self.folder / str(self._number), resumes=resumes, constant_rate=constant_rate, **changes
        )
        return Copy(new.run, end=self.end, has_own_step=self.has_own_step)


class Copy:
    """A copy of a trainer, which one check trains and throws away."""

    def __init__(self, run: Run, *, end: float, has_own_step: bool) -> None:
        self.run, self._end, self._has_own_step = run, end, has_own_step
        self.trainer = run.trainer  # a run does not keep it
        self.model = run.model
        self.optimizers: list[Optimizer] = each_optimizer(run.optimizer)
        # None of the training data.
        self.eval_loaders = [] if run.spec.overfit_batches is not None else run.eval_loaders()

    def train(
        self,
        iterations: int,
        *,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
        needed: int | None = None,
    ) -> None:
        """Train, for fewer iterations if the time is over; ``before`` and ``after`` are called around each one.

        Raises:
            Skipped: fewer than ``needed`` (default: all) were made.
        """
        last, done, is_late = self.trainer.start_iter + iterations, 0, False

        def after_step(_: object) -> None:
            nonlocal done, is_late
            done += 1
            if after is not None:
                after()
            is_late = time.perf_counter() > self._end
            if self.trainer.iter + 1 >= last or is_late:
                self.stop()

        watch = CallbackHook(before_step=None if before is None else lambda _: before(), after_step=after_step)
        self.trainer.register_hooks([watch])
        try:
            self.trainer.train()
        finally:
            self.run.hooks.remove(watch)
        if done < min(iterations if needed is None else needed, iterations) and is_late:
            raise Skipped(f"the time ended after {done} iterations")

    def stop(self) -> None:
        self.trainer.stop("the check has made its steps")

    def step_loss(self) -> float | None:
        """The loss of the update just made; None: the step reports none."""
        found = self.run.storage.latest().get("total_loss")
        return None if found is None else float(found[0])

    def prepared(self, batch: Any) -> Any:
        return self.run.prepare(copy.deepcopy(batch))

    def loss(self, batch: Any) -> Tensor:
        """The training loss of a prepared batch, with the modes that the modules have.

        Raises:
            Skipped: the step is the user's.
        """
        if self._has_own_step:
            raise Skipped("the step is your own, and may have several losses")
        return self.run.loss(batch)


@contextmanager
def quiet() -> Iterator[None]:
    with logging_only_above(logging.CRITICAL), warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield

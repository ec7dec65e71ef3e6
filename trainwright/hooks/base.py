"""The base class of hooks: code that runs at the moments of a training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from trainwright.hooks.method_overrides import overridable

MOMENTS = ("before_train", "before_first_step", "before_step", "after_step", "after_train", "after_end", "before_save")
Period: TypeAlias = int | Callable[[], int]
"""When a hook acts: every n iterations (0: never), or after an iteration for which the function returns True, such as
``trainer.state.is_epoch_end`` of the Python API; the steps of a schedule may be several."""


@dataclass(frozen=True)
class BestResult:
    """The best value of a metric, and the iteration (from 1) whose weights have it."""

    metric: str
    value: float
    iteration: int
    is_higher_better: bool
    text: str  # for people: with its checkpoint


@overridable
class HookBase:
    """Override the methods you need; a method that is not overridden costs nothing.

    ``self.trainer`` is the trainer, set when the hook is registered: ``trainer.iter, start_iter, max_iter, storage,
    …``. Hooks run in the order of registration. A hook whose state must survive a resume has ``state_dict()`` and
    ``load_state_dict(state)``.

    The order of calls::

        before_train()
        before_first_step()
        for iter in range(start_iter, max_iter):
            before_step()
            run_step()
            after_step()
        after_train()
        after_end()
    """

    trainer: Any = None  # any trainer: hooks must not import the engine

    @property
    def may_change_data(self) -> bool:
        """Whether it may change the training data between two steps, so that workers have to start again to know."""
        return not type(self).__module__.startswith("trainwright.")

    # What a hook is, for those who choose among hooks: the class sets it, an instance may.
    is_state_of_rank = False
    """Whether its state belongs to this process alone, and not to all of them."""
    in_copies = True
    """Whether a copy of the trainer that a check trains has this hook: False if it writes, or acts on the process."""
    ends_run = False
    """Whether it may end a training: by an error for what it finds, or by request."""
    changes_process = False
    """Whether ``before_train`` changes settings of the process, which ``after_train`` restores."""
    steps_schedule = False
    """Whether it steps a schedule of learning rates,"""
    uses_results = False
    """and does so with a metric, as a ``ReduceLROnPlateau`` needs it."""

    @property
    def shows_results(self) -> bool:
        """Whether it logs the results of an evaluation of this iteration, before the next one."""
        return False

    def best_result(self) -> BestResult | None:
        """The best result so far; None for a hook that compares none, or has none yet."""
        return None

    def before_train(self) -> None:
        """Called once, before the first iteration."""

    def before_first_step(self) -> None:
        """Called once, after every hook's ``before_train`` and after the state of a resumed run has been restored."""

    def after_train(self) -> None:
        """Called once at the end, also after a failure: then ``trainer.iter < trainer.max_iter``."""

    def after_end(self) -> None:
        """Called once, after every hook's ``after_train``; ``trainer.has_failed`` is final.

        The final checkpoint, from which a longer run continues, has been saved again with the state of hooks that the
        final evaluation has changed. Override this method for work that a longer run must not see.
        """

    def before_step(self) -> None:
        """Called before each iteration, after every hook has finished the previous one."""

    def after_step(self) -> None:
        """Called after each iteration."""

    def before_save(self) -> None:
        """Called on every process before a checkpoint is made; an exception prevents it."""

    def before_longer_run(self, *, is_evaluated: bool) -> None:
        """Called before the first step of a run that continues after the end of a shorter one, in the same folder.

        ``is_evaluated``: the shorter run had final results, which are now those of its last iteration.
        """


class CallbackHook(HookBase):
    """Calls functions of the trainer at the moments of a hook.

    >>> hook = CallbackHook(after_step=lambda trainer: print(trainer.iter))
    """

    def __init__(
        self,
        *,
        before_train: Callable[[Any], object] | None = None,
        after_train: Callable[[Any], object] | None = None,
        before_step: Callable[[Any], object] | None = None,
        after_step: Callable[[Any], object] | None = None,
        after_end: Callable[[Any], object] | None = None,
    ) -> None:
        given = {
            "before_train": before_train,
            "after_train": after_train,
            "before_step": before_step,
            "after_step": after_step,
            "after_end": after_end,
        }
        for moment, function in given.items():
            if function is not None:
                setattr(self, moment, self._call(function))

    @property
    def may_change_data(self) -> bool:
        return bool({"before_train", "before_step", "after_step"} & vars(self).keys())

    def _call(self, function: Callable[[Any], object]) -> Callable[[], None]:
        def call() -> None:
            function(self.trainer)

        return call


def condition(period: Period) -> Callable[[Any], int]:
    """A function of the trainer that is True if ``period`` is over after the current iteration."""
    if callable(period):
        return lambda trainer: period()
    return lambda trainer: period > 0 and (trainer.iter + 1) % period == 0


def has_failed(trainer: Any) -> bool:
    """Whether the training ended before its last iteration, or the ``after_train`` of an earlier hook has failed."""
    return bool(trainer.iter < trainer.max_iter or trainer.has_failed)

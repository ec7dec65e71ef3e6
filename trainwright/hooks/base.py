"""The base class of hooks: code that runs at five moments of a training."""

from collections.abc import Callable
from typing import Any, TypeAlias

from trainwright.hooks.method_overrides import overridable

Period: TypeAlias = int | Callable[[], bool]
"""When a hook acts: every n iterations (0: never), or after an iteration for which the function returns True, such as
``trainer.state.is_epoch_end`` of the Python API."""


@overridable
class HookBase:
    """Override the methods you need; a method that is not overridden costs nothing.

    ``self.trainer`` is the trainer, set when the hook is registered: ``trainer.iter, start_iter, max_iter, storage,
    …``. Hooks run in the order of registration. A hook whose state must survive a resume has ``state_dict()`` and
    ``load_state_dict(state)``.

    The order of calls::

        before_train()
        for iter in range(start_iter, max_iter):
            before_step()
            run_step()
            after_step()
        after_train()
        after_end()
    """

    trainer: Any = None  # any trainer: hooks must not import the engine

    def before_train(self) -> None:
        """Called once, before the first iteration."""

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

    def _call(self, function: Callable[[Any], object]) -> Callable[[], None]:
        def call() -> None:
            function(self.trainer)

        return call


def condition(period: Period) -> Callable[[Any], bool]:
    """A function of the trainer that is True if ``period`` is over after the current iteration."""
    if callable(period):
        return lambda trainer: period()
    return lambda trainer: period > 0 and (trainer.iter + 1) % period == 0


def has_failed(trainer: Any) -> bool:
    """Whether the training ended before its last iteration, or the ``after_train`` of an earlier hook has failed."""
    return bool(trainer.iter < trainer.max_iter or trainer.has_failed)

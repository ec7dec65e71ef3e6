"""What a hook is: code that runs at five moments of a training."""

from collections.abc import Callable
from typing import Any

from trainwright.hooks.overrides import overridable


@overridable
class HookBase:
    """Override the moments you need; a moment that a hook leaves alone costs nothing.

    ``self.trainer`` is the trainer, set when the hook is registered: ``trainer.iter, start_iter, max_iter, storage,
    …``. Hooks run in the order in which they were registered. A hook with memory that must survive a resume has
    ``state_dict()`` and ``load_state_dict(state)``.

    The order of calls::

        before_train()
        for iter in range(start_iter, max_iter):
            before_step()
            run_step()
            after_step()
        after_train()
        after_end()
    """

    trainer: Any = None  # any trainer: hooks lie below the engine and may not import it

    def before_train(self) -> None:
        """Called once, before the first iteration."""

    def after_train(self) -> None:
        """Called once at the end, also when training failed: ``trainer.iter < trainer.max_iter`` then."""

    def after_end(self) -> None:
        """Called once, last of all: every hook's ``after_train`` has been, and ``trainer.has_failed`` says how it went.

        The final checkpoint, which a longer run goes on from, has been saved again by then, with what the final
        evaluation has changed in the memory of hooks. What is for the end alone belongs here: a longer run does not
        see it.
        """

    def before_step(self) -> None:
        """Called before each iteration, when every hook has finished the one before."""

    def after_step(self) -> None:
        """Called after each iteration."""


class CallbackHook(HookBase):
    """Call functions of the trainer at the four moments of a hook.

    >>> hook = CallbackHook(after_step=lambda trainer: print(trainer.iter))
    """

    def __init__(
        self,
        *,
        before_train: Callable[[Any], object] | None = None,
        after_train: Callable[[Any], object] | None = None,
        before_step: Callable[[Any], object] | None = None,
        after_step: Callable[[Any], object] | None = None,
    ) -> None:
        given = {
            "before_train": before_train,
            "after_train": after_train,
            "before_step": before_step,
            "after_step": after_step,
        }
        for moment, function in given.items():
            if function is not None:
                setattr(self, moment, self._call(function))

    def _call(self, function: Callable[[Any], object]) -> Callable[[], None]:
        def call() -> None:
            function(self.trainer)

        return call

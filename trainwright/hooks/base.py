"""What a hook is: code that runs at five moments of a training."""

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

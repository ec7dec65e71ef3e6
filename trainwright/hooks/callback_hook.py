"""A hook made of plain functions."""

from collections.abc import Callable
from typing import Any

from trainwright.hooks.base import HookBase


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

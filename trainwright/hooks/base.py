"""The base class of hooks: code that runs at the moments of a training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.base.errors import ConfigError
from trainwright.hooks.due import Due
from trainwright.hooks.method_overrides import overridable

MOMENTS = ("before_train", "before_first_step", "before_step", "after_step", "after_train", "after_end", "before_save")
SLOTS = {
    "prepare": "Open the folder, set modes of the process, freeze layers: before any other hook acts.",
    "step": "What belongs to the update: a step of the user's own, averages, times, the learning rate.",
    "check": "Check the update: before anything of it is saved, evaluated or shown.",
    "save": "Save at regular times. Before evaluations, which may take long or fail: the training is saved by then.",
    "evaluate": "Evaluate, and act on the results: the best checkpoint, schedules that need a metric, callbacks.",
    "show": "Log and write the values of all hooks before.",
    "stop": "End the run on request. The user's hooks are behind it by default.",
}
"""The slots of hooks, in the order of their calls."""


@dataclass(frozen=True)
class BestResult:
    """The best value of a metric, and the iteration (from 1) whose weights have it."""

    metric: str
    value: float
    iteration: int
    is_higher_better: bool
    path: str  # of its checkpoint
    text: str  # for people: with its checkpoint


@overridable
class HookBase:
    """Override the methods you need; a method that is not overridden costs nothing.

    ``self.trainer`` is the trainer, set when the hook is registered: ``trainer.iter, start_iter, max_iter, storage,
    …``. Hooks run in the order of their :data:`SLOTS`, and within a slot in that of registration. A hook without a slot
    runs behind all hooks that were registered before it. A hook whose state must survive a resume has ``state_dict()``
    and ``load_state_dict(state)``.

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
    slot: str | None = None
    """Its slot, one of :data:`SLOTS`; None: behind all hooks that are registered before it."""
    place = 0
    """The number of its slot in the list of its trainer, set when it is registered."""
    due: Due | None = None
    """After which iterations ``after_step`` is called: periods and moments; None: after each. It may change at any
    time. A subclass that overrides the ``after_step`` of a hook is called after each one, too."""
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
    changes_final_weights = False
    """Whether its ``after_train`` changes the model before the final evaluation."""
    is_idle = False
    """Whether it has nothing to do in this training: steps do not call it, and checkpoints have no state of it."""

    @property
    def shows_results(self) -> bool:
        """Whether it logs the results of an evaluation of this iteration, before the next one."""
        return False

    def best_result(self) -> BestResult | None:
        """The best result so far; None for a hook that compares none, or has none yet."""
        return None

    def described_start(self) -> dict[str, Any] | None:
        """What a start of the run uses now, as ``run.json`` has it; None for a hook that does not know it."""
        return None

    def before_estimate(self) -> None:
        """Called in place of ``before_train`` where steps are only measured, on tensors without values."""

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
        """Called after each iteration.

        If it fails, it and those of later hooks are called when the training continues, before the next step.
        """

    def use_results(self) -> None:
        """Called after an evaluation that a callback has requested, between its period and the next one.

        ``trainer.last_eval_results`` has the results. After the evaluations of a period ``after_step`` is called.
        """

    def before_save(self) -> None:
        """Called on every process before a checkpoint is made; an exception prevents it."""

    def before_longer_run(self, *, is_evaluated: bool) -> None:
        """Called before the first step of a run that continues after the end of a shorter one, in the same folder.

        ``is_evaluated``: the shorter run had final results, which are now those of its last iteration.
        """


def insert_hook(hooks: list[HookBase], hook: HookBase) -> None:
    """Add ``hook`` to a list of registered ones, behind those of its slot."""
    if hook.slot is None:
        hook.place = max((one.place for one in hooks), default=0)
    elif hook.slot in SLOTS:
        hook.place = [*SLOTS].index(hook.slot)
    else:
        raise ConfigError(f"{type(hook).__name__}.slot: got {hook.slot!r}; it must be one of {', '.join(SLOTS)}.")
    later = (number for number, one in enumerate(hooks) if one.place > hook.place)
    hooks.insert(next(later, len(hooks)), hook)


def decides_itself(hook: HookBase) -> bool:
    """Whether its ``after_step`` overrides that of another hook: it may do more, and is called in each iteration."""
    definitions = [kind for kind in type(hook).__mro__ if "after_step" in vars(kind)]
    return len(definitions) > 2 or "after_step" in vars(hook)


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


def has_failed(trainer: Any) -> bool:
    """Whether the training ended before its last iteration, or the ``after_train`` of an earlier hook has failed."""
    return bool(trainer.iter < trainer.max_iter or trainer.has_failed)

"""How far a training is: what a checkpoint holds beside model, optimizer and schedule."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from trainwright.config.errors import ConfigError
from trainwright.engine.loop import TrainerBase
from trainwright.engine.outside import load_outside_state, outside_state
from trainwright.engine.randomness import random_state, set_random_state
from trainwright.hooks.finite import FiniteCheck
from trainwright.hooks.writers import PeriodicWriter
from trainwright.parallel.dist import all_gather_object, get_rank

logger = logging.getLogger("trainwright.engine")

# Settings that a resume may find changed, and what becomes of that.
_CHANGES = {
    "lr": "without effect, the optimizer goes on as it was; a run begun anew with the weights alone takes the new one",
    "seed": "from here on samples come in another order, and some of this epoch may come twice or not at all",
    "num_samples": "from here on samples come in another order, and some of this epoch may come twice or not at all",
}


@runtime_checkable
class Stateful(Protocol):
    """Something with a state that a resume must bring back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainingProgress:
    """The trainer's position, every rank's randomness, the hooks' memory and the metrics' windows, as one state.

    Loading sets ``trainer.start_iter`` at once; randomness, hooks and metrics are set by :meth:`restore`, which the
    trainer calls when it is about to make the first step, since building its parts draws random numbers.
    """

    def __init__(self, trainer: TrainerBase, parts: Mapping[str, object], **settings: float | None) -> None:
        """``parts``: the other things in the checkpoints, by name. A resume must find them of the same class.

        ``settings``: the run's ``lr``, ``seed`` and ``num_samples``, as far as known. A resume with others is told what
        that means.
        """
        self._trainer = trainer
        self._settings = settings
        self._classes = {name: type(part).__name__ for name, part in parts.items() if part is not None}
        self._loaded: dict[str, Any] | None = None
        self._outside: dict[str, Any] | None = None  # loaded, and not yet copied

    def state_dict(self) -> dict[str, Any]:
        for hook in self._trainer._hooks:
            if isinstance(hook, FiniteCheck):
                hook.check()
        return {
            # Not the storage's iteration: when a due checkpoint is taken, that is the coming one already.
            "iterations_done": self._trainer.iterations_done,
            "is_ended": self._trainer.is_ended,
            "consumed_samples": self._trainer.samples_done,
            "classes": self._classes,
            "settings": self._settings,
            "random": all_gather_object(random_state()),
            "hooks": [
                {"class": type(hook).__name__, "state": hook.state_dict()}
                for hook in self._trainer._hooks
                if isinstance(hook, Stateful)
            ],
            "metrics": self._trainer.storage.state_dict(),
            "outside": outside_state(*self._trained()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, there in state["classes"].items():
            if (here := self._classes.get(name)) not in (None, there):
                raise ConfigError(
                    f"The checkpoint holds the state of {name} {there}; this run has {here}, which cannot take it over."
                    f" Go on with {there}, or begin anew with its weights alone."
                )
        for name, before in state.get("settings", {}).items():
            if None not in (before, now := self._settings.get(name)) and before != now:
                logger.warning("Resumed with %s %s, begun with %s: %s.", name, now, before, _CHANGES[name])
        self._loaded, self._outside = state, state.get("outside", {})
        with suppress(ConfigError):  # of an optimizer or a loss that is set later; restore() raises it
            self._load_outside()
        self._trainer.start_iter = self._trainer.iterations_done = state["iterations_done"]
        self._trainer.samples_done = state["consumed_samples"]

    @property
    def has_end_to_do(self) -> bool:
        """Whether a state waits for :meth:`restore` that was saved before the end of its run was done."""
        return self._loaded is not None and not self._loaded.get("is_ended", False)

    def restore(self, *, in_place: bool = True) -> None:
        """Bring back, for a resumed training, what only counts from its first step on.

        ``in_place``: the run goes on in its own folder, whose files of metrics are completed.
        """
        state, self._loaded = self._loaded, None
        if state is None:
            return
        self._load_outside()
        self._restore_hooks(state["hooks"])
        self._trainer.storage.load_state_dict(state["metrics"])
        if state.get("is_ended", False) and self._trainer.start_iter < self._trainer.max_iter:
            is_evaluated = self._move_final_values()
            for hook in self._trainer._hooks:
                if isinstance(hook, PeriodicWriter) and in_place:
                    hook.complete_last_row(is_evaluated=is_evaluated)
        # A rank that the checkpoint does not know keeps the seed it has.
        if get_rank() < len(state["random"]):
            set_random_state(state["random"][get_rank()])

    def _trained(self) -> tuple[Any, Any, Any]:
        """Model, optimizer and loss of the trainer as they are now."""
        trainer: Any = self._trainer
        return trainer.model, trainer.optimizer, getattr(trainer, "loss", None)

    def _load_outside(self) -> None:
        if self._outside is not None:
            load_outside_state(self._outside, *self._trained())
            self._outside = None

    def _move_final_values(self) -> bool:
        """Make the values of a shorter run's end, of its final evaluation above all, those of its last iteration.

        That is where a run that does not end there puts them. Returns whether there were any.
        """
        storage = self._trainer.storage
        first = self._trainer.start_iter
        moved = [history.move_last(first, first - 1) for history in storage.histories().values()]
        if any(moved):
            storage.first_unwritten = min(storage.first_unwritten, first - 1)
        return any(moved)

    def _restore_hooks(self, saved: list[dict[str, Any]]) -> None:
        """Give each hook its state: the n-th of a class gets the n-th that was saved of it."""
        unused, fresh = list(saved), []
        for hook in self._trainer._hooks:
            if not isinstance(hook, Stateful):
                continue
            name = type(hook).__name__
            entry = next((entry for entry in unused if entry["class"] == name), None)
            if entry is None:
                fresh.append(name)
                continue
            unused.remove(entry)
            hook.load_state_dict(entry["state"])
        if unused or fresh:
            logger.warning(
                "Resumed with other hooks than the checkpoint's. Saved state that is not used: %s. Hooks that start"
                " fresh: %s.", ", ".join(entry["class"] for entry in unused) or "none", ", ".join(fresh) or "none",
            )  # fmt: skip

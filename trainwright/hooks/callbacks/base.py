"""Callbacks, code that is called around epochs, batches and evaluations; their requests; and lists of them."""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from trainwright.base.errors import ConfigKeyError, ConfigTypeError, nearest_name
from trainwright.config import foreign_names
from trainwright.hooks.callbacks.logs import Logs
from trainwright.hooks.method_overrides import check_methods, is_overridden, overridable

logger = logging.getLogger("trainwright.hooks")


@dataclass
class TrainerControl:
    """A callback sets a flag; the training acts on it at the end of the iteration, and clears it.

    Attributes:
        should_training_stop: this iteration is the last one. The end of the training follows.
        stop_reason: why, for the log and ``run.json``.
        should_epoch_stop: skip the rest of the epoch, if the trainer supports it.
        should_save: save a checkpoint, between this iteration and the next.
        should_evaluate: evaluate now.
        should_log: write the metrics now.
        save_dir: the folder for ``should_save``; None: the run's own checkpoints.
        has_failed: not a request: in ``on_train_end``, whether the training ended before its last iteration.
        is_extra_evaluation: not a request: the training ends between two evaluations that are due, with another one. A
            longer run continues to the next one that is due.
        is_cut_epoch: not a request: the training ends within this epoch. A longer run continues and ends it again.
    """

    should_training_stop: bool = False
    stop_reason: str = ""
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    save_dir: str | None = None
    has_failed: bool = False
    is_extra_evaluation: bool = False
    is_cut_epoch: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name):
            flags = ", ".join(flag.name for flag in fields(self))
            here = foreign_names.ATTRIBUTES.get(name, "").removeprefix("trainercontrol.")
            near = f" Here it is {here}." if hasattr(type(self), here) else nearest_name(name, flags.split(", "))
            raise AttributeError(f"trainercontrol.{name}: there is no such flag; there are {flags}.{near}")
        super().__setattr__(name, value)

    def reset(self) -> None:
        for flag in fields(self):
            setattr(self, flag.name, flag.default)


@overridable
class Callback:
    """Override the methods you need; a method that is not overridden costs nothing.

    ``logs`` holds the latest values by name; they read as floats. In an evaluation it has ``eval_step_loss`` (of a
    pipeline, on the last stage) and, over its batches so far, ``eval_epoch_loss`` and ``eval_epoch_metric`` (the latter
    with one process). ``docs/callbacks.md`` shows the other values, and the order of calls.

    A callback whose state must survive a resume has ``state_dict()`` and ``load_state_dict(state)``; the latter is
    called after ``on_train_begin``.

    Attributes:
        model, optimizer: the trained model and its optimizer; set before ``on_train_begin``.
        trainercontrol: flags that request actions of the training.
        trainer: as of a hook: ``self.trainer.log({"name": value})``. One that the callback has already is kept.
    """

    trainer: Any = None
    model: Any = None
    optimizer: Any = None
    trainercontrol: TrainerControl | None = None

    @property
    def may_change_data(self) -> bool:
        """As of a :class:`~trainwright.hooks.HookBase`."""
        return not type(self).__module__.startswith("trainwright.")

    @property
    def has_ended_run(self) -> bool:
        """Whether it has ended the training before its last iteration, and would do so again."""
        return False

    def set_model(self, model: Any) -> None:
        self.model = model

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def set_trainercontrol(self, trainercontrol: TrainerControl) -> None:
        self.trainercontrol = trainercontrol

    def set_trainer(self, trainer: Any) -> None:
        if self.trainer is None or type(self.trainer) in weakref.ProxyTypes:  # perhaps of an earlier trainer
            self.trainer = trainer

    def on_train_begin(self, logs: Logs) -> None:
        """Called before the first batch, also of a training that continues from a checkpoint."""

    def on_train_end(self, logs: Logs) -> None:
        """Called once at the end, also after a failure: then ``trainercontrol.has_failed`` is True."""

    def on_epoch_begin(self, epochs: int, logs: Logs) -> None:
        """Called before an epoch, and when a resume continues within one: then ``logs["epoch_step"]`` is above 0."""

    def on_epoch_end(self, epochs: int, logs: Logs) -> None:
        """Called after an epoch is trained and evaluated."""

    def on_batch_begin(self, batch: Any, logs: Logs) -> None:
        """Called before a batch, of training or of evaluation."""

    def on_batch_end(self, batch: Any, logs: Logs) -> None:
        """Called after a batch, of training or of evaluation."""

    def on_train_batch_begin(self, batch: Any, logs: Logs) -> None:
        """Called before a training batch, and before ``on_batch_begin``."""

    def on_train_batch_end(self, batch: Any, logs: Logs) -> None:
        """Called after a training batch, and before ``on_batch_end``."""

    def on_eval_batch_begin(self, batch: Any, logs: Logs) -> None:
        """Called before a batch of evaluation, and before ``on_batch_begin``."""

    def on_eval_batch_end(self, batch: Any, logs: Logs) -> None:
        """Called after a batch of evaluation, and before ``on_batch_end``."""

    def on_eval_begin(self, logs: Logs) -> None:
        """Called before an evaluation."""

    def on_eval_end(self, logs: Logs) -> None:
        """Called after an evaluation: ``logs`` has its results."""


# The methods that are called at each moment, callback by callback.
_METHODS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in vars(Callback) if name.startswith("on_")},
    "on_train_batch_begin": ("on_train_batch_begin", "on_batch_begin"),
    "on_train_batch_end": ("on_train_batch_end", "on_batch_end"),
    "on_eval_batch_begin": ("on_eval_batch_begin", "on_batch_begin"),
    "on_eval_batch_end": ("on_eval_batch_end", "on_batch_end"),
}


def _method(moment: str) -> Callable[..., None]:
    def call_each(self: "CallbackList", *arguments: Any) -> None:
        for call in self._calls[moment]:
            call(*arguments)

    return call_each


class CallbackList:
    """Each of its twelve ``on_*`` methods calls the same method of its callbacks, in order.

    Callbacks may be added and removed at any time, also by a callback; this applies from the next call.

    Attributes:
        sees_batches: whether a callback has methods for training batches.
    """

    def __init__(self, callbacks: Iterable[Callback] | None = None) -> None:
        self._callbacks: list[Callback] = []
        self._given: dict[str, Any] = {}  # arguments of set_*, for callbacks added later
        if isinstance(callbacks, Callback):
            raise ConfigTypeError(f"callbacks: got one callback; pass a list: [{_name(callbacks)}(...)].")
        if not isinstance(callbacks, Iterable | None):
            raise ConfigTypeError(f"callbacks: got {callbacks!r:.80}; pass a list of callbacks.")
        for callback in callbacks or ():
            self.add_callback(callback, singleton=False)
        self.collect()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for missing attributes only: the message of those of a list has the method to use."""
            use = "callbacks.pop_callback" if name in ("remove", "pop", "clear") else "add_callback"
            hint = f" Call trainer.{use}(callback)." if hasattr(list, name) else ""
            raise AttributeError(f"CallbackList has no attribute {name!r}.{hint}", name=name, obj=self)

    def __len__(self) -> int:
        return len(self._callbacks)

    def __getitem__(self, place: int) -> Callback:
        return self._callbacks[place]

    def __iter__(self) -> Iterator[Callback]:
        return iter(tuple(self._callbacks))

    def __repr__(self) -> str:
        return f"CallbackList([{', '.join(map(_name, self._callbacks))}])"

    def add_callback(self, callback: Callback, singleton: bool = True) -> None:
        """Append a callback. ``singleton``: replaces those of the same class.

        Raises:
            ConfigTypeError: it is not a Callback.
        """
        if not isinstance(callback, Callback):
            is_class = isinstance(callback, type) and issubclass(callback, Callback)
            hint = f"call it: {callback.__name__}(...)." if is_class else "a callback must be a Callback."
            if hasattr(callback, "after_step"):
                hint = "hooks are added with trainer.register_hooks([...])."
            elif callable(callback) and not isinstance(callback, type):
                hint += " Write class Mine(Callback): def on_epoch_end(self, epochs, logs): ..., or register_hooks(["
                hint += "CallbackHook(after_step=function)])."
            raise ConfigTypeError(f"add_callback: got {callback!r:.80} ({type(callback).__name__}); {hint}")
        named = (name for name in dir(callback) if name.startswith("on_"))
        unknown = [name for name in named if name not in _METHODS and name not in foreign_names.CALLBACK_METHODS]
        if unknown:
            near = [one for name in unknown for one in get_close_matches(name, _METHODS, 1, 0.93)]  # a letter more
            hint = f" Did you mean {near[0]}?" if near else ""
            logger.warning(
                "%s.%s is never called: callbacks have %s.%s",
                _name(callback), ", ".join(unknown), ", ".join(_METHODS), hint,
            )  # fmt: skip
        check_methods(callback, _METHODS, "callbacks", foreign_names.CALLBACK_METHODS, known=unknown)
        if singleton:  # by name: a notebook may define the same class again
            self._callbacks = [other for other in self._callbacks if str(type(other)) != str(type(callback))]
        for setter, value in self._given.items():
            getattr(callback, setter)(value)
        self._callbacks.append(callback)
        self.collect()

    def pop_callback(self, callback: Callback | type[Callback]) -> Callback:
        """Remove a callback, or the first one of a class, and return it.

        Raises:
            ConfigKeyError: it is not in the list.
        """
        for place, other in enumerate(self._callbacks):
            if other is callback or (isinstance(callback, type) and isinstance(other, callback)):
                del self._callbacks[place]
                self.collect()
                return other
        there = ", ".join(map(_name, self._callbacks)) or "none"
        name = callback.__name__ if isinstance(callback, type) else repr(callback)
        raise ConfigKeyError(f"pop_callback: {name:.80} is not in the list, which has: {there}.")

    def collect(self) -> None:
        """Collect the calls of each moment: only methods that are overridden on the class or the object."""
        # New tuples: a change of the list during a call applies from the next one.
        self._calls = {
            moment: tuple(
                getattr(callback, method)
                for callback in self._callbacks
                for method in methods
                if is_overridden(callback, method)
            )
            for moment, methods in _METHODS.items()
        }
        self.sees_batches = bool(self._calls["on_train_batch_begin"] or self._calls["on_train_batch_end"])

    def set_model(self, model: Any) -> None:
        self._give("set_model", model)

    def set_optimizer(self, optimizer: Any) -> None:
        self._give("set_optimizer", optimizer)

    def set_trainercontrol(self, trainercontrol: TrainerControl) -> None:
        self._give("set_trainercontrol", trainercontrol)

    def set_trainer(self, trainer: Any) -> None:
        self._give("set_trainer", trainer)

    on_train_begin = _method("on_train_begin")
    on_epoch_begin = _method("on_epoch_begin")
    on_epoch_end = _method("on_epoch_end")
    on_batch_begin = _method("on_batch_begin")
    on_batch_end = _method("on_batch_end")
    on_train_batch_begin = _method("on_train_batch_begin")
    on_train_batch_end = _method("on_train_batch_end")
    on_eval_batch_begin = _method("on_eval_batch_begin")
    on_eval_batch_end = _method("on_eval_batch_end")
    on_eval_begin = _method("on_eval_begin")
    on_eval_end = _method("on_eval_end")

    def on_train_end(self, logs: Logs) -> None:
        """Call all callbacks, even if one fails; then raise the first failure."""
        first_error: Exception | None = None
        for call in self._calls["on_train_end"]:
            try:
                call(logs)
            except Exception as error:
                if first_error is None:
                    first_error = error
                else:
                    logger.exception("on_train_end of another callback failed as well:")
        if first_error is not None:
            raise first_error

    def state_dict(self) -> dict[str, Any]:
        states = [{"class": _name(c), "state": c.state_dict()} for c in self._with_state()]
        return {"callbacks": states, "of_the_user": self._of_the_user()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load each callback's state: the n-th of a class gets the n-th saved state of that class."""
        if (now := self._of_the_user()) != (before := state["of_the_user"]):
            shown = [", ".join(names) or "none" for names in (before, now)]
            logger.warning("Resumed with other callbacks than before: %s; now %s.", *shown)
        saved = list(state["callbacks"])
        for callback in self._with_state():
            entry = next((entry for entry in saved if entry["class"] == _name(callback)), None)
            if entry is None:
                logger.warning("The checkpoint has no state of %s, which restarts.", _name(callback))
                continue
            saved.remove(entry)
            callback.load_state_dict(entry["state"])
        if saved:
            names = ", ".join(entry["class"] for entry in saved)
            logger.warning("The checkpoint has the state of callbacks that this run does not have: %s.", names)

    def _of_the_user(self) -> list[str]:
        """Their classes; those of this library follow from settings."""
        return [_name(c) for c in self._callbacks if not type(c).__module__.startswith("trainwright.")]

    def _with_state(self) -> list[Any]:
        return [c for c in self._callbacks if hasattr(c, "state_dict") and hasattr(c, "load_state_dict")]

    def _give(self, setter: str, value: Any) -> None:
        self._given[setter] = value
        for callback in self._callbacks:
            getattr(callback, setter)(value)


def _name(callback: Callback) -> str:
    return type(callback).__name__

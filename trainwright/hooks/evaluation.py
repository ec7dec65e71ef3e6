"""Evaluate during training."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from trainwright.base.errors import ConfigError
from trainwright.evaluation.evaluator import flatten_results_dict
from trainwright.events.writers.progress import shown_values
from trainwright.hooks.base import HookBase, has_failed
from trainwright.hooks.due import Condition, Period
from trainwright.hooks.signals import evaluation_may_stop

logger = logging.getLogger("trainwright.hooks")


class EvalHook(HookBase):
    """Run ``eval_function`` when ``eval_period`` is over and once after the last iteration.

    Stores the result, a dict of numbers that may be nested, under flattened names (``"a/b"``) behind ``prefix``, and
    logs them, unless the line of an epoch does. ``loss`` and names of the training's get the prefix ``eval_``, also
    behind the name of a data set. None and an empty dict store nothing. The final evaluation counts as iteration
    ``max_iter``.

    With ``trainer.evaluates_on_start`` also the initial weights, before the first step; no schedule is stepped with
    that result.

    Raises:
        ConfigError: a result is not a number.
    """

    slot = "evaluate"
    in_copies = False

    def __init__(
        self, eval_period: Period, eval_function: Callable[[], Mapping[str, Any] | None], *, prefix: str = ""
    ) -> None:
        self._is_due = Condition(eval_period)
        self.due = (self._is_due,)
        self._has_warned = False
        self._eval_function = eval_function
        self._prefix = prefix

    def before_first_step(self) -> None:
        if self.trainer.evaluates_on_start and self.trainer.start_iter == 0:
            self.evaluate()

    def after_step(self) -> None:
        if self._is_due(self.trainer) and self.trainer.iter + 1 != self.trainer.max_iter:
            with evaluation_may_stop():
                self.evaluate()

    def after_train(self) -> None:
        if not has_failed(self.trainer):
            with evaluation_may_stop(is_final=True):  # the training is saved; a resume evaluates
                self.evaluate()

    def _warn_of_nan(self, losses: dict[str, float]) -> None:
        found = [f"{name}={value}" for name, value in losses.items() if not math.isfinite(value)]
        if found and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The evaluation after iteration %d computed %s: no checkpoint is the best by such a value. Look for NaN"
                " in the evaluation data, and in the model's outputs for them.",
                self.trainer.iterations_done, ", ".join(found),
            )  # fmt: skip

    def evaluate(self) -> None:
        trainer = self.trainer
        with trainer.storage.rate.interrupted("evaluation", trainer.phases, trainer.iterations_done):
            results = self._eval_function()
        if not results:
            return
        if not isinstance(results, Mapping):
            raise ConfigError(f"The evaluation function returned {type(results).__name__}; it must return a dict.")
        scalars: dict[str, float] = {}
        for name, value in flatten_results_dict(results).items():
            try:
                scalars[name] = float(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"The evaluation function returned {value!r} for {name!r}; every result must be a number."
                ) from error
        self.trainer.last_eval_results = dict(results)  # another object for each evaluation
        storage = self.trainer.storage
        trained = {name for name, is_trained in storage.smoothing_hints().items() if is_trained}
        trained |= {"loss"} | storage.logged_results
        is_trained = {name: not trained.isdisjoint((name, name.rpartition("/")[2])) for name in scalars}
        prefixes = {name: self._prefix or "eval_" * is_trained[name] for name in scalars}
        names = _stored_names(prefixes)
        scalars = {names[name]: value for name, value in scalars.items()}
        storage.refuse_logged(scalars, "a result of the evaluation")
        self._warn_of_nan({name: value for name, value in scalars.items() if "loss" in name})
        before, done = storage.latest(), trainer.iterations_done
        # Compared as text, in which NaN is equal to NaN.
        is_repeated = all(repr(before.get(name)) == repr((value, done - 1)) for name, value in scalars.items())
        if is_repeated and not any(hook.changes_final_weights for hook in trainer.hooks):
            return  # the final evaluation has repeated that of the last iteration: they have a row
        storage.put_scalars(**scalars, smoothing_hint=False)
        storage.results |= scalars.keys()
        if not any(hook.shows_results for hook in self.trainer.hooks):
            at = f"iteration {self.trainer.iterations_done}/{self.trainer.max_iter}"
            shown = shown_values({name: (value, 0) for name, value in scalars.items()})
            head = f"Evaluation of {storage.evaluated_weights}" if storage.evaluated_weights else "Evaluation"
            logger.info("%s", "  ".join([head, at, *(f"{name} {value}" for name, value in shown.items())]))


def _stored_names(prefixes: Mapping[str, str]) -> dict[str, str]:
    """The names of results in the storage, with their prefixes, which a method of the user's may have given already."""
    plain = {name: name.removeprefix(prefix) for name, prefix in prefixes.items()}
    plain |= {name: name for name, short in plain.items() if short in prefixes}  # both are results
    return {name: f"{prefix}{plain[name]}" for name, prefix in prefixes.items()}

"""Evaluate during training."""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.evaluation.evaluator import flatten_results_dict
from trainwright.hooks.base import HookBase, Period, condition, has_failed
from trainwright.hooks.signals import stopped_by_signals

logger = logging.getLogger("trainwright.hooks")


class EvalHook(HookBase):
    """Run ``eval_function`` when ``eval_period`` is over and once after the last iteration.

    Stores the result, a dict of numbers that may be nested, under flattened names (``"a/b"``), with the prefix
    ``name_scope``. None and an empty dict store nothing. The final evaluation counts as iteration ``max_iter``.

    With ``trainer.evaluates_on_start`` also the initial weights, before the first step; no schedule is stepped with
    that result.

    Raises:
        ConfigError: a result is not a number.
    """

    in_copies = False
    _has_logged = False  # that results have other names

    def __init__(
        self, eval_period: Period, eval_function: Callable[[], Mapping[str, Any] | None], *, name_scope: str = ""
    ) -> None:
        self._is_due = condition(eval_period)
        self._eval_function = eval_function
        self._name_scope = name_scope

    def before_first_step(self) -> None:
        if self.trainer.evaluates_on_start and self.trainer.start_iter == 0:
            self.evaluate()

    def after_step(self) -> None:
        if self._is_due(self.trainer) and self.trainer.iter + 1 != self.trainer.max_iter:
            self.evaluate()

    def after_train(self) -> None:
        if not has_failed(self.trainer):
            with stopped_by_signals():  # the training is saved; a resume evaluates
                self.evaluate()

    def evaluate(self) -> None:
        """Evaluate now."""
        with self.trainer.phases.counting("evaluation"):
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
        self.trainer.last_eval_results = results
        storage = self.trainer.storage
        if not self._name_scope:
            hints = storage.smoothing_hints()
            taken = [name for name in scalars if hints.get(name)]  # values of the training
            scalars = {f"evaluation/{name}" if name in taken else name: value for name, value in scalars.items()}
            if taken and not self._has_logged:
                self._has_logged = True
                names = ", ".join(taken)
                logger.info("Training and evaluation both compute %s: the evaluation's is 'evaluation/…'.", names)
        with storage.name_scope(self._name_scope) if self._name_scope else nullcontext():
            storage.put_scalars(**scalars, smoothing_hint=False)

"""Evaluate during training."""

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.evaluation.evaluator import flatten_results_dict
from trainwright.hooks.base import HookBase
from trainwright.hooks.checkpoint import has_failed
from trainwright.hooks.signals import stopped_by_signals


class EvalHook(HookBase):
    """Run ``eval_function`` every ``eval_period`` iterations (0: never) and once after the last one.

    Stores the result, a dict of numbers that may be nested, under flattened names (``"a/b"``). None and an empty dict
    store nothing. The final evaluation counts as iteration ``max_iter``.

    Raises:
        ConfigError: a result is not a number.
    """

    def __init__(self, eval_period: int, eval_function: Callable[[], Mapping[str, Any] | None]) -> None:
        self._period = eval_period
        self._eval_function = eval_function

    def after_step(self) -> None:
        iteration = self.trainer.iter + 1
        if self._period > 0 and iteration % self._period == 0 and iteration != self.trainer.max_iter:
            self._evaluate()

    def after_train(self) -> None:
        if not has_failed(self.trainer):
            with stopped_by_signals():  # the training is saved; a resume evaluates
                self._evaluate()

    def _evaluate(self) -> None:
        self.trainer.storage.reduce()  # writers may write a row for the evaluation
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
        self.trainer.storage.put_scalars(**scalars, smoothing_hint=False)

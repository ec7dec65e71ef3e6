"""A metric over a complete data set: predictions and targets in, a dictionary of numbers out."""

import math
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any  # predictions and targets are lists, arrays or tensors of the types that the metric takes

from trainwright.base.errors import ConfigError, did_you_mean, import_optional
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.events.phases import importing


class Metric:
    """Subclass it, set ``all_keys``, the names of the results, and override ``values``.

    Args:
        objective: "maximize" or "minimize"; None: the metric's own, if it has one.
        output_keys: the results that `compute` returns; None: all.
        n_decimals: digits after the point; None: exact.

    Raises:
        ConfigError: an output key that the metric does not have.
    """

    name = ""
    all_keys: Sequence[str] = ()
    default_objective: str | None = None  # None: follows from the name, if that is known

    def __init__(
        self,
        *,
        objective: str | None = None,
        output_keys: Sequence[str] | None = None,
        n_decimals: int | None = 4,
    ) -> None:
        if objective not in (None, "maximize", "minimize"):
            raise ConfigError(f"metric {self.name}: objective is {objective!r}; it must be 'maximize' or 'minimize'.")
        self.objective = objective or self.default_objective
        self.output_keys = self._checked(output_keys)
        self.n_decimals = n_decimals

    def __repr__(self) -> str:
        return f"{type(self).__name__}(output_keys={list(self.output_keys)!r}, n_decimals={self.n_decimals!r})"

    def values(self, predictions: Any, targets: Any) -> Mapping[str, float]:
        """Every result, exact. ``predictions`` and ``targets`` hold one entry per sample."""
        raise NotImplementedError(f"{type(self).__name__} must override values(predictions, targets)")

    def compute(
        self,
        predictions: Any,
        targets: Any,
        n_decimals: int | EllipsisType | None = ...,
        output_keys: Sequence[str] | None = None,
    ) -> dict[str, float]:
        """The results over all samples.

        Args:
            n_decimals: digits after the point, None for exact values; by default the metric's own: 4.
            output_keys: the results to return; None: the metric's own.

        Raises:
            EvaluationError: there are no samples, or the numbers of predictions and targets differ.
            ConfigError: an output key that the metric does not have.
        """
        if len(predictions) != len(targets):
            raise EvaluationError(
                f"metric {self.name}: {len(predictions)} predictions and {len(targets)} targets; "
                "there must be one of each for every sample."
            )
        if not len(predictions):
            raise EvaluationError(f"metric {self.name} has seen no samples.")
        wanted = self.output_keys if output_keys is None else self._checked(output_keys)
        found = self.values(predictions, targets)
        digits = self.n_decimals if isinstance(n_decimals, EllipsisType) else n_decimals
        results = {key: float(found[key]) for key in (wanted or found) if key in found}
        if digits is None:
            return results
        return {key: round(value, digits) if math.isfinite(value) else value for key, value in results.items()}

    def _checked(self, output_keys: Sequence[str] | None) -> tuple[str, ...]:
        if output_keys is None:
            return tuple(self.all_keys)
        for key in output_keys if self.all_keys else ():
            if key not in self.all_keys:
                raise ConfigError(f"metric {self.name}: no result {key!r}. {did_you_mean(key, self.all_keys)}")
        return tuple(output_keys)


@importing()
def load_package(name: str, needed_for: str) -> Any:
    """The module ``name`` of an optional package, imported when a metric is first used."""
    package = name.partition(".")[0]
    return import_optional(name, f"{needed_for} needs the package {package}: pip install {package}.")

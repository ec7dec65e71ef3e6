"""Metrics of torchmetrics and metrics handlers as evaluators, and evaluators as metrics handlers."""

import dis
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from torch import nn

from trainwright.base.errors import ConfigTypeError
from trainwright.base.signatures import read_signature
from trainwright.evaluation.evaluator import (
    DatasetEvaluator,
    DatasetEvaluators,
    required,
    single_evaluators,
    warn_of_no_results,
)
from trainwright.models.outputs import predictions_of
from trainwright.models.targets import target_of

logger = logging.getLogger("trainwright.evaluation")


class MetricEvaluator(DatasetEvaluator):
    """A metric of torchmetrics, or a metrics handler, as an evaluator.

    Args:
        metric: its ``update`` gets predictions and labels, and its ``compute`` combines all ranks.
        name: of its result, if it is a single one; of several, the text in front of their names.
    """

    def __init__(self, metric: Any, name: str | None = None) -> None:
        self.metric, self.name = metric, name

    def __repr__(self) -> str:
        return repr(self.metric)

    def reset(self) -> None:
        self.metric.reset()

    def process(self, inputs: Any, outputs: Any) -> None:
        predictions, labels = predictions_of(outputs), target_of(inputs)
        if predictions is None or labels is None:
            required(outputs, "prediction_scores", evaluator=self, where="what the model returns")
            required(inputs, "labels", evaluator=self, where="the batch")
        self.metric.update(predictions, labels)

    def evaluate(self) -> dict[str, Any]:
        return with_name(self.metric.compute(), self.name)

    def known_results(self) -> list[str] | None:
        known = getattr(self.metric, "known_results", lambda: None)()
        return None if known is None else [*with_name(dict.fromkeys(known), self.name)]

    def objective_of(self, key: str) -> str | None:
        """The direction of the result ``key``; None if the metric does not define it."""
        known = dict.fromkeys(getattr(self.metric, "known_results", lambda: None)() or ())
        own_key = dict(zip(with_name(known, self.name), known, strict=True)).get(key, key)
        objective: str | None = getattr(self.metric, "objective_of", lambda key: None)(own_key)
        return objective


class EvaluatorHandler:
    """An evaluator as a metrics handler. An evaluation gives the evaluator the complete inputs and outputs."""

    def __init__(self, evaluator: DatasetEvaluator) -> None:
        self.evaluator = evaluator

    def __repr__(self) -> str:
        return repr(self.evaluator)

    def reset(self) -> None:
        self.evaluator.reset()

    def update(self, predictions: Any, labels: Any, **batch: Any) -> None:
        """Add a batch of which only these are known."""
        self.evaluator.process({**batch, "labels": labels}, {**batch, "prediction_scores": predictions})

    def compute(self) -> dict[str, Any]:
        """The results over the batches of this rank; an evaluation combines the ranks."""
        return self.evaluator.evaluate() or {}

    def known_results(self) -> list[str] | None:
        return self.evaluator.known_results()

    def metric_evaluators(self) -> list[MetricEvaluator]:
        """Those of the metrics and handlers in a list or dict."""
        return [one for one in single_evaluators(self.evaluator) if isinstance(one, MetricEvaluator)]

    def objective_of(self, key: str) -> str | None:
        return next(filter(None, (one.objective_of(key) for one in self.metric_evaluators())), None)


def handler_of(given: Any) -> Any:
    """A metrics handler for what a user passes: a handler, unchanged, a metric of torchmetrics, an evaluator, a
    function of predictions and labels, or a list or dict of these."""
    from trainwright.evaluation.handlers import FunctionHandler, MetricObjectHandler  # here: loads pydantic

    if isinstance(given, list | tuple | Mapping | DatasetEvaluator):
        given = evaluator_of(given, "Trainer.metrics_handler")
    if isinstance(given, DatasetEvaluator):
        return EvaluatorHandler(given)
    if isinstance(given, nn.Module) and hasattr(given, "compute"):  # of torchmetrics
        return MetricObjectHandler(given)
    return given if hasattr(given, "compute") else FunctionHandler(given)


def with_name(results: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """The results of a metric that has a ``name``: a single one under it, several under ``name/key``."""
    if name is None:
        return dict(results)
    return {name if len(results) == 1 else f"{name}/{key}": value for key, value in results.items()}


_ADDS = {"append", "extend", "update", "add"}
_CLEARS = {"clear", "reset", "pop"}


@cache  # once, and not in each evaluation
def _warn_of_methods(kind: type[DatasetEvaluator]) -> None:
    """Log an evaluator without results, or that adds in ``process`` what nothing seems to clear."""
    warn_of_no_results(kind.evaluate, f"{kind.__name__}.evaluate")
    process, evaluate = (getattr(getattr(kind, name), "__code__", None) for name in ("process", "evaluate"))
    if kind.reset is not DatasetEvaluator.reset or process is None or evaluate is None:
        return
    stores = {name: any(one.opname == "STORE_ATTR" for one in dis.get_instructions(code))
              for name, code in (("process", process), ("evaluate", evaluate))}  # fmt: skip
    adds = stores["process"] or not _ADDS.isdisjoint(process.co_names)
    if adds and not stores["evaluate"] and _CLEARS.isdisjoint(evaluate.co_names):
        logger.warning(
            "%s has no reset(): what process() has added in an evaluation is counted in the next one, too. Write def"
            " reset(self), which sets it as before the first batch.", kind.__name__,
        )  # fmt: skip


def evaluator_of(given: Any, where: str) -> DatasetEvaluator:
    """One evaluator for what a user passes: evaluators, metrics of torchmetrics, handlers, functions of predictions
    and labels, or a list or dict of them.

    In a dict, the result of a metric or a handler has the key as its name; evaluators name theirs.

    Raises:
        ConfigTypeError: something else is there. ``where``: the setting or argument.
    """
    if isinstance(given, Mapping) and "_target_" not in given and given:
        named = {str(name): evaluator_of(one, f"{where}.{name}") for name, one in given.items()}
        return DatasetEvaluators([_named(one, name) for name, one in named.items()])
    if isinstance(given, list | tuple):
        return DatasetEvaluators([evaluator_of(one, where) for one in given])
    if isinstance(given, DatasetEvaluator):
        _check_calls(given, {"reset": (), "process": ("inputs", "outputs"), "evaluate": ()}, where)
        _warn_of_methods(type(given))  # type: ignore[arg-type]  # mypy takes the class for its object
        return given
    if isinstance(given, type) and issubclass(given, DatasetEvaluator):
        raise ConfigTypeError(f"{where}: got the class {given.__name__}; call it: {given.__name__}(...).")
    from trainwright.config import LazyCall  # here: loads omegaconf

    is_function = callable(given) and not isinstance(given, nn.Module | Mapping | LazyCall)
    is_metric = is_function or (hasattr(given, "compute") and hasattr(given, "update"))
    if isinstance(given, type) or not is_metric:
        kind, hint = type(given).__name__, ""
        if callable(getattr(given, "process", None)):
            hint = f" Write class {kind}(DatasetEvaluator): ..., with reset(), process(inputs, outputs) and evaluate()."
        elif isinstance(given, Mapping | LazyCall):
            hint = " A lazy call has to go through instantiate() first."
        raise ConfigTypeError(
            f"{where}: got {kind}; it must be a DatasetEvaluator, a metric of torchmetrics, a metrics handler, such as"
            f" TorchMetricsHandler(names), a function of (predictions, labels), or a list or dict of these.{hint}"
        )
    if not (is_function or isinstance(given, nn.Module)):
        _check_calls(given, {"reset": (), "update": ("predictions", "labels", "**batch"), "compute": ()}, where)
    return MetricEvaluator(handler_of(given))


def _check_calls(given: Any, calls: Mapping[str, tuple[str, ...]], where: str) -> None:
    """Raise ConfigTypeError for a method of the user's that is missing, or does not take its arguments."""
    kind = type(given)
    for name, arguments in calls.items():
        method, line = getattr(given, name, None), f"Write def {name}({', '.join(('self', *arguments))})."
        inherited = getattr(DatasetEvaluator, name, None)
        is_base = name != "reset" and inherited is not None and getattr(method, "__func__", None) is inherited
        if not callable(method) or is_base:
            raise ConfigTypeError(f"{where}: {kind.__name__} has no {name}, which each evaluation calls. {line}")
        try:
            with suppress(ValueError):  # it has no signature
                signature = read_signature(method, follow_wrapped=False)  # a decorator may add some
                if arguments[-1:] == ("**batch",):  # whose fields are not known yet
                    signature.bind_partial(*arguments[:-1])
                else:
                    signature.bind(*arguments)
        except TypeError:
            raise ConfigTypeError(
                f"{where}: {kind.__name__}.{name} is called with ({', '.join(arguments)}). {line}"
            ) from None


def _named(evaluator: DatasetEvaluator, name: str) -> DatasetEvaluator:
    if isinstance(evaluator, MetricEvaluator):
        return MetricEvaluator(evaluator.metric, name)
    return evaluator

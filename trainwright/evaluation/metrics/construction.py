"""From a name and arguments to a torchmetrics metric, with what it needs to know about the task filled in."""

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any  # torchmetrics' classes, loaded when they are used

import torch

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.evaluation.metrics.names import find_metric, metric_classes
from trainwright.evaluation.metrics.packages import load_package

IGNORED_LABEL = -100
_TASK_ARGUMENTS = ("task", "num_classes", "num_labels")
SIZE_OF_TASK = {"multiclass": "num_classes", "multilabel": "num_labels"}
_SETTINGS = (  # of every metric; joining ranks is ours
    "compute_on_cpu",
    "compute_with_cache",
)
_WRONG_UPSTREAM = {"WordInfoPreserved": True}  # torchmetrics 1.9 says False; a perfect text has 1, the largest value
_INNER = ("base_metric", "metric")  # what wrappers call the metric inside


class Blueprint:
    """A metric that can be made as soon as its task is known."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: there is no such metric, or it cannot be made with these arguments.
        """
        self.name = name
        self.metric_class, implied = find_metric(name)
        self.arguments = {**implied, **arguments}
        self._inner: dict[str, Blueprint] = {}
        if self.metric_class.__module__.startswith("torchmetrics.wrappers"):
            named = {key: value for key in _INNER if isinstance(value := self.arguments.get(key), str)}
            self._inner = {key: Blueprint(value, {}) for key, value in named.items()}
        self._check()

    @property
    def core(self) -> "Blueprint":
        """The metric that sees predictions and targets: the one inside, for a wrapper around a name."""
        return next((inner.core for inner in self._inner.values()), self)

    @property
    def kind(self) -> str:
        """The part of torchmetrics that the metric is from: "classification", "regression", "text" …"""
        core: Any = self.core
        inside = next((value for key in _INNER if hasattr(value := core.arguments.get(key), "_reductions")), None)
        module: str = (core.metric_class if inside is None else type(inside)).__module__
        return module.split(".")[1] if module.startswith("torchmetrics.") else ""

    @property
    def is_wrapper(self) -> bool:
        return self.metric_class.__module__.startswith("torchmetrics.wrappers")

    def unknown(self) -> list[str]:
        """Those of ``task``, ``num_classes`` and ``num_labels`` that the metric needs and was not given."""
        core = self.core
        parameters = _parameters(core.metric_class)
        if "task" in parameters:
            if "task" not in core.arguments:
                return ["task"]
            task = core.arguments["task"]
            size = SIZE_OF_TASK.get(str(task))
            return [size] if size in parameters and core.arguments.get(size) is None else []
        if core.kind != "classification":
            return []
        return [name for name in SIZE_OF_TASK.values() if name in parameters and core.arguments.get(name) is None]

    @property
    def task(self) -> str | None:
        """The task that the name or the arguments say; None if neither does."""
        core = self.core
        given: str | None = core.arguments.get("task")
        prefixes = ("Binary", "Multiclass", "Multilabel")
        return given or next((p.lower() for p in prefixes if core.metric_class.__name__.startswith(p)), None)

    def higher_is_better(self) -> bool | None:
        """None if torchmetrics does not say."""
        return higher_is_better(self.core.metric_class)

    def build(self, inferred: Mapping[str, Any]) -> Any:
        """The metric; ``inferred`` are task arguments that were not given.

        Raises:
            ConfigError: torchmetrics does not take the arguments.
            UserError: it needs a package that is not installed.
        """
        arguments = {key: _resolved(key, copy.deepcopy(value)) for key, value in self.arguments.items()}
        arguments.update({key: inner.build(inferred) for key, inner in self._inner.items()})
        if not self._inner:
            arguments.update(inferred)
            if self.kind == "classification" and "ignore_index" in _parameters(self.metric_class):
                arguments.setdefault("ignore_index", IGNORED_LABEL)
        try:
            with warnings.catch_warnings():
                # That a metric keeps all samples stands in docs/metrics.md; said at every start it would be noise.
                warnings.filterwarnings("ignore", message=".*will save all", category=UserWarning)
                metric = self.metric_class(**arguments)
        except ImportError as error:
            raise ConfigError(f"metric {self.name}: it needs a package that is not installed: {error}") from error
        except (TypeError, ValueError, RuntimeError) as error:
            shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            raise ConfigError(f"metric {self.name}: torchmetrics does not take ({shown}): {error}") from error
        for part in metric.modules():
            if hasattr(part, "_to_sync"):
                part.sync_on_compute = part._to_sync = False
        return metric

    def _check(self) -> None:
        parameters = _parameters(self.metric_class)
        missing = [
            name
            for name, parameter in parameters.items()
            if _is_required(parameter) and name not in self.arguments and name not in _TASK_ARGUMENTS
        ]
        if self.kind != "classification" and "task" not in parameters:
            unknowable = ("num_classes", "num_labels")
            missing += [n for n in unknowable if n in parameters and _is_required(parameters[n])]
            missing = [name for name in missing if name not in self.arguments]
        if missing:
            raise ConfigError(
                f"metric {self.name}: it needs {_listed(missing)}, for example "
                f"TMMetrics({self.name!r}, {missing[0]}=...). Its arguments: {_listed(parameters)}."
            )
        if "task" in parameters:
            allowed = [*parameters, *_SETTINGS]
            for name in self.arguments:
                if name not in allowed:
                    raise ConfigError(f"metric {self.name}: no argument {name!r}. {did_you_mean(name, allowed)}")


def _parameters(metric_class: type[Any]) -> dict[str, inspect.Parameter]:
    """Those that can be given by name. Of ``Accuracy`` and its like, they stand in ``__new__``."""
    chosen = inspect.signature(metric_class.__new__).parameters
    found = chosen if "task" in chosen else inspect.signature(metric_class.__init__).parameters
    fixed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {n: p for n, p in found.items() if n not in ("self", "cls") and p.kind not in fixed}


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def _resolved(key: str, value: Any) -> Any:
    """A function by its name, where a metric asks for one (``metric_func`` of PermutationInvariantTraining)."""
    if key != "metric_func" or not isinstance(value, str):
        return value
    functions = vars(load_package("torchmetrics.functional.audio", "metric_func", "pip install torchmetrics"))
    if not callable(functions.get(value)):
        names = [name for name, item in functions.items() if callable(item)]
        raise ConfigError(f"metric_func: torchmetrics.functional.audio has no {value!r}. {did_you_mean(value, names)}")
    return functions[value]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def on_device(metric: Any, device: torch.device) -> Any:
    """The metric, moved if it lies elsewhere."""
    return metric if metric.device == device else metric.to(device)


def higher_is_better(metric_class: type[Any]) -> bool | None:
    """None if torchmetrics does not say."""
    name, classes = metric_class.__name__, metric_classes()
    if name in _WRONG_UPSTREAM:
        return _WRONG_UPSTREAM[name]
    candidates = [metric_class, *(classes.get(prefix + name) for prefix in ("Multiclass", "Binary"))]
    said = [one.higher_is_better for one in candidates if one is not None]
    return next((value for value in said if isinstance(value, bool)), None)

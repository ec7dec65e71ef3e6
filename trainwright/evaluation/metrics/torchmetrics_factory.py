"""Build a torchmetrics metric from a name and arguments, as soon as its task is known."""

import copy
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal  # Any: torchmetrics' classes

from torch import Tensor

from trainwright.base.batch import IGNORED
from trainwright.base.errors import ConfigError, did_you_mean, nearest_name
from trainwright.base.signatures import read_signature
from trainwright.events.phases import importing

# Names in torchmetrics 0.7, and usual ones, and their current names. "Binned" meant 100 thresholds.
OLD_NAMES = {
    "F1": "F1Score", "FBeta": "FBetaScore", "IoU": "JaccardIndex", "Hinge": "HingeLoss",
    "MatthewsCorrcoef": "MatthewsCorrCoef", "PearsonCorrcoef": "PearsonCorrCoef",
    "SpearmanCorrcoef": "SpearmanCorrCoef",
    "BinnedAveragePrecision": "AveragePrecision", "BinnedPrecisionRecallCurve": "PrecisionRecallCurve",
    "BinnedRecallAtFixedPrecision": "RecallAtFixedPrecision",
    "PSNR": "PeakSignalNoiseRatio", "SSIM": "StructuralSimilarityIndexMeasure",
    "PIT": "PermutationInvariantTraining", "SDR": "SignalDistortionRatio", "SNR": "SignalNoiseRatio",
    "SI_SDR": "ScaleInvariantSignalDistortionRatio", "SI_SNR": "ScaleInvariantSignalNoiseRatio",
    "WER": "WordErrorRate",
    "MAE": "MeanAbsoluteError", "MSE": "MeanSquaredError", "RMSE": "MeanSquaredError", "R2": "R2Score",
}  # fmt: skip
_IMPLIED = {"RMSE": {"squared": False}} | {name: {"thresholds": 100} for name in OLD_NAMES if name.startswith("Binned")}

# Usual names that are not like torchmetrics' own.
_SHORT_NAMES = {
    "mcc": "'MatthewsCorrCoef'", "ap": "'AveragePrecision'",
    "rocauc": "'AUROC'", "ppl": "'Perplexity'", "pcc": "'PearsonCorrCoef'", "miou": "'JaccardIndex'",
}  # fmt: skip

_BASES = {"Metric", "BaseAggregator", "CompositionalMetric", "MetricInputTransformer", "RetrievalMetric"}


@cache
@importing()
def metric_classes() -> dict[str, type[Any]]:
    """Every metric class that can be built: those of torchmetrics and of its subpackages (``BinaryAccuracy``)."""
    with warnings.catch_warnings():
        # In a notebook without ipywidgets: torchmetrics imports transformers, which imports tqdm. It shows no bar.
        warnings.filterwarnings("ignore", "IProgress not found")
        import torchmetrics

    packages = [part.name for part in pkgutil.iter_modules(torchmetrics.__path__) if part.ispkg]
    domains = [name for name in packages if name not in ("functional", "utilities")]
    found: dict[str, type[Any]] = {"AUC": _area_under_curve()}
    # Subpackages first: of some classes the top level has copies that warn when they are built.
    for module in (*(importlib.import_module(f"torchmetrics.{name}") for name in domains), torchmetrics):
        for name, value in vars(module).items():
            is_metric = inspect.isclass(value) and issubclass(value, torchmetrics.Metric)
            if is_metric and not name.startswith("_") and name not in _BASES:
                found.setdefault(name, value)
    return found


def _area_under_curve() -> type[Any]:
    """A class for ``AUC``, of which torchmetrics has kept only the function."""
    import torchmetrics
    from torchmetrics.utilities.compute import auc
    from torchmetrics.utilities.data import dim_zero_cat

    class AUC(torchmetrics.Metric):
        """Trapezoidal area of the points of one curve; x must increase or decrease unless ``reorder``."""

        full_state_update = False
        x: list[Tensor]
        y: list[Tensor]

        def __init__(self, reorder: bool = False, **settings: Any) -> None:
            super().__init__(**settings)
            self.reorder = reorder
            self.add_state("x", default=[], dist_reduce_fx="cat")
            self.add_state("y", default=[], dist_reduce_fx="cat")

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.x.append(preds.flatten())
            self.y.append(target.flatten())

        def compute(self) -> Any:
            return auc(dim_zero_cat(self.x), dim_zero_cat(self.y), reorder=self.reorder)

    return AUC


def available_names() -> list[str]:
    """All names that `find_metric` knows, in alphabetical order."""
    classes = metric_classes()
    return sorted({*classes, *(name for name, current in OLD_NAMES.items() if current in classes)})


# Metrics that the handlers of tasks compute, and torchmetrics has not or under another name.
OF_TASKS = {
    "seqeval": "sequence_labeling",
    "cer": "speech_recognition",
    "bleu": "text_generation",
    "rouge": "text_generation",
}


def find_metric(name: str) -> tuple[type[Any], dict[str, Any]]:
    """The class of a name, and the arguments that it implies: those of "RMSE", and of names of torchmetrics 0.7.

    Case and underscores are ignored: ``"f1_score"`` is ``"F1Score"``.
    """
    known = {_plain(one): one for one in available_names()}
    found = known.get(_plain(name))
    if found is None:
        hint = (
            f"Did you mean {_SHORT_NAMES[_plain(name)]}?"
            if _plain(name) in _SHORT_NAMES
            else nearest_name(name, known.values())
        )
        if task := OF_TASKS.get(_plain(name)):
            hint = (
                f'It is of the task {task}: TrainerConfig(task="{task}", ...) or its metrics_handler computes it.'
                f" {hint.strip()}"
            )
        hint = hint.strip() or "TMMetrics.get_tm_avaliable_metrics() lists all."
        raise ConfigError(f"metrics: torchmetrics has no {name!r}. {hint}")
    return metric_classes()[OLD_NAMES.get(found, found)], dict(_IMPLIED.get(found, {}))


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def objective_of_class(metric_class: type[Any]) -> str | None:
    """ "maximize" or "minimize"; None if torchmetrics does not define it."""
    name, classes = metric_class.__name__, metric_classes()
    if name == "WordInfoPreserved":  # torchmetrics 1.9 says the opposite; a perfect text has 1, the largest value
        return "maximize"
    candidates = [metric_class, classes.get(f"Multiclass{name}"), classes.get(f"Binary{name}")]
    values = [getattr(candidate, "higher_is_better", None) for candidate in candidates]
    return next(("maximize" if value else "minimize" for value in values if isinstance(value, bool)), None)


def key_of(name: str) -> str:
    """The key of a metric's result.

    >>> key_of("F1Score"), key_of("MeanSquaredError"), key_of("AUROC"), key_of("SI_SDR"), key_of("CHRFScore")
    ('f1_score', 'mean_squared_error', 'auroc', 'si_sdr', 'chrf_score')
    """
    if name in ("IoU", "SQuAD"):
        return name.lower()
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


# Averaged over samples, as these classes do by default, each would be the accuracy of single labels of several classes.
_MEANS_OVER_CLASSES = {"Precision", "Recall", "F1Score", "FBetaScore"}
_SIZE_OF_TASK = {"multiclass": "num_classes", "multilabel": "num_labels"}
_INNER = ("base_metric", "metric")  # what wrappers call the metric inside; it may be given by name

# Modules of torchmetrics.classification by what their classes read, where the arguments do not show it.
_OF_ORDER = {"auroc", "average_precision", "eer", "logauc", "ranking"}
_OF_PROBABILITIES = {"calibration_error", "hinge"}


Scores = Literal["order", "classes", "probabilities"]  # "classes": the best of several, which all scores show alike


class MetricFactory:
    """A metric class with its arguments, and what of ``task``, ``num_classes`` and ``num_labels`` is missing.

    ``core_class`` and ``core_arguments`` are those of the class that sees predictions and targets: for a wrapper around
    a name, the one inside. ``domain`` is the subpackage of torchmetrics that it is from, such as "classification".
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self.name = name
        self.metric_class, implied = find_metric(name)
        self.arguments = {**implied, **arguments}
        if isinstance(self.arguments.get("metric_func"), str):
            self.arguments["metric_func"] = _audio_function(self.arguments["metric_func"])
        self.is_wrapper = _domain(self.metric_class) == "wrappers"
        _check_arguments(name, self.metric_class, self.arguments)
        if self.arguments.get("average") == "binary" and "task" in _parameters(self.metric_class):
            if (task := self.arguments.get("task", "binary")) != "binary":
                raise ConfigError(f"metric {name}: got average='binary' and task={task!r}. Leave one of them out.")
            self.arguments = {**self.arguments, "task": "binary"}  # the name in our own metrics, and in scikit-learn
            del self.arguments["average"]

        names = [key for key in _INNER if self.is_wrapper and isinstance(self.arguments.get(key), str)]
        self._inner = names[0] if names else None
        self.core_class, self.core_arguments = self.metric_class, self.arguments
        if self._inner is not None:
            self.core_class, self.core_arguments = find_metric(self.arguments[self._inner])
            _check_arguments(self.arguments[self._inner], self.core_class, self.core_arguments)
        inside = [value for key in _INNER if hasattr(value := self.core_arguments.get(key), "metric_state")]
        self._counting = type(inside[0]) if inside else self.core_class
        self._thresholds = getattr(inside[0] if inside else None, "thresholds", self.core_arguments.get("thresholds"))
        self.domain = _domain(self._counting)
        tasks = ("Binary", "Multiclass", "Multilabel")
        prefixes = [task for task in tasks if self._counting.__name__.startswith(task)]
        self.task: str | None = self.core_arguments.get("task") or (prefixes[0].lower() if prefixes else None)

    @property
    def ignores_label(self) -> bool:
        """Whether it ignores labels of -100, because it can and the user has named no other label."""
        return "ignore_index" in _parameters(self.core_class) and "ignore_index" not in self.core_arguments

    def reads(self, task: str | None) -> Scores:
        """What a classification metric reads of scores."""
        module = self._counting.__module__.rpartition(".")[2]
        if module in _OF_ORDER and self._thresholds is None:
            return "order"
        is_curve = "thresholds" in _parameters(self._counting)
        return (
            "classes" if task == "multiclass" and not is_curve and module not in _OF_PROBABILITIES else "probabilities"
        )

    def missing_size(self, task: str) -> str | None:
        """``"num_classes"`` or ``"num_labels"`` if the task needs it and it was not given."""
        size = _SIZE_OF_TASK.get(task)
        return size if size in _parameters(self.core_class) and self.core_arguments.get(size) is None else None

    def missing(self) -> str | None:
        """The first argument that a batch has to determine; None if the metric can be built now."""
        if self.task is None:
            return "task" if "task" in _parameters(self.core_class) else None
        return self.missing_size(self.task)

    def build(self, inferred: Mapping[str, Any]) -> Any:
        """The metric; ``inferred`` are task arguments that were not given."""
        core = {**copy.deepcopy(self.core_arguments), **inferred}
        if self.ignores_label:
            core["ignore_index"] = IGNORED
        if core.get("task") in ("multiclass", "multilabel") and self.core_class.__name__ in _MEANS_OVER_CLASSES:
            core.setdefault("average", "macro")
        metric = _build(self.name, self.core_class, core)
        if self._inner is not None:
            metric = _build(self.name, self.metric_class, {**copy.deepcopy(self.arguments), self._inner: metric})
        for part in metric.modules():
            if hasattr(part, "_to_sync"):  # TMMetrics joins the ranks itself
                part.sync_on_compute = part._to_sync = False
        return metric


def _build(name: str, metric_class: type[Any], arguments: Mapping[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            # docs/evaluation.md lists the metrics that store all samples; a warning at every start would be noise.
            warnings.filterwarnings("ignore", message=".*will save all", category=UserWarning)
            return metric_class(**arguments)
    except ImportError as error:
        raise ConfigError(f"metric {name}: it needs a package that is not installed: {error}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ConfigError(f"metric {name}: torchmetrics does not take ({shown}): {error}") from error


def _check_arguments(name: str, metric_class: type[Any], arguments: Mapping[str, Any]) -> None:
    parameters = _parameters(metric_class)
    has_task = "task" in parameters
    known_later = ("task", *_SIZE_OF_TASK.values()) if has_task or _domain(metric_class) == "classification" else ()
    required = [key for key, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    missing = [key for key in required if key not in arguments and key not in known_later]
    if missing:
        raise ConfigError(
            f"metric {name}: it needs {', '.join(missing)}, for example "
            f"TMMetrics({name!r}, {missing[0]}=...). Its arguments: {', '.join(parameters)}."
        )
    # Settings of every metric; those about ranks do not apply. Other classes check their arguments themselves.
    allowed = [*parameters, "compute_on_cpu", "compute_with_cache"]
    unknown = [key for key in arguments if has_task and key not in allowed]
    if unknown:
        raise ConfigError(f"metric {name}: no argument {unknown[0]!r}. {did_you_mean(unknown[0], allowed)}")


def _parameters(metric_class: type[Any]) -> dict[str, inspect.Parameter]:
    """Those that can be given by name. Classes such as ``Accuracy`` have them in ``__new__``."""
    of_new = read_signature(metric_class.__new__).parameters
    found = of_new if "task" in of_new else read_signature(metric_class.__init__).parameters
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {key: value for key, value in found.items() if key not in ("self", "cls") and value.kind not in variadic}


def _domain(metric_class: type[Any]) -> str:
    package, _, rest = metric_class.__module__.partition(".")
    return rest.partition(".")[0] if package == "torchmetrics" else ""


def _audio_function(name: str) -> Any:
    """``metric_func`` of PermutationInvariantTraining by its name."""
    from torchmetrics.functional import audio

    names = [key for key, value in vars(audio).items() if callable(value)]
    if name not in names:
        raise ConfigError(f"metric_func: torchmetrics.functional.audio has no {name!r}. {did_you_mean(name, names)}")
    return vars(audio)[name]

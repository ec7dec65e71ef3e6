"""The metrics of the installed torchmetrics, by name; imported when a name is looked up, since it takes seconds."""

import importlib
import inspect
import pkgutil
import re
from functools import cache
from types import ModuleType
from typing import Any

from torch import Tensor

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.evaluation.metrics.packages import load_package


@cache
def area_under_curve() -> type[Any]:
    """The class ``AUC(reorder=False)``: ``update(x, y)`` takes points of one curve, ``compute`` gives the area."""
    torchmetrics = load_package("torchmetrics", "AUC", "pip install torchmetrics")
    compute = load_package("torchmetrics.utilities.compute", "AUC", "pip install torchmetrics")
    data = load_package("torchmetrics.utilities.data", "AUC", "pip install torchmetrics")

    class AUC(torchmetrics.Metric):  # type: ignore[name-defined, misc]  # the package is loaded only when it is used
        """Trapezoidal area; the points must run in one direction of x unless ``reorder``."""

        is_differentiable = False
        higher_is_better = None
        full_state_update = False

        def __init__(self, reorder: bool = False, **settings: Any) -> None:
            super().__init__(**settings)
            self.reorder = reorder
            self.add_state("x", default=[], dist_reduce_fx="cat")
            self.add_state("y", default=[], dist_reduce_fx="cat")

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.x.append(preds.flatten())
            self.y.append(target.flatten())

        def compute(self) -> Any:
            return compute.auc(data.dim_zero_cat(self.x), data.dim_zero_cat(self.y), reorder=self.reorder)

    return AUC


# Names in torchmetrics 0.7: the current name, and the arguments that reproduce the earlier behavior.
OLD_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "F1": ("F1Score", {}),
    "FBeta": ("FBetaScore", {}),
    "IoU": ("JaccardIndex", {}),
    "Hinge": ("HingeLoss", {}),
    "MatthewsCorrcoef": ("MatthewsCorrCoef", {}),
    "PearsonCorrcoef": ("PearsonCorrCoef", {}),
    "SpearmanCorrcoef": ("SpearmanCorrCoef", {}),
    "BinnedAveragePrecision": ("AveragePrecision", {"thresholds": 100}),
    "BinnedPrecisionRecallCurve": ("PrecisionRecallCurve", {"thresholds": 100}),
    "BinnedRecallAtFixedPrecision": ("RecallAtFixedPrecision", {"thresholds": 100}),
    "PSNR": ("PeakSignalNoiseRatio", {}),
    "SSIM": ("StructuralSimilarityIndexMeasure", {}),
    "PIT": ("PermutationInvariantTraining", {}),
    "SDR": ("SignalDistortionRatio", {}),
    "SI_SDR": ("ScaleInvariantSignalDistortionRatio", {}),
    "SI_SNR": ("ScaleInvariantSignalNoiseRatio", {}),
    "SNR": ("SignalNoiseRatio", {}),
    "WER": ("WordErrorRate", {}),
}

_OWN = {"AUC": area_under_curve}  # classes that torchmetrics has no more, made from its functions

_BASES = {"Metric", "BaseAggregator", "CompositionalMetric", "MetricInputTransformer", "RetrievalMetric"}


@cache
def metric_classes() -> dict[str, type[Any]]:
    """Every metric class that can be made: those of torchmetrics and of its parts (``BinaryAccuracy``)."""
    torchmetrics = load_package("torchmetrics", "TMMetrics", "pip install torchmetrics")
    found: dict[str, type[Any]] = {}
    for module in [torchmetrics, *_parts(torchmetrics)]:
        for name, value in vars(module).items():
            is_metric = inspect.isclass(value) and issubclass(value, torchmetrics.Metric)
            shadow = is_metric and value.__module__.endswith("_deprecated")  # warns that it lives in a part
            if is_metric and not shadow and name not in _BASES and not name.startswith("_"):
                found.setdefault(name, value)
    return found


def _parts(torchmetrics: ModuleType) -> list[ModuleType]:
    names = [part.name for part in pkgutil.iter_modules(torchmetrics.__path__) if part.ispkg]
    listed = [name for name in names if name not in ("functional", "utilities")]
    return [importlib.import_module(f"torchmetrics.{name}") for name in listed]


def available_names() -> list[str]:
    """All names that `find_metric` knows, in alphabetical order."""
    classes = metric_classes()
    return sorted({*classes, *_OWN, *(name for name, (current, _) in OLD_NAMES.items() if current in classes)})


def find_metric(name: str) -> tuple[type[Any], dict[str, Any]]:
    """The class of a name, and the arguments that belong to a name of torchmetrics 0.7.

    Capital letters and underscores do not matter: ``"f1_score"`` is ``"F1Score"``.

    Raises:
        ConfigError: there is no such metric; the message says the nearest name.
    """
    known = {_plain(one): one for one in available_names()}
    found = name if name in known.values() else known.get(_plain(name))
    if found is None:
        raise ConfigError(f"metric: torchmetrics has no {name!r}. {_nearest(name, known)}")
    if found in _OWN:
        return _OWN[found](), {}
    current, arguments = OLD_NAMES.get(found, (found, {}))
    return metric_classes()[current], dict(arguments)


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _nearest(name: str, known: dict[str, str]) -> str:
    hint = did_you_mean(_plain(name), known)
    for plain, official in known.items():
        if hint == f"Did you mean {plain!r}?":
            return f"Did you mean {official!r}?"
    return "TMMetrics.get_tm_avaliable_metrics() lists those that there are."


def key_of(name: str) -> str:
    """The key of a metric's result.

    >>> key_of("F1Score"), key_of("MeanSquaredError"), key_of("AUROC"), key_of("SI_SDR"), key_of("CHRFScore")
    ('f1_score', 'mean_squared_error', 'auroc', 'si_sdr', 'chrf_score')
    """
    if name in ("IoU", "SQuAD"):
        return name.lower()
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()

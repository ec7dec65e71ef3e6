"""Look up the metric classes of the installed torchmetrics by name. It is imported on first use: that takes seconds."""

import difflib
import importlib
import inspect
import pkgutil
import re
from functools import cache
from typing import Any  # torchmetrics' classes

from torch import Tensor

from trainwright.config.errors import ConfigError
from trainwright.events.phases import importing

# Names in torchmetrics 0.7 and their current names. "Binned" meant 100 thresholds.
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
}  # fmt: skip

_BASES = {"Metric", "BaseAggregator", "CompositionalMetric", "MetricInputTransformer", "RetrievalMetric"}
_WRONG_UPSTREAM = {"WordInfoPreserved": True}  # torchmetrics 1.9 says False; a perfect text has 1, the largest value


@cache
@importing()
def metric_classes() -> dict[str, type[Any]]:
    """Every metric class that can be built: those of torchmetrics and of its subpackages (``BinaryAccuracy``)."""
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


def find_metric(name: str) -> tuple[type[Any], dict[str, Any]]:
    """The class of a name, and the arguments that a name of torchmetrics 0.7 implies.

    Case and underscores are ignored: ``"f1_score"`` is ``"F1Score"``.

    Raises:
        ConfigError: there is no such metric; the message contains the nearest name.
    """
    known = {_plain(one): one for one in available_names()}
    found = known.get(_plain(name))
    if found is None:
        nearest = difflib.get_close_matches(_plain(name), known, n=1)
        hint = f"Did you mean {known[nearest[0]]!r}?" if nearest else "TMMetrics.get_tm_avaliable_metrics() lists all."
        raise ConfigError(f"metric: torchmetrics has no {name!r}. {hint}")
    return metric_classes()[OLD_NAMES.get(found, found)], {"thresholds": 100} if found.startswith("Binned") else {}


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def higher_is_better(metric_class: type[Any]) -> bool | None:
    """None if torchmetrics does not define it."""
    name, classes = metric_class.__name__, metric_classes()
    if name in _WRONG_UPSTREAM:
        return _WRONG_UPSTREAM[name]
    candidates = [metric_class, classes.get(f"Multiclass{name}"), classes.get(f"Binary{name}")]
    values = [getattr(candidate, "higher_is_better", None) for candidate in candidates]
    return next((value for value in values if isinstance(value, bool)), None)


def key_of(name: str) -> str:
    """The key of a metric's result.

    >>> key_of("F1Score"), key_of("MeanSquaredError"), key_of("AUROC"), key_of("SI_SDR"), key_of("CHRFScore")
    ('f1_score', 'mean_squared_error', 'auroc', 'si_sdr', 'chrf_score')
    """
    if name in ("IoU", "SQuAD"):
        return name.lower()
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()

"""How good a model is: evaluators and metrics that turn batches into exact figures, and the loop that feeds them."""

import importlib
from typing import TYPE_CHECKING

from trainwright.evaluation.bleu import BLEUEvaluator
from trainwright.evaluation.classification import ClsEvaluator
from trainwright.evaluation.evaluator import DatasetEvaluator, DatasetEvaluators, EvaluationError
from trainwright.evaluation.loop import inference_on_dataset
from trainwright.evaluation.perplexity import PPLEvaluator
from trainwright.evaluation.regression import RegEvaluator
from trainwright.evaluation.report import flatten_results_dict, print_csv_format

if TYPE_CHECKING:
    from trainwright.evaluation.handlers.base import MetricsHandler
    from trainwright.evaluation.handlers.classification import TextClassificationMetricsHandler
    from trainwright.evaluation.handlers.labeling import SequenceLabelingMetricsHandler
    from trainwright.evaluation.handlers.tasks import metrics_handler_for
    from trainwright.evaluation.handlers.texts import (
        Image2TextMetricHandler,
        Image2TextMetricsHandler,
        SpeechRecognitionMetricsHandler,
        TextGenerationMetricsHandler,
    )
    from trainwright.evaluation.handlers.torch_metrics import TorchMetricsHandler
    from trainwright.evaluation.metrics.building import build_metric
    from trainwright.evaluation.metrics.metric import Metric
    from trainwright.evaluation.metrics.tm_metrics import TMMetrics, get_metric_by_name, show_avaliable_metrics
    from trainwright.evaluation.objective import objective_of

_LATER = {  # loaded with the first of their names
    "handlers.base": ["MetricsHandler"],
    "handlers.classification": ["TextClassificationMetricsHandler"],
    "handlers.labeling": ["SequenceLabelingMetricsHandler"],
    "handlers.texts": [
        "Image2TextMetricHandler",
        "Image2TextMetricsHandler",
        "SpeechRecognitionMetricsHandler",
        "TextGenerationMetricsHandler",
    ],
    "handlers.tasks": ["metrics_handler_for"],
    "handlers.torch_metrics": ["TorchMetricsHandler"],
    "metrics.building": ["build_metric"],
    "metrics.metric": ["Metric"],
    "metrics.tm_metrics": ["TMMetrics", "get_metric_by_name", "show_avaliable_metrics"],
    "objective": ["objective_of"],
}
_FILE_OF = {name: file for file, names in _LATER.items() for name in names}

__all__ = [
    "DatasetEvaluator",
    "DatasetEvaluators",
    "ClsEvaluator",
    "PPLEvaluator",
    "RegEvaluator",
    "BLEUEvaluator",
    "EvaluationError",
    "inference_on_dataset",
    "print_csv_format",
    "flatten_results_dict",
    "MetricsHandler",
    "TextClassificationMetricsHandler",
    "SequenceLabelingMetricsHandler",
    "Image2TextMetricHandler",
    "Image2TextMetricsHandler",
    "SpeechRecognitionMetricsHandler",
    "TextGenerationMetricsHandler",
    "TorchMetricsHandler",
    "metrics_handler_for",
    "Metric",
    "build_metric",
    "TMMetrics",
    "get_metric_by_name",
    "show_avaliable_metrics",
    "objective_of",
]


def __getattr__(name: str) -> object:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    globals()[name] = value
    return value

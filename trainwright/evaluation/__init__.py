"""Evaluation: evaluators and metrics that compute exact values from batches, and the evaluation loop."""

from typing import TYPE_CHECKING

from trainwright.base.lazy_names import declared_names

if TYPE_CHECKING:
    from trainwright.evaluation.evaluator import DatasetEvaluator as DatasetEvaluator
    from trainwright.evaluation.evaluator import DatasetEvaluators as DatasetEvaluators
    from trainwright.evaluation.evaluator import EvaluationError as EvaluationError
    from trainwright.evaluation.evaluator import flatten_results_dict as flatten_results_dict
    from trainwright.evaluation.evaluator import print_csv_format as print_csv_format
    from trainwright.evaluation.evaluators import BLEUEvaluator as BLEUEvaluator
    from trainwright.evaluation.evaluators import ClsEvaluator as ClsEvaluator
    from trainwright.evaluation.evaluators import PPLEvaluator as PPLEvaluator
    from trainwright.evaluation.evaluators import RegEvaluator as RegEvaluator
    from trainwright.evaluation.handlers import MetricsHandler as MetricsHandler
    from trainwright.evaluation.handlers import TorchMetricsHandler as TorchMetricsHandler
    from trainwright.evaluation.loop import inference_on_dataset as inference_on_dataset
    from trainwright.evaluation.metrics.build_metric import build_metric as build_metric
    from trainwright.evaluation.metrics.metric import Metric as Metric
    from trainwright.evaluation.metrics.tm_metrics import TMMetrics as TMMetrics
    from trainwright.evaluation.metrics.tm_metrics import get_metric_by_name as get_metric_by_name
    from trainwright.evaluation.metrics.tm_metrics import show_avaliable_metrics as show_avaliable_metrics
    from trainwright.evaluation.objective import objective_of as objective_of
    from trainwright.tasks.metrics import Image2TextMetricHandler as Image2TextMetricHandler
    from trainwright.tasks.metrics import Image2TextMetricsHandler as Image2TextMetricsHandler
    from trainwright.tasks.metrics import SequenceLabelingMetricsHandler as SequenceLabelingMetricsHandler
    from trainwright.tasks.metrics import SpeechRecognitionMetricsHandler as SpeechRecognitionMetricsHandler
    from trainwright.tasks.metrics import TextClassificationMetricsHandler as TextClassificationMetricsHandler
    from trainwright.tasks.metrics import TextGenerationMetricsHandler as TextGenerationMetricsHandler
    from trainwright.tasks.metrics import metrics_handler_for as metrics_handler_for

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __all__, __getattr__ = declared_names(__name__)

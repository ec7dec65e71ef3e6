"""Metrics over whole data sets by name, and torchmetrics' for every step."""

from trainwright.evaluation.metrics.building import build_metric
from trainwright.evaluation.metrics.metric import Metric
from trainwright.evaluation.metrics.tm_metrics import TMMetrics, get_metric_by_name, show_avaliable_metrics

__all__ = ["Metric", "TMMetrics", "build_metric", "get_metric_by_name", "show_avaliable_metrics"]

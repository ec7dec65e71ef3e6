"""Metrics handlers: from what a model gave and the labels to named numbers, one handler per kind of task."""

from trainwright.evaluation.handlers.base import MetricsHandler
from trainwright.evaluation.handlers.tasks import metrics_handler_for
from trainwright.evaluation.handlers.torch_metrics import TorchMetricsHandler

__all__ = ["MetricsHandler", "TorchMetricsHandler", "metrics_handler_for"]

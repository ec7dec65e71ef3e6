"""Which handler computes the metrics of which task."""

from enum import Enum

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.evaluation.handlers.base import MetricsHandler
from trainwright.evaluation.handlers.classification import TextClassificationMetricsHandler
from trainwright.evaluation.handlers.labeling import SequenceLabelingMetricsHandler
from trainwright.evaluation.handlers.texts import (
    Image2TextMetricHandler,
    SpeechRecognitionMetricsHandler,
    TextGenerationMetricsHandler,
)

HANDLERS: dict[str, type[MetricsHandler]] = {
    "text_classification": TextClassificationMetricsHandler,
    "sequence_labeling": SequenceLabelingMetricsHandler,
    "image2text": Image2TextMetricHandler,
    "speech_recognition": SpeechRecognitionMetricsHandler,
    "text_generation": TextGenerationMetricsHandler,
}


def metrics_handler_for(task: str | Enum) -> type[MetricsHandler]:
    """The class for a ``TaskType`` or its name.

    Raises:
        ConfigError: the task has none; the message lists those that have one.
    """
    name = str(task.value) if isinstance(task, Enum) else task
    if name not in HANDLERS:
        raise ConfigError(
            f"task: there are no metrics for {name!r}. {did_you_mean(name, HANDLERS)} For another task give the "
            "Trainer a metrics_handler of your own, a subclass of MetricsHandler."
        )
    return HANDLERS[name]

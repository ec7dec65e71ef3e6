"""The metrics handler of each task, and the base of those that compare texts."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.handlers import IGNORED_LABEL, MetricsHandler
from trainwright.evaluation.metrics.task_inference import shape_and_type
from trainwright.lazy_names import ring


class TextsMetricsHandler(MetricsHandler):
    """Predictions and labels become texts by ``trainer.model.post_process``, unless they are texts already."""

    def process(self, predictions: Any, labels: Any, **batch: Any) -> tuple[list[Any], list[Any]]:
        found, true = self._texts(predictions, "predictions"), self._texts(labels, "labels")
        if len(found) != len(true):
            raise EvaluationError(
                f"{type(self).__name__}: predictions {shape_and_type(predictions)} are {len(found)} texts, labels "
                f"{shape_and_type(labels)} are {len(true)}; there must be one of each for every sample."
            )
        return found, true

    def _texts(self, values: Any, what: str) -> list[Any]:
        found = _as_texts(values)
        if found is not None:
            return found
        model = getattr(self.trainer, "model", None)
        post_process = getattr(model, "post_process", None)
        if post_process is None:
            raise ConfigError(
                f"{type(self).__name__}: {what} are {shape_and_type(values)}, no texts, and the model "
                f"({type(model).__name__}) has no post_process(outputs) that makes texts of them."
            )
        if isinstance(values, np.ndarray):
            values = torch.as_tensor(values)
        if what == "labels":
            values = _without_ignored(values, _padding_id(model))
        found = _as_texts(post_process(values))
        if found is None:
            raise EvaluationError(
                f"{type(model).__name__}.post_process gave no texts of {what} {shape_and_type(values)}; it must give a "
                'list with a mapping that has a "text" for every sample.'
            )
        return found


def _as_texts(values: Any) -> list[Any] | None:
    """Texts, or lists of texts, one per sample; None if ``values`` are something else."""
    if isinstance(values, Tensor | str | Mapping) or not hasattr(values, "__iter__"):
        return None
    texts = [value["text"] if isinstance(value, Mapping) and "text" in value else value for value in values]
    are_texts = (isinstance(t, str) or (isinstance(t, list) and t and isinstance(t[0], str)) for t in texts)
    return [str(t) if isinstance(t, str) else list(t) for t in texts] if all(are_texts) else None


def _without_ignored(values: Any, padding_id: int) -> Any:
    """Ids with the model's own padding in place of -100."""
    if isinstance(values, Tensor):
        return values.masked_fill(values == IGNORED_LABEL, padding_id)
    rows = [torch.as_tensor(row) for row in values]
    if all(row.shape == rows[0].shape for row in rows):
        return _without_ignored(torch.stack(rows), padding_id)
    return _without_ignored(
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding_id), padding_id
    )


def _padding_id(model: Any) -> int:
    """``pad_token_id`` of the model's config, or the blank of CTC; else 0."""
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in ("pad_token_id", "blank_id"))
    return next((value for value in found if isinstance(value, int)), 0)


_HANDLERS = {
    "text_classification": "TextClassificationMetricsHandler",
    "sequence_labeling": "SequenceLabelingMetricsHandler",
    "image2text": "Image2TextMetricHandler",
    "speech_recognition": "SpeechRecognitionMetricsHandler",
    "text_generation": "TextGenerationMetricsHandler",
}


def metrics_handler_for(task: str | Enum) -> type[MetricsHandler]:
    """The class for a ``TaskType`` or its name.

    Raises:
        ConfigError: the task has none; the message lists those that have one.
    """
    name = str(task.value) if isinstance(task, Enum) else task
    if name not in _HANDLERS:
        raise ConfigError(
            f"task: there are no metrics for {name!r}. {did_you_mean(name, _HANDLERS)} For another task give the "
            "Trainer a metrics_handler of your own, a subclass of MetricsHandler."
        )
    handler: type[MetricsHandler] = getattr(ring(f"tasks.{name}.metrics"), _HANDLERS[name])
    return handler

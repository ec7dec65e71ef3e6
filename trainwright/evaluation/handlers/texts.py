"""Metrics of written texts: recognized in pictures or speech, or generated."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.config.errors import ConfigError
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.handlers.base import MetricsHandler
from trainwright.evaluation.handlers.samples import IGNORED_LABEL
from trainwright.evaluation.metrics.shapes import shape_and_type


class _TextsMetricsHandler(MetricsHandler):
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


class Image2TextMetricHandler(_TextsMetricsHandler):
    """How far the texts read in pictures are from what stands there."""

    valid_metrics = ("cer", "wer")
    default_metrics = ("cer",)


Image2TextMetricsHandler = Image2TextMetricHandler


class SpeechRecognitionMetricsHandler(_TextsMetricsHandler):
    """How far the texts heard are from what was said."""

    valid_metrics = ("cer", "wer")
    default_metrics = ("cer", "wer")


class TextGenerationMetricsHandler(_TextsMetricsHandler):
    """How much of a reference is in a generated text."""

    shifts_labels = True

    valid_metrics = ("rouge", "bleu")
    default_metrics = ("rouge",)


def _as_texts(values: Any) -> list[Any] | None:
    """Texts, or lists of texts, one per sample; None if ``values`` are something else."""
    if isinstance(values, Tensor | str | Mapping) or not hasattr(values, "__iter__"):
        return None
    texts = [value["text"] if isinstance(value, Mapping) and "text" in value else value for value in values]
    are_texts = (isinstance(t, str) or (isinstance(t, list) and t and isinstance(t[0], str)) for t in texts)
    return [str(t) if isinstance(t, str) else list(t) for t in texts] if all(are_texts) else None


def _without_ignored(values: Any, padding_id: int) -> Any:
    """Ids with the model's own padding where -100 says that nothing is to be learned."""
    if isinstance(values, Tensor):
        return values.masked_fill(values == IGNORED_LABEL, padding_id)
    rows = [torch.as_tensor(row) for row in values]
    if all(row.shape == rows[0].shape for row in rows):
        return _without_ignored(torch.stack(rows), padding_id)
    return _without_ignored(
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding_id), padding_id
    )


def _padding_id(model: Any) -> int:
    """What the model's config says: ``pad_token_id``, or the blank of CTC; else 0."""
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in ("pad_token_id", "blank_id"))
    return next((value for value in found if isinstance(value, int)), 0)

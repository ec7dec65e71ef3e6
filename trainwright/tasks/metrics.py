"""The metrics handler of each task."""

import functools
import logging
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainwright.base.batch import IGNORED
from trainwright.base.errors import ConfigError, did_you_mean
from trainwright.data.wrapped import with_inner
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.handlers import MetricsHandler, paired_rows
from trainwright.evaluation.metrics.task_inference import most_probable_classes, shape_and_type
from trainwright.tasks.labels import span_scheme

logger = logging.getLogger("trainwright.tasks")


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
            config = getattr(model, "config", None)
            own = (getattr(config, name, None) for name in ("pad_token_id", "blank_id"))
            values = _without_ignored(values, next((one for one in own if isinstance(one, int)), 0))
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
        return values.masked_fill(values == IGNORED, padding_id)
    rows = [torch.as_tensor(row) for row in values]
    is_even = all(row.shape == rows[0].shape for row in rows)
    return _without_ignored(torch.stack(rows) if is_even else pad_sequence(rows, True, padding_id), padding_id)


class Image2TextMetricHandler(TextsMetricsHandler):
    """Error rates of the texts read in images."""

    valid_metrics = ("cer", "wer")
    default_metrics = ("cer",)


Image2TextMetricsHandler = Image2TextMetricHandler


class SpeechRecognitionMetricsHandler(TextsMetricsHandler):
    """Error rates of transcribed speech."""

    valid_metrics = default_metrics = ("cer", "wer")


class TextGenerationMetricsHandler(TextsMetricsHandler):
    """Overlap of generated texts with their references."""

    shifts_labels = True

    valid_metrics = ("rouge", "bleu")
    default_metrics = ("rouge",)


class TextClassificationMetricsHandler(MetricsHandler):
    """Scores (B, C) or class ids (B), and labels (B). Samples whose label is -100 do not count.

    With a loss that takes class probabilities, labels may be these (B, C): the most probable class counts.
    """

    valid_metrics = ("accuracy", "recall", "precision", "f1")
    default_metrics = ("accuracy",)

    def process(self, predictions: Any, labels: Any, **batch: Any) -> tuple[list[Any], list[Any]]:
        if self.are_targets_probabilities and isinstance(predictions, Tensor) and isinstance(labels, Tensor):
            labels = most_probable_classes(predictions, labels)
        pairs = [(_class(row), np.asarray(label)) for row, label in paired_rows(predictions, labels, self)]
        if any(found is None or label.size != 1 for found, label in pairs):
            raise EvaluationError(
                f"{type(self).__name__}: predictions {shape_and_type(predictions)} and labels {shape_and_type(labels)} "
                "do not fit; they must be scores (B, C) or class ids (B), and class ids (B)."
            )
        kept = [(found, label.item()) for found, label in pairs if label.item() != IGNORED]
        return [found for found, _ in kept], [label for _, label in kept]


def _class(row: Any) -> Any:
    """The class of one sample: that with the highest score, or the value itself; None if it is neither."""
    scores = np.asarray(row)
    if scores.ndim == 1 and (scores.size > 1 or scores.dtype.kind == "f"):
        return int(scores.argmax())
    return scores.item() if scores.size == 1 and scores.dtype.kind != "f" else None


class SequenceLabelingMetricsHandler(MetricsHandler):
    """Scores (B, L, C) or label ids (B, L), and label ids (B, L); tokens whose label is -100 do not count.

    ``trainer.model.config.id2label`` holds the labels' names. If they name spans, in a scheme such as IOB, a label that
    does not counts as ``O``. Otherwise (``trainer.train_dataset.config.is_iob_schema`` is False; if it is not set, most
    of the names decide) each labeled token is its own span: ``name`` counts as ``B-name``, and ``O`` stays outside.
    """

    valid_metrics = ("seqeval",)
    default_metrics = ("seqeval",)

    def process(self, predictions: Any, labels: Any, **batch: Any) -> tuple[list[Any], list[Any]]:
        names = self._names()
        found: list[list[str]] = []
        true: list[list[str]] = []
        for scores, row in paired_rows(predictions, labels, self):
            found_L, true_L = np.asarray(scores), np.asarray(row)
            found_L = found_L.argmax(axis=-1) if found_L.ndim == 2 else found_L
            if found_L.shape != true_L.shape or true_L.ndim != 1:
                raise EvaluationError(
                    f"{type(self).__name__}: a sample has predictions of shape {np.asarray(scores).shape} and labels "
                    f"of shape {true_L.shape}; they must be (L, C) or (L,), and (L,)."
                )
            counted_L = true_L != IGNORED
            found.append([_name(names, label) for label in found_L[counted_L]])
            true.append([_name(names, label) for label in true_L[counted_L]])
        return found, true

    def _names(self) -> dict[int, str]:
        id2label = getattr(getattr(getattr(self.trainer, "model", None), "config", None), "id2label", None)
        if not id2label:
            raise ConfigError(
                f"{type(self).__name__}: the names of the labels are not known. Give the model a config with id2label, "
                'for example {0: "O", 1: "B-name", 2: "I-name"}, and the handler its trainer.'
            )
        pairs = id2label.items() if hasattr(id2label, "items") else enumerate(id2label)
        names = {int(number): str(name) for number, name in pairs}
        configs = (getattr(one, "config", None) for one in with_inner(getattr(self.trainer, "train_dataset", None)))
        declared = {getattr(config, "is_iob_schema", None) for config in configs} - {None}
        is_iob = declared.pop() if len(declared) == 1 else None
        has_spans, faults = span_scheme(names.values(), is_iob)
        for fault in faults.values() if is_iob is None else ():  # else the data set has named them
            _warn_of(fault)
        if not has_spans:
            return {n: name if name == "O" else f"B-{name}" for n, name in names.items()}
        return {n: "O" if name in faults else name for n, name in names.items()}


@functools.cache  # once per process
def _warn_of(fault: str) -> None:
    logger.warning("id2label: %s. Correct it, or set is_iob_schema of the data set.", fault)


def _name(names: dict[int, str], label: Any) -> str:
    try:
        return names[int(label)]
    except KeyError:
        raise EvaluationError(
            f"label {int(label)} is not in id2label, which has {min(names)} to {max(names)}."
        ) from None


_HANDLERS: dict[str, type[MetricsHandler]] = {
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
    if name not in _HANDLERS:
        raise ConfigError(
            f"task: there are no metrics for {name!r}. {did_you_mean(name, _HANDLERS)} For another task give the "
            "Trainer a metrics_handler of your own, a subclass of MetricsHandler."
        )
    return _HANDLERS[name]

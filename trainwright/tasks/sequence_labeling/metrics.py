"""The metrics handler of sequence labeling."""

import re
from typing import Any

import numpy as np

from trainwright.config.errors import ConfigError
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.handlers import IGNORED_LABEL, MetricsHandler, paired_rows

_IOB_LABEL = re.compile(r"O|[BIESLU]-.+")


class SequenceLabelingMetricsHandler(MetricsHandler):
    """Scores (B, L, C) or label ids (B, L), and label ids (B, L); tokens whose label is -100 do not count.

    ``trainer.model.config.id2label`` holds the labels' names. If they follow no scheme such as IOB
    (``trainer.train_dataset.config.is_iob_schema`` is False; if it is not set, this follows from the names), each
    labeled token is its own span: ``name`` counts as ``B-name``, and ``O`` stays outside.
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
            counted_L = true_L != IGNORED_LABEL
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
        is_iob = getattr(getattr(getattr(self.trainer, "train_dataset", None), "config", None), "is_iob_schema", None)
        if is_iob is None:
            is_iob = all(_IOB_LABEL.fullmatch(name) for name in names.values())
        return names if is_iob else {n: name if name == "O" else f"B-{name}" for n, name in names.items()}


def _name(names: dict[int, str], label: Any) -> str:
    try:
        return names[int(label)]
    except KeyError:
        raise EvaluationError(
            f"label {int(label)} is not in id2label, which has {min(names)} to {max(names)}."
        ) from None

"""How metrics compare a model's scores with the labels of a batch. Decided once, with the first batch.

B batch, L tokens, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.data.batch import count_samples
from trainwright.engine.loss_fn import predictions_of
from trainwright.engine.targets import (
    Targets,
    empty_targets,
    labels_of,
    predicts_next_token,
    targets_by_value,
    targets_of_criterion,
)

_LOSSES_OF_CLASSES = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.MultiMarginLoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.SoftMarginLoss,
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How to compare scores with labels.

    Attributes:
        is_shifted: the score at token i is compared with the label of token i + 1.
        targets: the labels that the loss averages; None: all samples count the same.
        refusal: why the default metric, accuracy, is meaningless for this run; None if it is meaningful.
        is_final: False if the batch says nothing about shifted labels, because it has none that count.
    """

    is_shifted: bool = False
    targets: Targets | None = None
    refusal: str | None = None
    is_final: bool = True

    def for_handler(self, handler: Any) -> "Comparison":
        """The parts that apply to a metrics handler: a metric that the user requests is always computed."""
        return replace(
            self,
            is_shifted=self.is_shifted and getattr(handler, "shifts_labels", False),
            refusal=self.refusal if getattr(handler, "is_default", False) else None,
        )

    def aligned(self, scores: Any, labels: Any) -> tuple[Any, Any]:
        """Scores and the labels that they predict: (B, L, C) and (B, L) of the next token if ``is_shifted``."""
        return (
            (scores[:, :-1], labels[:, 1:]) if self.is_shifted and _are_of_tokens(scores, labels) else (scores, labels)
        )

    def loss_weight(self, outputs: Mapping[str, Any], batch: Any) -> int | Tensor:
        """The number of items that a batch's loss averages: as in the training, ``num_tokens``, targets or samples."""
        if "num_tokens" in outputs:
            return torch.as_tensor(outputs["num_tokens"])
        labels = labels_of(batch)
        if labels is None or self.targets is None:
            return count_samples(batch, unknown=1)
        return torch.as_tensor(self.targets.count(labels))


def find_comparison(
    model: nn.Module, outputs: Any, inputs: Any, loss: Any, *, criterion: Any, has_own_loss: bool
) -> Comparison:
    """The comparison for a run whose first batch is ``inputs``.

    Args:
        outputs: the model's outputs for the batch.
        loss: the loss of the batch, if known.
        criterion: the loss function of the run, or None. ``has_own_loss``: it is not used, because the model or the
            user's code computes the loss.
    """
    scores, labels = predictions_of(outputs), labels_of(inputs)
    criterion = None if has_own_loss else criterion
    targets = None if criterion is None else targets_of_criterion(criterion)
    is_of_tokens, is_final = _are_of_tokens(scores, labels), True
    if targets is None and labels is not None and isinstance(loss, Tensor) and loss.numel() == 1:
        targets = targets_by_value(model, scores, labels, loss)
        if targets is None and (empty := empty_targets(model, labels, loss)):
            targets, is_final = empty[0], False
    if targets is None and _are_of_classes(scores, labels):
        targets = Targets(is_shifted=is_of_tokens and predicts_next_token(model))
    return Comparison(
        is_shifted=targets is not None and targets.is_shifted,
        targets=targets,
        refusal=_refusal(scores, inputs, criterion=criterion),
        is_final=is_final and (not is_of_tokens or bool((labels[:, 1:] >= 0).any())),
    )


def _refusal(scores: Any, inputs: Any, *, criterion: Any) -> str | None:
    if not isinstance(scores, Tensor):
        return "the model's output has no class scores"
    if criterion is not None:
        is_torchs = type(criterion).__module__ == "torch.nn.modules.loss"
        is_of_others = is_torchs and not isinstance(criterion, _LOSSES_OF_CLASSES)
        return f"{type(criterion).__name__} is not a classification loss" if is_of_others else None
    if _is_reconstruction(scores, inputs):
        return "the model's output has the shape of its input"
    return None


def _is_reconstruction(scores: Tensor, inputs: Any) -> bool:
    """Whether the output has as many values per sample as an input. Two values may be two classes."""
    given = inputs.values() if isinstance(inputs, Mapping) else inputs[:1] if isinstance(inputs, tuple | list) else ()
    if scores.dim() < 2 or scores.shape[1:].numel() <= 2:
        return False
    return any(
        isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
        and value.shape[0] == scores.shape[0] and value.shape[1:].numel() == scores.shape[1:].numel()
        for value in given
    )  # fmt: skip


def _are_of_classes(scores: Any, labels: Any) -> bool:
    """Whether they have the shapes of a cross-entropy: scores (B, C, …) or (B, …, C)."""
    if not (isinstance(scores, Tensor) and isinstance(labels, Tensor) and scores.is_floating_point()):
        return False
    is_of_classes = not labels.is_floating_point() and scores.dim() == labels.dim() + 1
    return is_of_classes and labels.shape in (scores.shape[:-1], (scores.shape[0], *scores.shape[2:]))


def _are_of_tokens(scores: Any, labels: Any) -> bool:
    return _are_of_classes(scores, labels) and labels.dim() == 2 and labels.shape == scores.shape[:2]

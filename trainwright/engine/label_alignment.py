"""How metrics compare a model's scores with the labels of a batch. Decided once, with the first batch.

B batch, L tokens, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.data.batch import count_samples
from trainwright.engine.loss_fn import losses_of, target_of
from trainwright.models.outputs import named_outputs

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
_NEXT_TOKEN_MODELS = ("ForCausalLM", "LMHeadModel")  # suffixes of transformers' class names


@dataclass(frozen=True, slots=True)
class Comparison:
    """How to compare scores with labels.

    Attributes:
        is_shifted: the score at token i is compared with the label of token i + 1.
        refusal: why the default metric, accuracy, is meaningless for this run; None if it is meaningful.
        is_final: False if the batch says nothing about shifted labels, because it has none that count.
    """

    is_shifted: bool = False
    refusal: str | None = None
    is_final: bool = True

    def for_handler(self, handler: Any) -> "Comparison":
        """The parts that apply to a metrics handler: a metric that the user requests is always computed."""
        return Comparison(
            is_shifted=self.is_shifted and getattr(handler, "shifts_labels", False),
            refusal=self.refusal if getattr(handler, "is_default", False) else None,
            is_final=self.is_final,
        )

    def aligned(self, scores: Any, labels: Any) -> tuple[Any, Any]:
        """Scores and the labels that they predict: (B, L, C) and (B, L) of the next token if ``is_shifted``."""
        return (
            (scores[:, :-1], labels[:, 1:]) if self.is_shifted and _are_of_tokens(scores, labels) else (scores, labels)
        )

    def loss_weight(
        self, outputs: Mapping[str, Any], batch: Any, ignored: int = -100, class_weights: Tensor | None = None
    ) -> int | Tensor:
        """The number of items that a batch's loss averages: the model's ``num_tokens``, or labels that are not ignored.

        With ``class_weights`` (C,), which weight the loss, the sum of the weights of these labels.
        The number of samples, if scores and labels do not have the shapes of a cross-entropy: labels (B,) or (B, L),
        scores (B, C), (B, L, C) or (B, C, L).
        """
        if "num_tokens" in outputs:
            return torch.as_tensor(outputs["num_tokens"])
        scores, labels = self.aligned(predictions_of(outputs), target_of(batch))
        if isinstance(scores, Tensor) and isinstance(labels, Tensor) and scores.dim() == labels.dim() + 1:
            is_of_classes = not labels.is_floating_point() and scores.is_floating_point()
            if is_of_classes and labels.shape in (scores.shape[:-1], (scores.shape[0], *scores.shape[2:])):
                is_counted = labels != ignored
                if class_weights is not None:
                    return class_weights[labels[is_counted].long()].sum()
                return is_counted.sum()
        return count_samples(batch, unknown=1)


def find_comparison(
    model: nn.Module, outputs: Any, inputs: Any, loss: Any, *, criterion: Any, has_own_loss: bool
) -> Comparison:
    """The comparison for a run whose first batch is ``inputs``.

    Args:
        outputs: the model's outputs for the batch.
        loss: the training loss of the batch, if known.
        criterion: the loss function of the run, or None. ``has_own_loss``: it is not used, because the model or the
            user's code computes the loss.
    """
    scores, labels = predictions_of(outputs), target_of(inputs)
    return Comparison(
        is_shifted=_predicts_next_token(model, scores, labels, loss),
        refusal=_refusal(scores, inputs, criterion=None if has_own_loss else criterion),
        is_final=not _are_of_tokens(scores, labels) or bool((labels[:, 1:] >= 0).any()),
    )


def predictions_of(outputs: Any) -> Any:
    """The scores among a model's outputs: the output itself, or its entry ``logits``; None if there are none."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() else None  # a loss
    named = named_outputs(outputs)
    if named is not None and ("logits" in named or "prediction_scores" in named or not isinstance(outputs, tuple)):
        return named.get("logits", named.get("prediction_scores"))  # evaluators read the second
    if losses_of(outputs) is not None and isinstance(outputs, tuple | list):
        return outputs[1] if len(outputs) > 1 else None  # after its loss
    return None


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


def _are_of_tokens(scores: Any, labels: Any) -> bool:
    if not (isinstance(scores, Tensor) and isinstance(labels, Tensor)):
        return False
    is_of_classes = scores.is_floating_point() and not labels.is_floating_point()
    return is_of_classes and scores.dim() == 3 and scores.shape[:2] == labels.shape


def _predicts_next_token(model: nn.Module, scores: Any, labels: Any, loss: Any) -> bool:
    """Whether the loss compares each score with the next token's label: by its value, else by the model's name."""
    if not _are_of_tokens(scores, labels) or labels.shape[1] < 2:
        return False
    if isinstance(loss, Tensor) and loss.numel() == 1:
        value = float(loss)
        to_shifted = abs(value - _mean_cross_entropy(scores[:, :-1], labels[:, 1:]))
        to_aligned = abs(value - _mean_cross_entropy(scores, labels))
        if min(to_shifted, to_aligned) <= 0.01 * max(1.0, value):  # a loss with further terms fits neither
            return to_shifted < to_aligned
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):  # the decoder's input is shifted already
        return False
    return getattr(model, "loss_type", None) == "ForCausalLM" or type(model).__name__.endswith(_NEXT_TOKEN_MODELS)


def _mean_cross_entropy(scores_BLC: Tensor, labels_BL: Tensor) -> float:
    """Mean over the valid labels, one sample at a time: scores of a large vocabulary need much memory."""
    is_class = (labels_BL >= 0) & (labels_BL < scores_BLC.shape[2])
    rows = zip(scores_BLC.detach(), labels_BL.long().masked_fill(~is_class, -100), strict=True)
    total = sum(float(F.cross_entropy(scores.float(), labels, reduction="sum")) for scores, labels in rows)
    return total / max(1, int(is_class.sum()))

"""What metrics compare: the scores of a model and the labels of a batch. Decided once, at the first batch.

B batch, L tokens, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.engine.loss_fn import losses_of, target_of

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
_NEXT_TOKEN_MODELS = ("ForCausalLM", "LMHeadModel")  # how transformers ends the names of their classes


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the scores and the labels of a run are compared.

    Attributes:
        is_shifted: the score at token i is compared with the label of token i + 1.
        refusal: why the default metric, accuracy, means nothing here; None where it does.
    """

    is_shifted: bool = False
    refusal: str | None = None


def find_comparison(
    model: nn.Module, outputs: Any, inputs: Any, loss: Any, *, criterion: Any, has_own_loss: bool
) -> Comparison:
    """The comparison for a run whose first batch is ``inputs``.

    Args:
        outputs: what ``model`` returned for it.
        loss: the loss of the batch as it is trained on, if it is known.
        criterion: the loss function of the run, None without one. ``has_own_loss``: it is not used, because the model
            or the user's code computes the loss.
    """
    scores, labels = predictions_of(outputs), target_of(inputs)
    return Comparison(
        is_shifted=_predicts_next_token(model, scores, labels, loss),
        refusal=_refusal(scores, inputs, criterion=None if has_own_loss else criterion),
    )


def predictions_of(outputs: Any) -> Any:
    """The scores in what a model returned: the output itself, or its entry ``logits``; None where there are none."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() else None  # a loss
    if losses_of(outputs) is not None and isinstance(outputs, tuple | list):
        return outputs[1] if len(outputs) > 1 else None  # behind its loss
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs.get("prediction_scores"))  # the second is what our evaluators read
    return None


def shifted(scores: Any, labels: Any) -> tuple[Any, Any]:
    """Each token's score (B, L, C) beside the label (B, L) of the next token; anything else as it is."""
    return (scores[:, :-1], labels[:, 1:]) if _are_of_tokens(scores, labels) else (scores, labels)


def _refusal(scores: Any, inputs: Any, *, criterion: Any) -> str | None:
    if not isinstance(scores, Tensor):
        return "the model's output holds no scores of classes"
    if criterion is not None:
        is_torchs = type(criterion).__module__ == "torch.nn.modules.loss"
        is_of_others = is_torchs and not isinstance(criterion, _LOSSES_OF_CLASSES)
        return f"{type(criterion).__name__} is no loss of classes" if is_of_others else None
    if _is_reconstruction(scores, inputs):
        return "the model's output has the shape of its input"
    return None


def _is_reconstruction(scores: Tensor, inputs: Any) -> bool:
    """Whether the output holds as many numbers for each sample as an input. Two of each may be two classes."""
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
    """Whether the loss compares each score with the next token's label: told by its value, else by the model's name."""
    if not _are_of_tokens(scores, labels) or labels.shape[1] < 2:
        return False
    if isinstance(loss, Tensor) and loss.numel() == 1:
        value = float(loss)
        to_shifted = abs(value - _mean_cross_entropy(*shifted(scores, labels)))
        to_aligned = abs(value - _mean_cross_entropy(scores, labels))
        if min(to_shifted, to_aligned) <= 0.01 * max(1.0, value):  # a loss with further terms fits neither
            return to_shifted < to_aligned
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):  # the decoder's input is shifted
        return False
    return getattr(model, "loss_type", None) == "ForCausalLM" or type(model).__name__.endswith(_NEXT_TOKEN_MODELS)


def _mean_cross_entropy(scores_BLC: Tensor, labels_BL: Tensor) -> float:
    """Over the labels that are classes; a sample at a time, because scores of a large vocabulary fill a device."""
    is_class = (labels_BL >= 0) & (labels_BL < scores_BLC.shape[2])
    rows = zip(scores_BLC.detach(), labels_BL.long().masked_fill(~is_class, -100), strict=True)
    total = sum(float(F.cross_entropy(scores.float(), labels, reduction="sum")) for scores, labels in rows)
    return total / max(1, int(is_class.sum()))

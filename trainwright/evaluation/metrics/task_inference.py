"""Choose the classification task from a batch's shapes and types, and convert batches to what torchmetrics takes.

B batch, C classes, L labels or positions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.base.batch import described
from trainwright.evaluation.evaluator import EvaluationError

Pair = tuple[Tensor, Tensor]  # predictions and targets


def aligned(predictions: Tensor, targets: Tensor) -> Pair:
    """Without trailing dimensions of size 1 that only one of the two has: (B, 1) and (B,) become (B,) and (B,)."""
    while predictions.dim() > targets.dim() and predictions.shape[-1] == 1:
        predictions = predictions.squeeze(-1)
    while targets.dim() > predictions.dim() and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    # (B, C) scores with (B, 1) labels.
    if targets.dim() == predictions.dim() > 1 and targets.shape[1:].numel() == 1 < predictions.shape[1:].numel():
        targets = targets.flatten()
    if predictions.shape == targets.shape and predictions.dim() == 2 and predictions.shape[1] == 1:
        return predictions.squeeze(1), targets.squeeze(1)
    return predictions, targets


def most_probable_classes(predictions: Tensor, targets: Tensor) -> Tensor:
    """Class indices of class probabilities (B, C, …), which have the shape of the scores; other targets unchanged."""
    is_of_classes = predictions.shape == targets.shape and predictions.dim() > 1 and predictions.is_floating_point()
    return targets.argmax(dim=1) if is_of_classes and targets.is_floating_point() else targets


def infer_task(predictions: Tensor, targets: Tensor) -> tuple[str, int | None]:
    """``("binary", None)``, ``("multiclass", C)`` or ``("multilabel", L)``, of aligned predictions and targets.

    ``("multiclass", None)``: the predictions are class indices, and their shape does not show the number of classes.
    """
    has_scores = predictions.is_floating_point()
    if predictions.shape == targets.shape:
        if not has_scores:
            return "multiclass", None
        return ("multilabel", predictions.shape[1]) if predictions.dim() > 1 else ("binary", None)
    if has_scores and predictions.dim() == targets.dim() + 1:
        last = is_channels_last(predictions, targets)
        if last is not False or _is_channels_first(predictions, targets):
            return "multiclass", predictions.shape[-1 if last else 1]
    raise EvaluationError(
        f"cannot infer the task from predictions {shape_and_type(predictions)} and targets {shape_and_type(targets)}. "
        "Classification takes scores (B, C) and class indices (B,), probabilities (B,) and 0 or 1 (B,), "
        "class indices (B,) twice, or scores (B, L) and 0 or 1 (B, L) for L labels."
    )


def is_channels_last(predictions: Tensor, targets: Tensor) -> bool | None:
    """Whether scores are (B, L, C), not (B, C, L), for targets (B, L); None if both fit, or there is no L."""
    if predictions.dim() != targets.dim() + 1:
        return False
    is_last = predictions.shape[:-1] == targets.shape
    return None if is_last and _is_channels_first(predictions, targets) else is_last


def _is_channels_first(predictions: Tensor, targets: Tensor) -> bool:
    return predictions.shape[:1] == targets.shape[:1] and predictions.shape[2:] == targets.shape[1:]


def for_classification(predictions: Tensor, targets: Tensor, *, channels_last: bool = False) -> Pair:
    """Scores in full precision with classes in dimension 1, and targets as int64."""
    if channels_last and predictions.dim() > 2:
        predictions = predictions.movedim(-1, 1)
    predictions = full_precision(predictions)
    if targets.is_floating_point() and not torch.equal(targets, targets.round()):
        is_of_classes = targets.shape == predictions.shape and targets.dim() > 1
        hint = " Are they class probabilities? loss='CrossEntropyLoss' declares it." if is_of_classes else ""
        raise EvaluationError(
            f"targets {shape_and_type(targets)} have fractions; a classification's are whole numbers.{hint} For other"
            " numbers use a metric of regression, such as MeanSquaredError."
        )
    return predictions if predictions.is_floating_point() else predictions.long(), targets.long()


def check_classes(pair: Pair, num_classes: int, ignored: int | None) -> None:
    """Check that class indices are in range: torchmetrics only counts the different ones."""
    for what, values in zip(("predictions", "targets"), pair, strict=True):
        if values.is_floating_point():
            continue
        wrong = (values < 0) | (values >= num_classes)
        if ignored is not None:
            wrong &= values != ignored
        if wrong.any():
            raise EvaluationError(f"{what} hold class {int(values[wrong][0])}; there are {num_classes}, from 0 on")


def for_regression(predictions: Tensor, targets: Tensor) -> Pair:
    """Both in full precision, because torchmetrics sums in the type of its inputs; integer targets become floats."""
    predictions = full_precision(predictions)
    is_whole = predictions.is_floating_point() and not targets.is_floating_point() and not targets.is_complex()
    return predictions, targets.to(predictions.dtype) if is_whole else full_precision(targets)


def full_precision(values: Tensor) -> Tensor:
    """Half-precision numbers as float32; anything else unchanged."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def shape_and_type(value: Any) -> str:
    """``(32, 10) float32``, for an error message."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"of {len(value)} entries ({type(value).__name__})" if isinstance(value, list | tuple) else described(value)


def scores_of(outputs: Any) -> Any:
    """A model's predictions: ``logits`` or ``prediction_scores`` of a dictionary, the first entry of a tuple."""
    if isinstance(outputs, Mapping):
        return next((outputs[key] for key in ("logits", "prediction_scores") if key in outputs), outputs)
    return outputs[0] if isinstance(outputs, tuple) and outputs else outputs

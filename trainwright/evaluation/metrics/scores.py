"""Scores in the form that a metric reads: probabilities, or numbers of the same order.

torchmetrics applies a sigmoid or softmax to a batch if one of its numbers lies outside of [0, 1], and takes it for
probabilities otherwise. What is returned here lies within [0, 1], so that it never does.

B batch, C classes.
"""

import torch
from torch import Tensor

from trainwright.base.devices import wide_dtype


def probabilities(scores: Tensor, *, is_multiclass: bool) -> Tensor:
    """Those of logits (B, …) or, of several classes, (B, C, …), in float64: in float32, 17 and more are all 1."""
    wide = scores.to(wide_dtype(scores.device))
    return within_range(wide.softmax(dim=1) if is_multiclass else wide.sigmoid())


def of_second_class(scores: Tensor, *, are_logits: bool) -> Tensor:
    """Scores (B, …) of the second of two classes, of scores (B, 2, …), for a metric of two classes.

    Raises:
        ValueError: there are more classes.
    """
    if scores.shape[1] != 2:
        raise ValueError(
            "task='binary' (average='binary') takes scores of two classes, or one for each sample, and these are of"
            f" {scores.shape[1]}: leave it out, or set task='multiclass'"
        )
    return scores[:, 1] - scores[:, 0] if are_logits else scores[:, 1]


def within_range(values: Tensor) -> Tensor:
    """Probabilities without what rounding has put outside of [0, 1]; NaN, which is above no threshold, is 0."""
    return values.clamp(0, 1).nan_to_num(0.0)


def log_odds(logits_BC: Tensor) -> Tensor:
    """The logarithm of p / (1 - p) of each class, whose order is that of the probabilities, also where these are 1."""
    wide = logits_BC.to(wide_dtype(logits_BC.device))
    best = wide.argmax(dim=1, keepdim=True)
    total = wide.logsumexp(dim=1, keepdim=True)
    others = total + torch.log1p(-(wide - total).exp())  # of a class with p <= 1/2; for the best, 1 - p may be lost
    of_best = wide.scatter(1, best, -torch.inf).logsumexp(dim=1, keepdim=True)
    return (wide - others.scatter(1, best, of_best)).to(logits_BC.dtype)


def ordered(scores: Tensor) -> Tensor:
    """Numbers in [0, 1] with the order and the ties of ``scores``, however large these are. NaN is the smallest.

    The bits of a positive floating point number, read as an integer, are its place in the order of all.
    """
    integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    bits = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).view(integer)
    largest = torch.iinfo(integer).max
    places = torch.where(bits < 0, -(bits & largest), bits)  # the first bit is the sign
    return places.to(wide_dtype(scores.device)) / (2.0 * (largest + 1)) + 0.5

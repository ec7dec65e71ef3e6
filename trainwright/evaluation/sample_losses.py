"""The loss of each sample of a batch, although a loss of torch returns their mean.

B samples, C classes.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainwright.base.batch import first_labels
from trainwright.models.outputs import named_outputs

_LOSSES = {
    *(F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.ctc_loss),
}
_SCORES = ("logits", "prediction_scores", "scores", "predictions", "output")


_signature = functools.cache(inspect.signature)


class LossesOfTorch(TorchFunctionMode):
    """While it is entered, each loss of torch is computed a second time, without reduction.

    Args:
        num_samples: returns the number of samples of the loss that is computed; 0: its first dimension.
        record: called with the loss of each sample, shape (B,); None: the loss has no value for each.
    """

    def __init__(self, num_samples: Callable[[], int], record: Callable[[Tensor | None], object]) -> None:
        super().__init__()
        self._num_samples, self._record, self._is_inside = num_samples, record, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _LOSSES or self._is_inside:
            return function(*args, **kwargs)
        self._is_inside = True
        try:
            result = function(*args, **kwargs)
            self._record(self._of_samples(function, args, kwargs))
        finally:
            self._is_inside = False
        return result

    @torch.no_grad()
    def _of_samples(self, function: Any, args: Any, kwargs: Any) -> Tensor | None:
        bound = _signature(function).bind(*args, **kwargs)
        bound.arguments |= {"reduction": "none", "size_average": None, "reduce": None}
        bound.arguments = {
            name: bound.arguments[name] for name in bound.signature.parameters if name in bound.arguments
        }
        values: Tensor = function(*bound.args, **bound.kwargs).float()
        size = self._num_samples() or (values.shape[0] if values.dim() else 0)
        if not size or values.numel() % size:
            return None
        rows = values.reshape(size, -1)
        target, ignored = bound.arguments.get("target"), bound.arguments.get("ignore_index", -100)
        if isinstance(target, Tensor) and not target.is_floating_point() and target.numel() == values.numel():
            counted: Tensor = target.reshape(size, -1) != ignored
            return rows.sum(1) / counted.sum(1).clamp(min=1)  # as the mean of torch
        return rows.mean(1)


def losses_of_samples(batch: Any, outputs: Any, size: int, recorded: Sequence[Tensor | None]) -> Tensor | None:
    """The loss of each of the ``size`` samples, shape (B,), on the device; None: unknown.

    It is the model's output ``sample_losses``, else the sum of the losses of torch that were ``recorded``, else it is
    computed from scores and labels: cross entropy of scores (B, C), or the mean squared error of outputs that have the
    shape of the labels.
    """
    own = (named_outputs(outputs) or {}).get("sample_losses")
    if isinstance(own, Tensor) and own.shape == (size,):
        return own.detach().clone()
    of_torch = [losses for losses in recorded if losses is not None and losses.shape == (size,)]
    if of_torch:
        return torch.stack(of_torch).sum(0)
    scores, labels = scores_of(outputs), first_labels(batch)
    if scores is None or labels is None or len(scores) != size or len(labels) != size:
        return None
    if scores.ndim == 2 and labels.ndim == 1 and not labels.is_floating_point():
        return F.cross_entropy(scores.float(), labels.long(), reduction="none")
    if scores.shape == labels.shape and labels.is_floating_point():
        return (scores - labels).float().square().reshape(size, -1).mean(1)
    return None


def scores_of(outputs: Any) -> Tensor | None:
    """The scores in a model's outputs, shape (B, …)."""
    named = named_outputs(outputs)
    if named is not None:
        found = next((named[name] for name in _SCORES if isinstance(named.get(name), Tensor)), None)
    else:
        found = outputs if isinstance(outputs, Tensor) else None
    return None if found is None or not found.ndim or not found.is_floating_point() else found.detach()

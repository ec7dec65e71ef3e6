"""What an evaluation gives: exact means over samples, counted on the device and read once."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.engine.contracts import target_of
from trainwright.evaluation.untouched import evaluation_mode, kept_randomness


def score_batches(
    model: nn.Module, batches: Iterable[Any], compute_loss: Callable[[Any, Any], Any], device: torch.device
) -> dict[str, float]:
    """The score of ``model`` over ``batches``, in evaluation mode. Modes and randomness are afterwards as they were."""
    score, seen = Score(), list[Any]()
    # However compute_loss calls the model, overridden or not, this sees what it gives: no second forward pass.
    hook = model.register_forward_hook(lambda module, arguments, outputs: seen.append(outputs))
    try:
        with evaluation_mode(model), kept_randomness(device):
            for inputs in batches:
                loss = compute_loss(model, inputs)
                score.add(inputs, seen[-1] if seen else None, loss)
                seen.clear()
    finally:
        hook.remove()
    return score.results()


class Score:
    """The mean loss over all samples, and the accuracy where outputs are scores of classes and labels whole numbers.

    B batch, C classes.
    """

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._samples = 0
        self._correct: Tensor | None = None
        self._labels: Tensor | None = None

    def add(self, inputs: Any, outputs: Any, loss: Tensor | None) -> None:
        """Count one batch. ``loss`` is its mean; None if the model gave none."""
        size = batch_size(inputs)
        if loss is not None:
            weighted = loss.detach().double() * size if loss.device.type != "mps" else loss.detach() * size
            self._loss = weighted if self._loss is None else self._loss + weighted
            self._samples += size
        logits_BC, labels_B = _scores(outputs), target_of(inputs)
        if not _are_classes(logits_BC, labels_B):
            return
        counted_B = labels_B >= 0  # -100 and the like are labels that do not count
        correct = ((logits_BC.argmax(dim=1) == labels_B) & counted_B).sum()
        labels = counted_B.sum()
        self._correct = correct if self._correct is None else self._correct + correct
        self._labels = labels if self._labels is None else self._labels + labels

    def results(self) -> dict[str, float]:
        """``loss`` and ``accuracy``, those that there are."""
        found: dict[str, float] = {}
        if self._loss is not None:
            found["loss"] = self._loss.item() / self._samples
        if self._correct is not None and self._labels is not None and (labels := int(self._labels)):
            found["accuracy"] = int(self._correct) / labels
        return found


def batch_size(inputs: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor; 1 where there is none."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else 1
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else ()
    return next((part.shape[0] for part in parts if isinstance(part, Tensor) and part.dim()), 1)


def _scores(outputs: Any) -> Any:
    if not isinstance(outputs, Mapping):
        return outputs
    return outputs.get("logits", outputs.get("prediction_scores"))  # the second is what our evaluators read


def _are_classes(logits_BC: Any, labels_B: Any) -> bool:
    return (
        isinstance(logits_BC, Tensor)
        and isinstance(labels_B, Tensor)
        and logits_BC.dim() == 2
        and labels_B.shape == logits_BC.shape[:1]
        and not labels_B.is_floating_point()
        and labels_B.dtype is not torch.bool
    )

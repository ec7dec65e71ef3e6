"""Batches that wait to be counted together: one update of many batches costs little more than one of a single batch."""

from typing import Any  # a state is a plain dictionary

import torch
from torch import Tensor

from trainwright.evaluation.metrics.shapes import Pair

MAX_BATCHES = 128
MAX_ELEMENTS = 1_000_000  # of predictions and targets together: 4 MB in float32
LARGE_BATCH = MAX_ELEMENTS // 16  # a batch of this size is counted at once: a copy would cost more than it saves


class Buffer:
    """Copies of predictions and targets, in order.

    Copies, since a loader may fill the same target again, a captured graph writes its outputs to the same place, and
    a slice of a large output would keep all of it in memory.
    """

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._pairs)

    def clear(self) -> None:
        self._pairs: list[Pair] = []
        self._num_elements = 0

    def add(self, predictions: Tensor, targets: Tensor) -> bool:
        """Take one batch; whether it is time to count."""
        self._pairs.append((predictions.detach().clone(), targets.detach().clone()))
        self._num_elements += predictions.numel() + targets.numel()
        return len(self._pairs) >= MAX_BATCHES or self._num_elements >= MAX_ELEMENTS

    def take(self) -> list[Pair]:
        """What was added, as few pairs as types and shapes allow; the buffer is empty then."""
        pairs = self._pairs
        self.clear()
        return joined(pairs)

    def to(self, device: torch.device | str) -> None:
        self._pairs = [(predictions.to(device), targets.to(device)) for predictions, targets in self._pairs]

    def state_dict(self) -> dict[str, Any]:
        return {"pairs": [list(pair) for pair in self._pairs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pairs = [(predictions, targets) for predictions, targets in state["pairs"]]
        self._num_elements = sum(value.numel() for pair in self._pairs for value in pair)


def joined(pairs: list[Pair]) -> list[Pair]:
    """One pair of all batches if they differ only in length, else all of them. They go to the last one's device."""
    if not pairs:
        return []
    predictions, targets = map(list, zip(*pairs, strict=True))
    if len({value.device for value in (*predictions, *targets)}) > 1:
        device = predictions[-1].device
        predictions, targets = [p.to(device) for p in predictions], [t.to(device) for t in targets]
    shapes = {(p.shape, t.shape) for p, t in pairs}
    # Two lengths in one batch are an error that says so; joined with others, they might seem to fit.
    fitting = all(p and t and p[0] == t[0] for p, t in shapes) and len({(p[1:], t[1:]) for p, t in shapes}) == 1
    if not fitting or len({p.dtype for p in predictions}) > 1 or len({t.dtype for t in targets}) > 1:
        return list(zip(predictions, targets, strict=True))
    return [(torch.cat(predictions), torch.cat(targets))]

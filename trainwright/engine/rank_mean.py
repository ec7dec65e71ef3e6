"""The mean of an update over the samples of several processes.

Data parallelism divides the sum of the gradients by the number of ranks. So each rank differentiates its loss times
``its samples * ranks / samples of all``; where nobody knows the last one beforehand, samples are counted as tokens are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.engine.window import HasGroups, WindowMean, count_samples
from trainwright.events.figures import wide_dtype
from trainwright.optim.skip import SkipNonFinite
from trainwright.parallel.dist import get_world_size


class RankMean(WindowMean):
    """As its base class, over the samples or tokens of all ranks.

    Args:
        count: the samples of this rank's batch; 0 for a borrowed one, which changes nothing.
        count_all: those of all ranks in the window that begins; 0: not known.
    """

    def __init__(
        self,
        optimizer: HasGroups,
        differentiate: Callable[..., None],
        *,
        count: Callable[[Any], int] | None,
        count_all: Callable[[], int],
    ) -> None:
        super().__init__(optimizer, count or _count_or_one, differentiate)
        self._count_all = count_all
        self._total = 0
        self._is_over = True

    def begin(self, length: int) -> None:
        super().begin(length)
        self._total, self._is_over = self._count_all(), False

    def share(self, loss: Tensor, batch: Any, num_tokens: Any = None) -> Tensor:
        if self._is_over:  # batches that a loop of the user's own takes by itself
            super().begin(1)
            self._total = 0
        count = self._count(batch)
        if num_tokens is not None:
            return self._share_by_tokens(loss, num_tokens if count else 0)
        if not self._total:
            return self._share_by_tokens(loss, count)
        self.weights.append(count)
        return loss * (count * get_world_size() / self._total)

    def share_again(self, loss: Tensor) -> Tensor:
        if self._is_by_tokens or not self._total:
            return super().share_again(loss)
        share: Tensor = loss * (self.weights[-1] * get_world_size() / self._total)
        return share

    def finish(self) -> None:
        super().finish()
        self._is_over = True


def _count_or_one(batch: Any) -> int:
    return count_samples(batch) or 1


def mean_over_ranks(values: Sequence[Any], weights: Sequence[Any], device: torch.device) -> Tensor:
    """The mean of all ranks' values by their weights, in one exchange; without a weight for each, all count the same.

    Nothing is read from the device.
    """
    wide = wide_dtype(device)
    kept = torch.stack([torch.as_tensor(value, device=device).detach().reshape(()).to(wide) for value in values])
    if len(weights) != len(values):
        weights = [1] * len(values)
    by = torch.stack([torch.as_tensor(weight, device=device).to(wide) for weight in weights])
    # A borrowed batch, and a mean over no token at all, have no part in it, whatever they are.
    total = torch.stack([torch.where(by > 0, kept * by, torch.zeros_like(kept)).sum(), by.sum()])
    dist.all_reduce(total)
    return total[0] / total[1].clamp(min=1)


class SkipTogether:
    """What an update tells a :class:`SkipNonFinite`: losses are summed over the ranks, so that all decide alike."""

    def __init__(self, skip: SkipNonFinite) -> None:
        self.begin = skip.begin
        self._skip = skip

    def note_loss(self, loss: Tensor) -> None:
        """A loss of this rank. Called on all of them."""
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        self._skip.note_loss(loss)

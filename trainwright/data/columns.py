"""Data sets that are tensors side by side: a batch is picked out of each at once, and no sample is ever made.

N samples, B samples of a batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from trainwright.data.collate import collate

PickBatch = Callable[[Sequence[int]], list[Tensor]]


def batch_picker(dataset: Any, collate_fn: Any) -> PickBatch | None:
    """What gives the batch of a list of indices, for a torch TensorDataset or a Subset of one; None for any other.

    Equal to what ``collate`` makes of the samples. A subclass may do anything, so it is none of these; nor is a data
    set whose batches are made by a ``collate_fn`` of the user's own.
    """
    if collate_fn is not collate:
        return None
    if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
        tensors, places_N = dataset.dataset.tensors, torch.as_tensor(dataset.indices, dtype=torch.int64)
    elif type(dataset) is TensorDataset:
        tensors, places_N = dataset.tensors, None
    else:
        return None
    if not all(type(tensor) is Tensor and tensor.layout is torch.strided for tensor in tensors):
        return None

    def pick(indices: Sequence[int]) -> list[Tensor]:
        chosen_B = torch.tensor(list(indices), device="cpu")
        if places_N is not None:
            chosen_B = places_N[chosen_B]
        return [tensor.index_select(0, chosen_B.to(tensor.device)) for tensor in tensors]

    return pick

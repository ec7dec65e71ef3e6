"""The class labels of a data set that has all of them at hand: no sample is read."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from trainwright.data.columns import ColumnDataset

_NAMES = ("labels", "label", "targets", "target")

Labels = npt.NDArray[np.int64]


def known_labels(dataset: Any) -> Labels | None:
    """One class for each sample, (N,); None where they are not known without reading the samples.

    Known are those of a torch TensorDataset of pairs (its second tensor), of a `ColumnDataset` (a column such as
    ``labels``), of data sets of torchvision without a ``target_transform``, and of subsets and joined ones of these.
    """
    if type(dataset) is Subset:
        inner = known_labels(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    if type(dataset) is ConcatDataset:
        parts = [known_labels(one) for one in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if known and len(known) == len(parts) else None
    return _as_classes(_own(dataset))


def _own(dataset: Any) -> Any:
    if type(dataset) is TensorDataset:
        return dataset.tensors[1] if len(dataset.tensors) == 2 else None
    if type(dataset) is ColumnDataset:
        return next((dataset.columns[name] for name in _NAMES if name in dataset.columns), None)
    is_plain = getattr(dataset, "target_transform", None) is None and getattr(dataset, "transforms", None) is None
    return (
        getattr(dataset, "targets", None) if type(dataset).__module__.startswith("torchvision.") and is_plain else None
    )


def _as_classes(values: Any) -> Labels | None:
    if isinstance(values, list):
        values = np.asarray(values) if values and type(values[0]) is int else None
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy() if values.dtype not in (torch.bfloat16, torch.bool) else None
    is_of_classes = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"
    return values.astype(np.int64) if is_of_classes else None

"""Data sets of columns: a batch is selected from each tensor at once, without creating samples.

N samples, B samples of a batch.
"""

import warnings
from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data.collate import collate

# index_select supports no unsigned type but uint8. A view as a signed type has the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class ColumnDataset(Dataset[dict[str, Tensor]]):
    """Named columns of N samples: sample i is ``{name: column[i]}``, and a batch is selected from each column at once.

    The names are those of the parameters of the model's ``forward``. A column is a tensor (N, ...) or a numpy array
    (N, ...) of numbers, ``numpy.memmap`` included, and is not copied. Types stay as they are.

    Raises:
        ConfigTypeError: a column is neither, or an array of a type that torch does not support.
        ConfigError: no column, or columns of unequal length.

    >>> data = ColumnDataset(x=torch.zeros(6, 3), labels=np.arange(6))
    >>> len(data), data[4]
    (6, {'x': tensor([0., 0., 0.]), 'labels': tensor(4)})
    """

    def __init__(self, **columns: Any) -> None:
        self.columns = {name: _as_column(name, column) for name, column in columns.items()}
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) != 1:
            lengths_text = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "there is none"
            raise ConfigError(f"ColumnDataset: columns must be equally long: {lengths_text}.")
        self._length = next(iter(lengths.values()))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"ColumnDataset({', '.join(f'{name}=<{tuple(c.shape)}>' for name, c in self.columns.items())})"


def batch_picker(dataset: Any, collate_fn: Any) -> "BatchPicker | None":
    """From B indices, a list or int64 (B,), to the batch of a `ColumnDataset`, a torch TensorDataset, or a
    Subset of one; None for any other data set.

    The batch equals the result of ``collate`` for the samples. None also for subclasses, which may override anything,
    and for a ``collate_fn`` of the user.
    """
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    if collate_fn is not collate or type(dataset) not in (TensorDataset, ColumnDataset):
        return None
    try:
        return BatchPicker(dataset, subsets)
    except (TypeError, ValueError, IndexError):  # reading the samples raises the error
        return None


def _places(subsets: Sequence[Any]) -> Any:
    """The indices in the data set of the samples of (nested) subsets: int64 (N,); None without any subset."""
    places_N = None
    for subset in reversed(subsets):
        inner_N = torch.as_tensor(subset.indices, device="cpu")
        if len(inner_N) and (inner_N.dtype == torch.bool or inner_N.is_floating_point() or inner_N.is_complex()):
            raise TypeError(f"indices of {inner_N.dtype}")
        inner_N = inner_N.to(torch.int64)
        inner_N = torch.where(inner_N < 0, inner_N + len(subset.dataset), inner_N)  # from the end, as for lists
        places_N = inner_N if places_N is None else places_N[inner_N]
    return places_N


class BatchPicker:
    """Selects batches from the columns and indices that a data set and its subsets have at each call.

    Raises:
        TypeError, ValueError, IndexError: batches cannot be selected from these columns with these indices.
    """

    def __init__(self, dataset: Any, subsets: Sequence[Any]) -> None:
        self._dataset, self._subsets = dataset, subsets
        self._is_of_tensors = type(dataset) is TensorDataset
        self._places_N, self._indices = _places(subsets), [subset.indices for subset in subsets]
        held = dataset.tensors if self._is_of_tensors else dataset.columns.values()
        if not all(type(column) is Tensor and column.layout is torch.strided for column in held):
            raise TypeError("a column is not a dense tensor")

    def __call__(self, indices: Sequence[int] | Tensor) -> Any:
        # Through numpy: converting a list of ints to an array takes a third of the time of a tensor.
        chosen_B = indices if type(indices) is Tensor else torch.from_numpy(np.asarray(indices))
        if self._subsets:
            if not all(map(is_, now := [subset.indices for subset in self._subsets], self._indices)):
                self._places_N, self._indices = _places(self._subsets), now
            chosen_B = self._places_N[chosen_B]
        if self._is_of_tensors:
            return [_selected(column, chosen_B) for column in self._dataset.tensors]
        return {name: _selected(column, chosen_B) for name, column in self._dataset.columns.items()}


def _selected(column: Tensor, chosen_B: Tensor) -> Tensor:
    chosen_B = chosen_B if column.is_cpu else chosen_B.to(column.device)
    signed = _SIGNED.get(column.dtype)
    if signed is None:
        return column.index_select(0, chosen_B)
    return column.view(signed).index_select(0, chosen_B).view(column.dtype)


def _as_column(name: str, column: Any) -> Tensor:
    where = f"ColumnDataset.{name}"
    if isinstance(column, np.ndarray) and column.ndim:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about read-only arrays, such as mapped files: nothing is written
                return torch.from_numpy(column)
        except (TypeError, ValueError) as error:
            raise ConfigTypeError(
                f"{where}: an array of {column.dtype} that cannot be a tensor ({error}). Give numbers in this machine's"
                " byte order and forward strides: numpy.ascontiguousarray(column, dtype=…)."
            ) from error
    if isinstance(column, Tensor) and column.ndim:
        return column
    what = "" if getattr(column, "ndim", 1) else " without a dimension"
    fix = "to_numpy() of it" if hasattr(column, "to_numpy") else "torch.tensor(list)"
    raise ConfigTypeError(
        f"{where}: got {type(column).__name__}{what}; a column is a tensor or a numpy array (N, ...). {fix} makes one."
    )

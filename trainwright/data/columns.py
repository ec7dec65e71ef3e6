"""Data sets of columns: a batch is selected from each tensor at once, without creating samples.

N samples, B samples of a batch.
"""

import warnings
from collections.abc import Collection, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.data.collate import collate
from trainwright.data.errors import DataError

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


def _places(subsets: Sequence[Any]) -> Tensor | None:
    """The indices in the data set of the samples of (nested) subsets: int64 (N,); None without any subset."""
    places_N: Tensor | None = None
    for subset in reversed(subsets):
        inner_N = torch.as_tensor(subset.indices, device="cpu")
        if len(inner_N) and (inner_N.dtype == torch.bool or inner_N.is_floating_point() or inner_N.is_complex()):
            raise TypeError(f"indices of {inner_N.dtype}")
        inner_N = inner_N.to(torch.int64)
        inner_N = torch.where(inner_N < 0, inner_N + len(subset.dataset), inner_N)  # from the end, as for lists
        places_N = inner_N if places_N is None else places_N[inner_N]
    return places_N


class BatchPicker:
    """Selects batches from the columns of a data set, also after the user has replaced columns or indices of subsets.

    Raises:
        TypeError, ValueError, IndexError: batches cannot be selected from these columns with these indices.
    """

    def __init__(self, dataset: Any, subsets: Sequence[Any]) -> None:
        self._dataset, self._subsets = dataset, subsets
        self._prepare()

    def __call__(self, indices: Sequence[int] | Tensor) -> Any:
        now = self._dataset.tensors if self._names is None else self._dataset.columns.values()
        if self._is_replaced(now):
            try:
                self._prepare()
            except (TypeError, ValueError, IndexError) as error:
                kind = type(self._dataset).__name__
                raise DataError(f"data: {kind}: batches cannot be selected from its new columns.") from error
        # Through numpy: converting a list of ints to an array takes a third of the time of a tensor.
        chosen_B = indices if type(indices) is Tensor else torch.from_numpy(np.asarray(indices))
        if self._places_N is not None:
            chosen_B = self._places_N[chosen_B]
        if self._is_on_cpu:
            picked = [column.index_select(0, chosen_B) for column in self._columns]
        else:
            picked = [column.index_select(0, chosen_B.to(column.device)) for column in self._columns]
        for place, dtype in self._signed.items():
            picked[place] = picked[place].view(dtype)
        return picked if self._names is None else dict(zip(self._names, picked, strict=True))

    def _prepare(self) -> None:
        is_of_tensors = type(self._dataset) is TensorDataset
        self._names = None if is_of_tensors else tuple(self._dataset.columns)
        held = [*(self._dataset.tensors if is_of_tensors else self._dataset.columns.values())]
        if not all(type(column) is Tensor and column.layout is torch.strided for column in held):
            raise TypeError("a column is not a dense tensor")
        self._places_N = _places(self._subsets)
        self._held, self._indices = held, [subset.indices for subset in self._subsets]
        self._is_on_cpu = {column.device for column in held} == {torch.device("cpu")}
        self._signed = {place: column.dtype for place, column in enumerate(held) if column.dtype in _SIGNED}
        self._columns = [column.view(_SIGNED[column.dtype]) if column.dtype in _SIGNED else column for column in held]

    def _is_replaced(self, now: Collection[Tensor]) -> bool:
        if len(now) != len(self._held) or not all(map(is_, now, self._held)):
            return True
        return bool(self._indices) and not all(map(is_, [one.indices for one in self._subsets], self._indices))


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

"""Instance: a sample or a batch as named fields, the arguments of the model's ``forward``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainwright.base.batch import rebuilt
from trainwright.base.errors import ConfigTypeError
from trainwright.data.errors import DataError, difference


@dataclass(slots=True, init=False)
class DistTensorData:
    """A tensor and its placement for a model that is distributed over devices.

    ``sbp_list`` says, for data and model parallelism, whether the tensor is split along a dimension or broadcast;
    ``placement_idx`` is the pipeline stage that needs it, -1 the last one (labels). One device ignores both; they
    are kept with the tensor, and must be equal for all samples of a batch.
    """

    tensor: torch.Tensor
    sbp_list: list[str]
    placement_idx: int

    # Written out: a generated one would call two more functions for each field of each sample.
    def __init__(self, tensor: torch.Tensor, sbp_list: list[str] | None = None, placement_idx: int = 0) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigTypeError(
                f"DistTensorData.tensor: got {type(tensor).__name__}; it must be a torch.Tensor. Wrap the "
                "value: torch.tensor(value)."
            )
        self.tensor, self.placement_idx = tensor, placement_idx
        self.sbp_list = ["split_0", "broadcast"] if sbp_list is None else sbp_list

    @staticmethod
    def stack(samples: Sequence["DistTensorData"]) -> "DistTensorData":
        """One batch with a new first dimension. Always a copy: the data set may keep its tensors."""
        first, tensors = samples[0], list[Tensor]()
        for index, sample in enumerate(samples):
            if not isinstance(sample, DistTensorData):
                raise DataError(
                    f"sample {index} of the batch is a {type(sample).__name__}; sample 0 is a DistTensorData. Wrap "
                    "all samples."
                )
            if sample.placement_idx != first.placement_idx or sample.sbp_list != first.sbp_list:
                raise DataError(
                    f"sample {index} of the batch has placement_idx={sample.placement_idx}, "
                    f"sbp_list={sample.sbp_list}; "
                    f"sample 0 has placement_idx={first.placement_idx}, sbp_list={first.sbp_list}. Give all samples "
                    "the same."
                )
            tensors.append(sample.tensor)
        return DistTensorData(stack_tensors(tensors), first.sbp_list, first.placement_idx)

    def pin_memory(self, device: object = None) -> "DistTensorData":
        """A copy in page-locked memory. Called by the loader; older loaders pass ``device``."""
        return DistTensorData(self.tensor.pin_memory(), self.sbp_list, self.placement_idx)


def pinned(batch: Any) -> Any:
    """The batch with its tensors copied to page-locked memory."""
    return rebuilt(lambda value: value.pin_memory() if hasattr(value, "pin_memory") else value, batch)


class Instance:
    """Named fields, in the order in which they were given, read and set as attributes.

    >>> sample = Instance(inputs=torch.zeros(3), labels=torch.tensor(1))
    >>> sample.labels
    tensor(1)
    >>> sample.has("weights"), len(sample)
    (False, 2)
    """

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def set(self, name: str, value: Any) -> None:
        """Set a field, new or not."""
        self.__dict__[name] = value

    def has(self, name: str) -> bool:
        """Whether there is such a field."""
        return name in self.__dict__

    def get(self, name: str) -> Any:
        """The field's value; AttributeError where there is none."""
        return self.__dict__[name] if name in self.__dict__ else self.__getattr__(name)

    def remove(self, name: str) -> None:
        """Delete a field; AttributeError where there is none."""
        self.get(name)
        del self.__dict__[name]

    def get_fields(self) -> dict[str, Any]:
        """All fields by name. The dictionary is the instance's own: changing it changes the instance."""
        return self.__dict__

    @staticmethod
    def stack(samples: Sequence["Instance"]) -> "Instance":
        """One batch from samples with equal fields.

        Tensors and `DistTensorData` get a new first dimension, lists and strings become a list of them, objects with
        a ``stack`` method use it, and ``torch.utils.data.default_collate`` collates anything else.

        Raises:
            DataError: the samples' fields, shapes or types differ.
        """
        names, rows = list(samples[0].__dict__), list[dict[str, Any]]()
        for index, sample in enumerate(samples):
            if sample.__dict__.keys() != samples[0].__dict__.keys():
                raise DataError(
                    f"data: sample {index} of the batch has the fields {sorted(sample.__dict__)}; sample 0 has "
                    f"{sorted(names)}. "
                    "All samples of a batch need the same fields."
                )
            rows.append(sample.__dict__)
        batch = Instance()
        for name in names:
            values = [*map(itemgetter(name), rows)]
            first = values[0]
            try:
                if isinstance(first, torch.Tensor):
                    batch.__dict__[name] = stack_tensors(values)
                elif isinstance(first, list | str):
                    batch.__dict__[name] = values
                elif hasattr(first, "stack"):
                    batch.__dict__[name] = type(first).stack(values)
                else:
                    batch.__dict__[name] = default_collate(values)
            except DataError as error:
                raise DataError(f"data: field {name!r}: {error}") from error
            except (RuntimeError, TypeError, ValueError, KeyError) as error:
                fault = difference(values, name) or f"field {name!r} cannot be batched: {error}"
                raise DataError(f"data: {fault}") from error
        return batch

    def pin_memory(self, device: object = None) -> "Instance":
        """A copy in page-locked memory, for asynchronous copies to an accelerator. Called by the loader."""
        batch: Instance = pinned(self)
        return batch

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Cannot find field {name!r} in this Instance; it has: {', '.join(self.__dict__) or 'no field'}."
        )

    def __len__(self) -> int:
        return len(self.__dict__)

    def __bool__(self) -> bool:
        return True  # without this, an Instance without fields would be false

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError("An Instance cannot be iterated. Use its get_fields().items().")

    def __repr__(self) -> str:
        return f"Instance({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


def stack_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors of equal shapes and types; in a worker process directly into shared memory."""
    try:
        batch: torch.Tensor = default_collate(list(tensors))
    except (RuntimeError, TypeError) as error:
        raise DataError(difference(tensors) or str(error)) from error
    if batch.dtype != tensors[0].dtype:  # torch promotes int to float, but only outside of worker processes
        raise DataError(difference(tensors) or "the types differ")
    return batch

"""Batches of any type as values: joined, permuted, fingerprinted."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.data.batch import is_label
from trainwright.data.instance import Instance
from trainwright.inspect.check.finding import Skipped


def joined(batches: Sequence[Any]) -> Any:
    """One batch with the samples of several.

    Raises:
        Skipped: their tensors differ in another dimension than the first.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        if first.dim() == 0 or any(one.shape[1:] != first.shape[1:] for one in batches):
            raise Skipped("the batches have tensors that cannot be joined")
        return torch.cat(list(batches))
    if isinstance(first, Instance):
        whole = copy.copy(first)
        vars(whole).update({name: joined([vars(one)[name] for one in batches]) for name in vars(first)})
        return whole
    if isinstance(first, Mapping):
        return {name: joined([one[name] for one in batches]) for name in first}
    if isinstance(first, tuple | list) and any(isinstance(one, Tensor | Mapping) for one in first):
        if isinstance(first, list) and isinstance(first[0], Mapping):  # a list of samples
            return [sample for one in batches for sample in one]
        return type(first)([joined(parts) for parts in zip(*batches, strict=True)])
    if isinstance(first, list):
        return [part for one in batches for part in one]
    if all(one == first for one in batches):
        return first
    raise Skipped(f"batches with {type(first).__name__} cannot be joined")


def with_permuted_labels(batch: Any, generator: torch.Generator) -> Any | None:
    """A prepared batch whose samples have the labels of others; None if it has no tensor of labels."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        if not _is_column(batch[1]):
            return None
        return [batch[0], _permuted(batch[1], generator)]
    if not isinstance(batch, Mapping):
        return None
    names = [name for name, value in batch.items() if is_label(str(name)) and _is_column(value)]
    if not names or len({len(batch[name]) for name in names}) > 1:
        return None
    order = torch.randperm(len(batch[names[0]]), generator=generator)
    return {name: value[order.to(value.device)] if name in names else value for name, value in batch.items()}


def labels_are_inputs(batch: Any) -> bool:
    """Whether the labels are the inputs themselves, as those of language models."""
    parts = list(batch.items()) if isinstance(batch, Mapping) else list(enumerate(batch))
    labels = [value for name, value in parts if is_label(str(name)) or name == 1]
    others = [value for name, value in parts if not (is_label(str(name)) or name == 1)]
    tensors = [(a, b) for a in labels for b in others if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return any(a.shape == b.shape and float((a == b).float().mean()) > 0.5 for a, b in tensors)


def _is_column(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) > 1


def _permuted(labels: Tensor, generator: torch.Generator) -> Tensor:
    return labels[torch.randperm(len(labels), generator=generator).to(labels.device)]


def fingerprint(value: Any) -> bytes:
    """A hash of the content of a sample or a batch: tensors, arrays, images, text, numbers, and containers of them.

    Raises:
        Skipped: it contains something else.
    """
    digest = hashlib.blake2b(digest_size=16)
    _update(digest, value)
    return digest.digest()


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"{value.shape}{value.dtype}".encode() + value.tobytes())
    elif isinstance(value, str | bytes | int | float | complex | bool | None):
        digest.update(repr(value).encode())
    elif isinstance(value, Instance):
        _update(digest, vars(value))
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            _update(digest, str(name))
            _update(digest, value[name])
    elif isinstance(value, tuple | list):
        for part in value:
            _update(digest, part)
    elif hasattr(value, "tobytes"):  # an image
        digest.update(value.tobytes())
    elif hasattr(value, "tensor"):  # a DistTensorData
        _update(digest, value.tensor)
    else:
        raise Skipped(f"samples with {type(value).__name__} cannot be compared")

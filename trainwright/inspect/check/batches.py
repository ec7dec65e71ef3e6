"""Batches of any type as values: joined, permuted, fingerprinted."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.base.batch import fields, label_tensors, leaves, like
from trainwright.data.instance import Instance
from trainwright.inspect.check.finding import Skipped


def joined(batches: Sequence[Any]) -> Any:
    """One batch with the samples of several; values without samples are those of the first.

    Raises:
        Skipped: their tensors differ in another dimension than the first, or values without samples differ.
    """
    first = batches[0]
    if (named := fields(first)) is not None:
        found = {name: joined([(fields(one) or {})[name] for one in batches]) for name in named}
        return Instance(**found) if isinstance(first, Instance) else found
    if isinstance(first, Tensor):
        if first.dim() == 0 or any(one.shape[1:] != first.shape[1:] for one in batches):
            raise Skipped("the batches have tensors that cannot be joined")
        return torch.cat(list(batches))
    if isinstance(first, tuple) or (isinstance(first, list) and any(isinstance(one, Tensor) for one in first)):
        return like(first, [joined(parts) for parts in zip(*batches, strict=True)])
    if isinstance(first, list):
        return [part for one in batches for part in one]
    if all(one == first for one in batches):
        return first
    raise Skipped(f"batches with {type(first).__name__} cannot be joined")


def with_permuted_labels(batch: Any, generator: torch.Generator) -> Any | None:
    """A prepared batch whose samples have the labels of others; None if it has no tensor of labels."""
    labels = {name: one for name, one in label_tensors(batch).items() if one.dim() > 0 and len(one) > 1}
    if len({len(one) for one in labels.values()}) != 1:
        return None
    order = torch.randperm(len(next(iter(labels.values()))), generator=generator)
    permuted = {name: one[order.to(one.device)] for name, one in labels.items()}
    named = fields(batch)
    return [batch[0], permuted[1]] if named is None else {**named, **permuted}


def inputs_and_labels(batch: Any) -> dict[str, list[Tensor]]:
    """The tensors of inputs, if the inputs are nothing else, and of labels with a number for each sample."""
    labels = label_tensors(batch)
    rest = [one for one in leaves(batch) if not any(one is label for label in labels.values())]
    is_plain = all(isinstance(one, Tensor) and one.dim() > 0 for one in rest)
    return {"inputs": rest if is_plain else [], "labels": [one for one in labels.values() if one.dim() == 1]}


def same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    return first.shape == second.shape and bool(((first == second) | ((first != first) & (second != second))).all())


def labels_are_inputs(batch: Any) -> bool:
    """Whether the labels are the inputs themselves, as those of language models."""
    labels, named = label_tensors(batch), fields(batch)
    items = enumerate(batch) if named is None else named.items()
    others = [value for name, value in items if name not in labels and isinstance(value, Tensor)]
    pairs = [(a, b) for a in labels.values() for b in others if a.shape == b.shape]
    return any(float((a == b).float().mean()) > 0.5 for a, b in pairs)


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
    elif (named := fields(value)) is not None:
        for name in sorted(named, key=str):
            _update(digest, str(name))
            _update(digest, named[name])
    elif isinstance(value, tuple | list):
        for part in value:
            _update(digest, part)
    elif hasattr(value, "tobytes"):  # an image
        digest.update(value.tobytes())
    elif hasattr(value, "tensor"):  # a DistTensorData
        _update(digest, value.tensor)
    else:
        raise Skipped(f"samples with {type(value).__name__} cannot be compared")

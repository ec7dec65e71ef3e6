"""Nested batches taken apart into their leaves, and put together again."""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from trainwright._torch_compat.probing import is_usable


def flatten(batch: Any) -> tuple[list[Any], Any]:
    """The leaves of a batch and its structure. Where the public way is taken, the batch is one leaf."""
    tree = _pytree()
    if tree is None:
        return [batch], None
    leaves, structure = tree.tree_flatten(batch)
    return leaves, structure


def unflatten(leaves: Iterable[Any], structure: Any) -> Any:
    """The inverse of `flatten`."""
    tree = _pytree()
    return next(iter(leaves)) if tree is None else tree.tree_unflatten(leaves, structure)


def probe(tree: Any) -> None:
    """Take a batch apart and put it together."""
    batch = {"a": [1, (2, None)], "b": "text"}
    leaves, structure = tree.tree_flatten(batch)
    assert tree.tree_unflatten(leaves, structure) == batch, "a batch is another one after it was put together"
    assert structure == tree.tree_flatten(batch)[1], "equal batches have different structures"
    assert structure != tree.tree_flatten({"a": 1})[1], "different batches have equal structures"


@functools.cache
def _pytree() -> Any:
    found: list[Any] = []

    def find() -> None:
        probe(torch.utils._pytree)
        found.append(torch.utils._pytree)

    return found[0] if is_usable("nested batches in graph mode", find) else None

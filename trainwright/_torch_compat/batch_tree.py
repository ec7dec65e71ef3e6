"""Flatten nested batches into their leaves, and restore them."""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from trainwright._torch_compat.probing import probed


def flatten(batch: Any) -> tuple[list[Any], Any]:
    """The leaves of a batch and its structure. If the private part is not usable, the batch is one leaf."""
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
    """Flatten and restore a batch."""
    batch = {"a": [1, (2, None)], "b": "text"}
    leaves, structure = tree.tree_flatten(batch)
    assert tree.tree_unflatten(leaves, structure) == batch, "a restored batch differs"
    assert structure == tree.tree_flatten(batch)[1], "equal batches have different structures"
    assert structure != tree.tree_flatten({"a": 1})[1], "different batches have equal structures"


@functools.cache
def _pytree() -> Any:
    return probed("nested batches in graph mode", lambda: torch.utils._pytree, probe, None)

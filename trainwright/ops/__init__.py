"""Operators: models that are used with one call, and trained with one more."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.ops import image_embedding
    from trainwright.ops.operator import NNOperator

__all__ = ["NNOperator", "image_embedding"]


def __getattr__(name: str) -> object:  # torch is imported with the first operator, not with this room's name
    import importlib

    if name == "NNOperator":
        return importlib.import_module("trainwright.ops.operator").NNOperator
    if name == "image_embedding":
        return importlib.import_module("trainwright.ops.image_embedding")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. There are: {', '.join(__all__)}.")

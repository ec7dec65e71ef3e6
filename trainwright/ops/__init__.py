"""Operators: models that are called with one line and trained with another."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.ops import image_embedding
    from trainwright.ops.operator import NNOperator

__all__ = ["NNOperator", "image_embedding"]


def __getattr__(name: str) -> object:  # torch is imported with the first operator
    import importlib

    if name == "NNOperator":
        return importlib.import_module("trainwright.ops.operator").NNOperator
    if name == "image_embedding":
        return importlib.import_module("trainwright.ops.image_embedding")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Allowed: {', '.join(__all__)}.")

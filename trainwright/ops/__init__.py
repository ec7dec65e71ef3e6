"""Operators: models that are called with one line and trained with another."""

from typing import TYPE_CHECKING

from trainwright.base.lazy_names import declared_names

if TYPE_CHECKING:
    from trainwright.ops import image_embedding as image_embedding
    from trainwright.ops.operator import NNOperator as NNOperator

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __all__, __getattr__ = declared_names(__name__)

"""Operators: models that are called with one line and trained with another."""

from typing import TYPE_CHECKING

from trainwright.lazy_names import on_first_use

if TYPE_CHECKING:
    from trainwright.ops import image_embedding as image_embedding
    from trainwright.ops.operator import NNOperator as NNOperator

__all__ = ["NNOperator", "image_embedding"]
__getattr__ = on_first_use(__name__, {"operator": "NNOperator", "image_embedding": "image_embedding"})

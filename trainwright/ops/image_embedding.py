"""Operators that turn images into vectors.

C channels, H and W height and width in pixels, D features.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainwright.base.errors import ConfigError, did_you_mean, import_optional
from trainwright.models.eval_mode import evaluation_mode
from trainwright.ops.operator import NNOperator


class timm:  # noqa: N801  # Towhee's spelling: ops.image_embedding.timm(...)
    """Description of an operator around a timm image model; ``get_op()`` builds it.

    Args:
        model_name: see ``timm.list_models()``.
        num_classes: outputs of the trained classifier; None: the model's own. The embedding does not use it.
        options: further arguments of ``timm.create_model``, such as ``pretrained=True``.
    """

    def __init__(self, model_name: str, num_classes: int | None = None, **options: Any) -> None:
        self._arguments = {"model_name": model_name, "num_classes": num_classes, **options}

    def __repr__(self) -> str:
        return f"timm({', '.join(f'{name}={value!r}' for name, value in self._arguments.items())})"

    def get_op(self) -> "TimmEmbedding":
        """The operator, with its model."""
        return TimmEmbedding(**self._arguments)

    def __call__(self, image: Any) -> "np.ndarray[Any, Any]":
        """The embedding of one image, by an operator built for this call."""
        return self.get_op()(image)


class TimmEmbedding(NNOperator):
    """``op(image)`` returns the image's embedding: a float32 vector (D,), the input of the classifier.

    An image is a path, a Pillow image, an array (H, W, C) of uint8, or a tensor (C, H, W) that is preprocessed already.
    """

    def __init__(self, model_name: str, num_classes: int | None = None, **options: Any) -> None:
        super().__init__()
        self.model = _create(model_name, {**options, **({} if num_classes is None else {"num_classes": num_classes})})
        self.model_name = model_name
        self._transform: Callable[[Any], Tensor] | None = None

    def __call__(self, image: Any) -> "np.ndarray[Any, Any]":
        model: Any = self.model
        parameter = next(model.parameters())
        image_CHW = image if isinstance(image, Tensor) else self.transform(_opened(image))
        with evaluation_mode(model):
            features = model.forward_features(image_CHW.unsqueeze(0).to(parameter.device, parameter.dtype))
            embedding: Tensor = model.forward_head(features, pre_logits=True)
        return embedding[0].float().cpu().numpy()

    @property
    def transform(self) -> Callable[[Any], Tensor]:
        """The preprocessing of a Pillow image that the model expects: size, crop, normalization."""
        if self._transform is None:
            data: Any = importlib.import_module("timm.data")  # untyped
            settings = data.resolve_model_data_config(self.model)
            self._transform = data.create_transform(**settings, is_training=False)
        assert self._transform is not None
        return self._transform


def _create(model_name: str, options: dict[str, Any]) -> nn.Module:
    timm = import_optional("timm", "This operator needs timm: pip install timm.")
    if not timm.is_model(model_name.split(".")[0]):
        raise ConfigError(
            f"ops.image_embedding.timm: got {model_name!r}. {did_you_mean(model_name, timm.list_models())}"
        )
    model: nn.Module = timm.create_model(model_name, **options)
    return model


def _opened(image: Any) -> Any:
    from PIL import Image

    if isinstance(image, str | Path):
        with Image.open(image) as file:
            return file.convert("RGB")
    if isinstance(image, np.ndarray):
        return Image.fromarray(image).convert("RGB")
    return image.convert("RGB")


__all__ = ["TimmEmbedding", "timm"]

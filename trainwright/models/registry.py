"""Models by the name in their config, so that a folder can say what is in it."""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from trainwright.data.registry import Registry
from trainwright.models.config import ModelConfig

if TYPE_CHECKING:
    from trainwright.models.model import Model

M = TypeVar("M", bound="type[Model]")

_registry: "Registry[Model]" = Registry("model", ModelConfig)

# Where our own models are defined: imported when one is asked for.
_OWN = {
    "crnn_image2text": "crnn",
    "bert": "bert",
    "bert_text_classification": "bert_tasks",
    "bert_sequence_labeling": "bert_tasks",
    "ctc_speech_recognition": "speech",
    "gpt_text_generation": "gpt",
}


def register_model(name: str, config_class: type[ModelConfig]) -> Callable[[M], M]:
    """Class decorator: ``Model.load`` and `build_model` find the class by ``name``, which is its config's too.

    Defining a class again, as a notebook does, replaces it.

    Raises:
        ConfigError, ConfigTypeError: the config class is none, has another name, or another model has this one.
    """
    return _registry.decorator(name, config_class)


def find_model(name: str, where: str = "build_model") -> "type[Model]":
    """The class registered under ``name``.

    Raises:
        ConfigKeyError: there is none; tells the nearest name.
    """
    # All of ours for an unknown name, so that the nearest one is found.
    for module in {_OWN[name]} if name in _OWN else set(_OWN.values()):
        importlib.import_module(f"trainwright.models.{module}")
    return _registry.find(name, where)


def build_model(name: str, config: ModelConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> "Model":
    """A new model of the class registered under ``name``; ``kwargs`` set fields of its config.

    Raises:
        ConfigKeyError: no such model, or no such field. ConfigTypeError: the config is another model's.
    """
    model_class = find_model(name)
    if isinstance(config, ModelConfig):
        return model_class(config, **kwargs)
    return model_class(model_class.config_class.from_dict({**(config or {}), **kwargs}))

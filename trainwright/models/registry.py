"""Models by the name in their config, so that a folder can say what is in it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from trainwright.data.registry import Registry
from trainwright.models.config import ModelConfig

if TYPE_CHECKING:
    from trainwright.models.model import Model

M = TypeVar("M", bound="type[Model]")

_OWN = {
    "crnn_image2text": "trainwright.models.crnn",
    "bert": "trainwright.models.bert",
    "bert_text_classification": "trainwright.models.bert",
    "bert_sequence_labeling": "trainwright.models.bert",
    "ctc_speech_recognition": "trainwright.models.speech",
    "gpt_text_generation": "trainwright.models.gpt",
}
_registry: "Registry[Model]" = Registry("model", ModelConfig, _OWN)


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

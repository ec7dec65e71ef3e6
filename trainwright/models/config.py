"""Model configs: dataclasses that are saved beside the weights as ``model_config.yaml``, and checks of their fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.config.yaml_config import YamlConfig, check_fields

CONFIG_NAME = "model_config.yaml"


@dataclass
class ModelConfig(YamlConfig):
    """Base of model configs: a dataclass with a class attribute ``name``, the name its model is registered under.

    >>> @dataclass
    ... class TinyConfig(ModelConfig):
    ...     name = "tiny"
    ...     width: int = 8
    >>> print(TinyConfig(width=4).to_yaml(), end="")
    name: tiny
    config_type: model
    width: 4
    """

    name: ClassVar[str] = ""
    config_type: ClassVar[str] = "model"
    filename: ClassVar[str] = CONFIG_NAME


def checked_labels(value: Any, where: str) -> dict[int, str]:
    """``id2label`` as a dict with the ids 0, 1, ..., from a mapping (its keys may be text) or a list."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        pairs = list(enumerate(value))
    else:
        raise ConfigTypeError(
            f"{where}.id2label: got {value!r}; it must map ids from 0 on to texts, such as {{0: 'no', 1: 'yes'}} "
            "(a dataset has it in dataset.config.id2label)."
        )
    try:
        labels = {int(key): str(text) for key, text in pairs}
    except (TypeError, ValueError):
        raise ConfigTypeError(
            f"{where}.id2label: its keys are the ids, whole numbers; got {[key for key, _ in pairs][:5]!r}."
        ) from None
    if not labels or set(labels) != set(range(len(labels))):
        gap = next(i for i in range(len(labels) + 1) if i not in labels)
        raise ConfigError(
            f"{where}.id2label: the ids are 0 to {max(len(labels) - 1, 0)} without a gap; {gap} is missing."
        )
    return dict(sorted(labels.items()))


def checked_characters(value: Any, silent_id: int, field: str, where: str) -> dict[int, str]:
    """``id2label`` of a model whose texts leave out one id (CTC's blank, padding). ``field`` is the name of that id."""
    labels = checked_labels(value, where)
    if silent_id not in labels:
        raise ConfigError(f"{where}.{field}: got {silent_id}; it must be an id of id2label, 0 to {len(labels) - 1}.")
    if len(labels[silent_id]) == 1:
        raise ConfigError(
            f"{where}.id2label: id {silent_id} is {field}, which is left out of texts, and stands for the character "
            f"{labels[silent_id]!r} here. Give it the text '' and move the characters up by one."
        )
    return labels


def check_share(config: YamlConfig, *names: str) -> None:
    """Raise ConfigError unless these fields are numbers in [0, 1), as a dropout probability is."""
    check_fields(config, names, lambda value: 0 <= value < 1, "a number in [0, 1)")


def check_heads(config: ModelConfig) -> None:
    """Raise ConfigError if the heads do not share the hidden features evenly."""
    size, heads = config["hidden_size"], config["num_attention_heads"]
    if size % heads:
        raise ConfigError(
            f"{type(config).__name__}: hidden_size {size} is not a multiple of num_attention_heads {heads}."
        )


def check_length(length: int, limit: int) -> None:
    """Raise ConfigError if a text has more tokens than the model has positions."""
    if length > limit:
        raise ConfigError(
            f"token_ids: a text has {length} tokens, the model has positions for {limit} (max_position_embeddings). "
            "Give the dataset or the tokenizer a max_length."
        )

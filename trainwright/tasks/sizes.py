"""Checks of the sizes of the reference models."""

from trainwright.base.errors import ConfigError
from trainwright.config.yaml_config import YamlConfig, check_fields
from trainwright.models.config import ModelConfig


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

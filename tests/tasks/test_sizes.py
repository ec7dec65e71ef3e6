"""Configs of models: labels and sizes are checked, whatever the model."""

from dataclasses import dataclass, field

import pytest

from trainwright.config.errors import ConfigError
from trainwright.config.yaml_config import check_positive
from trainwright.models import ModelConfig
from trainwright.tasks.sizes import check_share


@dataclass
class Sizes(ModelConfig):
    name = "sizes_of_a_test"
    hidden_size: int = 8
    num_attention_heads: int = 4
    dropout: float = 0.0
    labels: dict[int, str] = field(default_factory=dict)


def test_all_wrong_sizes_are_in_one_message() -> None:
    check_positive(Sizes(), "hidden_size", "num_attention_heads")
    check_share(Sizes(dropout=0.99), "dropout")
    with pytest.raises(ConfigError) as caught:
        check_positive(Sizes(hidden_size=0, num_attention_heads=-1), "hidden_size", "num_attention_heads")
    assert str(caught.value).splitlines() == [
        "Sizes.hidden_size: got 0; it must be a whole number >= 1.",
        "Sizes.num_attention_heads: got -1; it must be a whole number >= 1.",
    ]
    with pytest.raises(ConfigError, match=r"Sizes\.dropout: got 1\.0; it must be a number in \[0, 1\)"):
        check_share(Sizes(dropout=1.0), "dropout")

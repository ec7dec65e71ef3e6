"""Models by the name in their config."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright.config.errors import ConfigError, ConfigKeyError, ConfigTypeError
from trainwright.models import Model, ModelConfig, build_model, register_model
from trainwright.models.model import _OWN, find_model


def make(name: str, config_name: str | None = None) -> type[Model]:
    @dataclass
    class Config(ModelConfig):
        width: int = 2

    Config.name = config_name or name

    @register_model(name, config_class=Config)
    class Made(Model):
        def __init__(self, config: Any, **kwargs: Any) -> None:
            super().__init__(config, **kwargs)
            self.linear = nn.Linear(self.config.width, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.linear(x)}

    return Made


@pytest.mark.parametrize("name", _OWN)
def test_each_model_of_ours_is_registered_under_its_name(name: str) -> None:
    model_class = find_model(name)
    assert model_class.config_class.name == name


def test_a_model_is_built_by_name_from_nothing_a_mapping_or_a_config() -> None:
    made = make("registry_built")
    assert build_model("registry_built").config.width == 2
    assert build_model("registry_built", {"width": 3}, width=4).linear.in_features == 4
    config = made.config_class(width=5)
    model = build_model("registry_built", config, width=6)
    assert isinstance(model, made)
    assert (model.config.width, config.width) == (6, 5)
    assert model(torch.ones(1, 6))["logits"].shape == (1, 1)


def test_an_unknown_name_tells_the_nearest() -> None:
    with pytest.raises(
        ConfigKeyError, match=r"no model is registered as 'crnn_image2txt'. Did you mean 'crnn_image2text'"
    ):
        build_model("crnn_image2txt")


def test_the_config_of_another_model_is_refused() -> None:
    make("registry_first")
    with pytest.raises(ConfigTypeError, match="config: got BertConfig"):
        build_model("registry_first", find_model("bert").config_class())


def test_a_class_that_is_defined_again_replaces_the_first() -> None:
    make("registry_again")
    second = make("registry_again")
    assert find_model("registry_again") is second


def test_a_name_that_another_class_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="BertTextClassification has this name"):
        register_model("bert_text_classification", find_model("bert_text_classification").config_class)(
            make("registry_other")
        )


def test_a_config_with_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="write `name = 'registry_x'`"):
        make("registry_x", "registry_y")
    with pytest.raises(ConfigTypeError, match="subclass of ModelConfig"):
        register_model("registry_x", config_class=dict)  # type: ignore[arg-type]

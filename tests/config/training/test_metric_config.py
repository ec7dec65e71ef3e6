"""MetricConfig: a metric's name, what is done with its results, and what the metric itself is given."""

import copy
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from trainwright.config import ConfigError, MetricConfig


def test_defaults_and_arguments_of_the_metric() -> None:
    config = MetricConfig("Accuracy", top_k=5, n_decimals=2)
    assert (config.name, config.objective, config.output_keys, config.n_decimals) == ("Accuracy", None, None, 2)
    assert config.arguments == {"top_k": 5}
    assert config == MetricConfig(name="Accuracy", top_k=5, n_decimals=2) == MetricConfig(**config.to_dict())
    assert config == MetricConfig(name_="Accuracy", top_k=5, n_decimals=2)
    assert config != MetricConfig("Accuracy")


@pytest.mark.parametrize(
    "config",
    [MetricConfig("cer"), MetricConfig("rouge", objective="maximize", output_keys=["rouge1"], languages=["fa", "en"])],
)
def test_it_shows_how_to_make_it_again(config: MetricConfig) -> None:
    for again in (eval(repr(config)), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert again == config
        assert again.arguments == config.arguments


def test_it_cannot_be_changed() -> None:
    config = MetricConfig("rouge", output_keys=["rouge1"])
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "bleu"
    with pytest.raises(ConfigError):
        config.output_keys.append("rouge2")


def test_every_fault_is_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        MetricConfig("cer", objective="up", n_decimals=-1, output_keys="cer")
    assert str(caught.value).splitlines() == [
        "MetricConfig.objective: got 'up' (str); it must be 'maximize', 'minimize' or None.",
        "MetricConfig.output_keys: got 'cer' (str); it must be a list of names, or None. Write ['cer'].",
        "MetricConfig.n_decimals: got -1 (int); it must be a whole number >= 0.",
    ]


@pytest.mark.parametrize("values", [{}, {"nmae": "cer"}, {"name": 3}, {"name": ""}])
def test_it_has_a_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"MetricConfig\.name"):
        MetricConfig(**values)

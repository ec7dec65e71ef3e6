"""Configs of models: labels and sizes are checked, whatever the model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.config.yaml_config import check_positive
from trainwright.models import ModelConfig
from trainwright.tasks.labels import characters_of_model, labels_of_model
from trainwright.tasks.sizes import check_heads, check_length, check_share


@dataclass
class Sizes(ModelConfig):
    name = "sizes_of_a_test"
    hidden_size: int = 8
    num_attention_heads: int = 4
    dropout: float = 0.0
    labels: dict[int, str] = field(default_factory=dict)


@pytest.mark.parametrize("labels", [["no", "yes"], {0: "no", 1: "yes"}, {"1": "yes", "0": "no"}, ("no", "yes")])
def test_labels_may_be_a_list_or_have_text_for_ids(labels: Any) -> None:
    assert list(labels_of_model(labels, "Here").items()) == [(0, "no"), (1, "yes")]


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (None, ConfigTypeError, r"Here\.id2label: got None; it must map"),
        ("ab", ConfigTypeError, "got 'ab'; it must map"),
        ({"x": "a"}, ConfigTypeError, "got .*'x'.*whole numbers"),
        ({}, ConfigError, "0 is missing"),
        ({0: "a", 2: "b"}, ConfigError, "without a gap; 1 is missing"),
    ],
)
def test_other_labels_are_refused(labels: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        labels_of_model(labels, "Here")


def test_the_id_that_is_left_out_of_texts_stands_for_no_character() -> None:
    assert characters_of_model(["", "a"], 0, "blank_id", "Here") == {0: "", 1: "a"}
    assert characters_of_model(["<pad>", "a"], 0, "pad_id", "Here") == {0: "<pad>", 1: "a"}
    with pytest.raises(ConfigError, match=r"id 1 is blank_id, which is left out of texts.*'a'"):
        characters_of_model(["", "a"], 1, "blank_id", "Here")
    with pytest.raises(ConfigError, match=r"Here\.blank_id: got 7; it must be an id of id2label, 0 to 1"):
        characters_of_model(["", "a"], 7, "blank_id", "Here")


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


def test_heads_share_the_features_evenly_and_texts_fit_the_positions() -> None:
    check_heads(Sizes())
    check_length(8, 8)
    with pytest.raises(ConfigError, match="hidden_size 10 is not a multiple of num_attention_heads 4"):
        check_heads(Sizes(hidden_size=10))
    with pytest.raises(ConfigError, match="a text has 9 tokens, the model has positions for 8"):
        check_length(9, 8)


def test_a_config_is_saved_with_its_name_and_loaded(tmp_path: Path) -> None:
    Sizes(hidden_size=12).save(tmp_path)
    text = (tmp_path / "model_config.yaml").read_text()
    assert "name: sizes_of_a_test" in text
    assert Sizes.load(tmp_path) == Sizes(hidden_size=12)

"""Configs of models, data sets and preprocessors: what cannot be is refused when they are made."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.config.yaml_config import check_positive
from trainwright.data import (
    AudioFeatureExtractorConfig,
    ImageProcessorConfig,
    OCRDatasetConfig,
    TextGenerationDatasetConfig,
    TextNormalizerConfig,
    TextTokenizerConfig,
)
from trainwright.models import BertConfig, CRNNImage2TextConfig, GPTTextGenerationConfig, ModelConfig
from trainwright.tasks.sizes import check_share


@dataclass
class Sizes(ModelConfig):
    name = "sizes_of_a_test"
    hidden_size: int = 8
    num_attention_heads: int = 4
    dropout: float = 0.0
    labels: dict[int, str] = field(default_factory=dict)


BERT = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
CRNN = {"id2label": ["", "1", "2", "3", "A"], "channels": (4, 8, 8, 8, 12, 12, 12)}


@pytest.mark.parametrize(
    ("make", "fields", "match"),
    [
        (AudioFeatureExtractorConfig, {"sampling_rate": 0}, "sampling_rate: got 0"),
        (AudioFeatureExtractorConfig, {"features": "mfcc"}, "features: got 'mfcc'"),
        (AudioFeatureExtractorConfig, {"n_fft": 64}, "filters fall between"),
        (AudioFeatureExtractorConfig, {"n_mels": 2.5}, "of type int"),
        (BertConfig, BERT | {"hidden_size": 10}, "hidden_size 10 is not a multiple of num_attention_heads 4"),
        (BertConfig, BERT | {"hidden_act": "swish"}, "hidden_act: got 'swish'; allowed: gelu, relu"),
        (BertConfig, BERT | {"num_hidden_layers": 0}, "num_hidden_layers: got 0"),
        (BertConfig, BERT | {"hidden_dropout_prob": 1.5}, "hidden_dropout_prob: got 1.5"),
        (CRNNImage2TextConfig, CRNN | {"id2label": None}, "id2label: got None; it must map"),
        (CRNNImage2TextConfig, CRNN | {"id2label": {0: "", 2: "b"}}, "1 is missing"),
        (CRNNImage2TextConfig, CRNN | {"id2label": {0: "a", 1: "b"}}, "id 0 is blank_id.*'a'"),
        (CRNNImage2TextConfig, CRNN | {"id2label": {"x": ""}}, "id2label: got .*must map whole numbers"),
        (CRNNImage2TextConfig, CRNN | {"id2label": {}}, "0 is missing"),
        (CRNNImage2TextConfig, CRNN | {"blank_id": 7}, "blank_id: got 7"),
        (CRNNImage2TextConfig, CRNN | {"channels": (1, 2)}, "channels: got .* 7 whole numbers"),
        (CRNNImage2TextConfig, CRNN | {"batch_norm_blocks": (9,)}, "batch_norm_blocks"),
        (CRNNImage2TextConfig, CRNN | {"map2seq_in_dim": 13}, "multiple of the last of channels, 12"),
        (CRNNImage2TextConfig, CRNN | {"image_height": 8}, "image_height: got 8"),
        (CRNNImage2TextConfig, CRNN | {"rnn_dim": 0}, "rnn_dim: got 0"),
        (CRNNImage2TextConfig, CRNN | {"dropout": 1.0}, "dropout: got 1.0"),
        (GPTTextGenerationConfig, {}, "vocab_size: got None"),
        (GPTTextGenerationConfig, {"id2label": ["a", "b"]}, "id 0 is pad_token_id"),
        (ImageProcessorConfig, {"size": 32}, r"size: got 32; it must be \(width, height\)"),
        (ImageProcessorConfig, {"size": (32, 0)}, "size"),
        (ImageProcessorConfig, {"size": (1.5, 2)}, "size"),
        (ImageProcessorConfig, {"resample": "bilinar"}, "mean 'bilinear'"),
        (ImageProcessorConfig, {"mean": [0.1, 0.2]}, "a list of 3, one per channel"),
        (ImageProcessorConfig, {"mean": [0.1] * 3, "gray_scale": True}, "a list of 1, one per channel"),
        (ImageProcessorConfig, {"std": 0.0}, "a number > 0"),
        (ImageProcessorConfig, {"mean": "x"}, "mean: got 'x'"),
        (ImageProcessorConfig, {"gray_scale": "no"}, "of type bool"),
        (OCRDatasetConfig, {"max_length": 0}, r"OCRDatasetConfig\.max_length: got 0"),
        (OCRDatasetConfig, {"text_split_type": "word"}, "char_split or tokenize"),
        (OCRDatasetConfig, {"id2label": ["", "a", "a"]}, "'a' occurs twice"),
        (TextGenerationDatasetConfig, {"block_size": 0}, "block_size: got 0"),
        (TextNormalizerConfig, {"form": "NFX"}, "form: got 'NFX'"),
        (TextNormalizerConfig, {"replace_patterns": [["(", ""]]}, r"replace_patterns: got \['\(', ''\]"),
        (TextNormalizerConfig, {"replace_patterns": ["a"]}, "replace_patterns: got 'a'"),
        (TextTokenizerConfig, {"level": "letter"}, "level: got 'letter'"),
        (TextTokenizerConfig, {"max_length": 0}, "max_length: got 0"),
        *((OCRDatasetConfig, {"max_size": n}, "max_size: got") for n in (0, -1, 0.0, 1.5, "3", True, math.nan)),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[..., Any], fields: dict[str, Any], match: str) -> None:
    with pytest.raises((ConfigError, ConfigTypeError), match=match):
        make(**fields)


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

"""BERT by transformers: its names, its outputs, its heads for texts and for tokens."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.base.errors import ConfigError, ConfigTypeError, UserError
from trainwright.models import (
    Bert,
    BertConfig,
    BertSequenceLabeling,
    BertSequenceLabelingConfig,
    BertTextClassification,
    BertTextClassificationConfig,
    Model,
)
from trainwright.tasks.tokenizer import TextTokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
}
TOKENS = torch.tensor([[5, 6, 7, 8, 9], [4, 3, 2, 0, 0], [9, 8, 7, 6, 0], [11, 12, 13, 14, 15]])
MASK = (TOKENS != 0).long()


@pytest.fixture
def classifier() -> BertTextClassification:
    torch.manual_seed(0)
    config = BertTextClassificationConfig(id2label={0: "negative", 1: "positive", 2: "neutral"}, **SMALL)
    return BertTextClassification(config)


@pytest.fixture
def labeler() -> BertSequenceLabeling:
    torch.manual_seed(0)
    return BertSequenceLabeling(BertSequenceLabelingConfig(id2label=["O", "B-X", "I-X"], **SMALL))


def test_names_and_outputs_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.BertModel(transformers.BertConfig(**SMALL)).eval()
    own = Bert(BertConfig(**SMALL))
    buffers = {"embeddings.position_ids", "embeddings.token_type_ids"}
    weights = {name: value for name, value in theirs.state_dict().items() if name not in buffers}
    own.bert.load_state_dict(weights, strict=True)
    outputs = own.predict({"token_ids": TOKENS, "attention_mask": MASK}, post_process=False)
    expected = theirs(input_ids=TOKENS, attention_mask=MASK)
    # Tolerance: two implementations of attention in single precision; hidden values are of the order of 1.
    real = MASK.bool()
    torch.testing.assert_close(outputs["hidden_states"][real], expected.last_hidden_state[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs["pooled"], expected.pooler_output, rtol=0, atol=1e-5)


def test_padding_changes_nothing(classifier: BertTextClassification) -> None:
    alone = classifier.predict({"token_ids": TOKENS[1:2, :3]}, post_process=False)["logits"]
    padded = classifier.predict({"token_ids": TOKENS, "attention_mask": MASK}, post_process=False)["logits"][1:2]
    torch.testing.assert_close(alone, padded, rtol=0, atol=1e-6)


def test_a_classifier_learns(classifier: BertTextClassification, learns: Callable[..., float]) -> None:
    batch = {"token_ids": TOKENS, "attention_mask": MASK, "labels": torch.tensor([0, 1, 2, 1])}
    assert learns(classifier, batch) < 0.1
    outputs = classifier.predict(batch)
    assert [out.label for out in outputs] == ["negative", "positive", "neutral", "positive"]
    assert all(0.5 < out["score"] <= 1 for out in outputs)


def test_a_text_is_classified_with_the_tokenizer(classifier: BertTextClassification, tmp_path: Path) -> None:
    classifier.preprocessor = TextTokenizer.train(["good bad so so"])
    one, two = classifier.predict(["good", "so so bad"])
    assert {one.label, two.label} <= {"negative", "positive", "neutral"}
    loaded = Model.load(classifier.save(tmp_path / "bert"))
    assert loaded.predict(["good", "so so bad"], max_length=12) == [one, two]
    assert loaded.predict(["good good"], max_length=3) == loaded.predict(["good"])
    # Ids of classes become their labels.
    ids = torch.tensor([2, 0, -100, 1])
    assert [out.label for out in classifier.post_process(ids)] == ["neutral", "negative", "positive"]
    assert classifier.post_process([1])[0].label == "positive"
    with pytest.raises(ConfigTypeError, match=r"shape \(3,\)"):
        classifier.post_process(torch.ones(3))


def test_a_labeler_learns_labels_of_tokens_that_count(
    labeler: BertSequenceLabeling, learns: Callable[..., float]
) -> None:
    labels = torch.tensor([[-100, 1, 2, 0, -100], [0, 1, 0, -100, -100], [1, 2, 2, 0, -100], [0, 0, 0, 1, 2]])
    batch = {"token_ids": TOKENS, "attention_mask": MASK, "labels": labels}
    assert learns(labeler, batch) < 0.1
    outputs = labeler.predict(batch)
    assert [len(out.labels) for out in outputs] == [5, 3, 4, 5]  # without padding
    assert outputs[3].labels == ["O", "O", "O", "B-X", "I-X"]
    assert [out.labels for out in labeler.post_process(labels)][:2] == [["B-X", "I-X", "O"], ["O", "B-X", "O"]]


def test_a_labeler_with_a_tokenizer_labels_what_somebody_has_written(labeler: BertSequenceLabeling) -> None:
    labeler.preprocessor = TextTokenizer.train(["good so bad"])
    assert [len(out.labels) for out in labeler.predict(["so good", "so so so bad"])] == [2, 4]
    batch = labeler.preprocess(["so good", "so so so bad"])
    logits = labeler.predict(batch, post_process=False)["logits"]
    inner = [[labeler.config.id2label[i] for i in row[1:-1].tolist()] for row in logits.argmax(dim=-1)]
    assert [out.labels for out in labeler.predict(batch)] == [inner[0][:2], inner[1]]


def test_settings_of_older_files_are_taken(tmp_path: Path) -> None:
    (tmp_path / "model_config.yaml").write_text(
        "name: bert_text_classification\nconfig_type: model\nposition_embedding_type: absolute\nuse_cache: true\n"
        "num_labels: 2\nid2label: {0: a, 1: b}\nhidden_size: 24\n"
    )
    assert BertTextClassificationConfig.load(tmp_path).hidden_size == 24


def test_a_text_with_more_tokens_than_positions_is_an_error(
    classifier: BertTextClassification, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"13 tokens, the model has positions for 12 .*max_length"):
        classifier(torch.ones(1, 13, dtype=torch.int64))
    # The package transformers is named where it is absent.
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"transformers: pip install transformers"):
        Bert(BertConfig(**SMALL))


def test_no_mask_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU each such read waits for all that was launched before it."""
    model = Bert(BertConfig(**SMALL))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: pytest.fail("a tensor was read on the host"))
    model(TOKENS, MASK)

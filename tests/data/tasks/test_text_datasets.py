"""Texts with labels, and tokens with labels, from files and through a tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.config.errors import ConfigError
from trainwright.data import (
    DataError,
    Dataset,
    PreprocessorsContainer,
    SequenceLabelingDataset,
    TextClassificationDataset,
    TextNormalizer,
    TextTokenizer,
)

TOKENIZER = TextTokenizer.train(["good bad day"], level="char")


@pytest.fixture
def reviews(tmp_path: Path, make: Callable) -> Path:
    make("csv", tmp_path / "train.csv", ["text", "label"], [["good day", "pos"], ["bad", "neg"], ["day", "pos"]])
    make("jsonl", tmp_path / "test.jsonl", [{"text": "bad day", "label": "neutral"}])
    return tmp_path


def test_texts_and_classes(reviews: Path) -> None:
    train = TextClassificationDataset.load(reviews, "train", TOKENIZER)
    assert train.config.id2label == {0: "neg", 1: "neutral", 2: "pos"}
    assert train[0] == {"token_ids": TOKENIZER.encode("good day"), "labels": 2}
    batch = train.data_collator([train[0], train[1]])
    assert batch["labels"].tolist() == [2, 0]
    assert batch["token_ids"][1].tolist() == [*TOKENIZER.encode("bad"), 0, 0, 0, 0, 0]
    assert batch["attention_mask"].sum(dim=1).tolist() == [10, 5]
    short = TextClassificationDataset.load(reviews, "train", TOKENIZER, max_length=4)
    assert len(short[0]["token_ids"]) == 4


def test_the_tokenizer_may_come_after_the_collator_is_taken(reviews: Path) -> None:
    dataset = Dataset.load(reviews, split="train")
    collator = dataset.data_collator
    with pytest.raises(ConfigError, match="TextClassificationDataset: needs a preprocessor with a tokenizer"):
        dataset[0]
    own_padding = TextTokenizer(TOKENIZER.config, TOKENIZER.vocabulary)
    own_padding.config.pad_token = "d"
    dataset.preprocessor = PreprocessorsContainer([own_padding, TextNormalizer(lowercase=True)])
    batch = collator([dataset[0], dataset[1]])
    assert batch["token_ids"][1, -1] == own_padding.pad_token_id == TOKENIZER.token_id("d")


def test_the_text_normalizer_comes_first(tmp_path: Path, make: Callable) -> None:
    make("csv", tmp_path / "train.csv", ["text", "label"], [["GO\u2003ＯＤ", 1], ["bad", 0]])
    plain = Dataset.load(tmp_path, "train", TOKENIZER)
    normal = Dataset.load(tmp_path, "train", PreprocessorsContainer([TOKENIZER, TextNormalizer(lowercase=True)]))
    assert TOKENIZER.decode(normal[0]["token_ids"]) == ["go od"]
    assert plain[0]["token_ids"] != normal[0]["token_ids"]


def test_classes_that_are_numbers(tmp_path: Path, make: Callable) -> None:
    make("csv", tmp_path / "train.csv", ["text", "label"], [["a", 10], ["b", 9], ["c", 2]])
    dataset = Dataset.load(tmp_path, "train", TOKENIZER)
    assert dataset.config.id2label == {0: "2", 1: "9", 2: "10"}
    assert [sample["labels"] for sample in dataset] == [2, 1, 0]
    named = Dataset.load(tmp_path, "train", TOKENIZER, id2label={2: "two", 9: "nine", 10: "ten"}, max_size=1)
    assert [sample["labels"] for sample in named] == [10]


def test_labels_may_be_the_ids_of_named_classes(tmp_path: Path, make: Callable) -> None:
    make("jsonl", tmp_path / "train.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": "neg"}])
    dataset = Dataset.load(tmp_path, "train", TOKENIZER, id2label=["neg", "pos"])
    assert [sample["labels"] for sample in dataset] == [1, 0]


def test_bad_rows_are_named(reviews: Path) -> None:
    with open(reviews / "train.csv", "a", encoding="utf-8") as file:
        file.write(" ,pos\nfine,posi\n")
    with pytest.raises(DataError) as caught:
        Dataset.load(reviews, "train", id2label=["neg", "pos"])
    assert "train.csv, line 5: the text is ' '" in str(caught.value)
    assert "train.csv, line 6: the label 'posi' is none of id2label. Did you mean 'pos'?" in str(caught.value)


@pytest.fixture
def tags(tmp_path: Path, make: Callable) -> Path:
    rows = [{"tokens": ["good", "x_1", "day"], "labels": ["O", "B-X", "I-X"]}, {"tokens": ["bad"], "labels": ["O"]}]
    make("jsonl", tmp_path / "train.jsonl", rows)
    return tmp_path


def test_tokens_and_labels(tags: Path) -> None:
    dataset = SequenceLabelingDataset.load(tags, "train", TOKENIZER)
    assert dataset.config.id2label == {0: "B-X", 1: "I-X", 2: "O"}
    assert dataset.config.is_iob_schema is True
    sample = dataset[0]
    assert len(sample["token_ids"]) == len(sample["labels"]) == 12
    assert sample["labels"] == [-100, 2, -100, -100, -100, 0, -100, -100, 1, -100, -100, -100]
    every = SequenceLabelingDataset.load(tags, "train", TOKENIZER, label_all_tokens=True)
    assert every[0]["labels"] == [-100, 2, 2, 2, 2, 0, 0, 0, 1, 1, 1, -100]
    words = SequenceLabelingDataset.load(tags, "train", TextTokenizer.train(["good x_1"], level="word"))
    assert words[0]["labels"] == [-100, 2, 0, 1, -100]  # a word that is unknown has its label all the same
    batch = dataset.data_collator([dataset[0], dataset[1]])
    assert batch["labels"][1].tolist() == [-100, 2, -100, -100, -100] + [-100] * 7


def test_a_cut_text_has_as_many_labels(tags: Path) -> None:
    sample = SequenceLabelingDataset.load(tags, "train", TOKENIZER, max_length=7)[0]
    assert sample["labels"] == [-100, 2, -100, -100, -100, 0, -100]
    assert len(sample["token_ids"]) == 7


def test_other_names_and_schemes(tmp_path: Path, make: Callable) -> None:
    make("jsonl", tmp_path / "train.jsonl", [{"words": ["a", "b"], "pos": ["NOUN", "VERB"]}])
    dataset = SequenceLabelingDataset.load(tmp_path, "train", TOKENIZER, tokens_field="words", tags_field="pos")
    assert dataset.config.is_iob_schema is False
    assert dataset.config.id2label == {0: "NOUN", 1: "VERB"}


def test_bad_labelings_are_named(tmp_path: Path, make: Callable) -> None:
    rows = [
        {"tokens": ["a"], "labels": ["O"]},
        {"tokens": ["a", "b"], "labels": ["O"]},
        {"tokens": "a", "labels": ["O"]},
        {"tokens": [], "labels": []},
        {"tokens": [1], "labels": ["O"]},
        {"tokens": ["a"], "labels": ["B-PRE"]},
    ]
    make("jsonl", tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError) as caught:
        Dataset.load(tmp_path, "train", id2label=["O", "B-PER"])
    for part in (
        "line 2: has 2 tokens and 1 labels",
        "line 3: tokens and labels must be lists",
        "line 4: tokens and labels must be lists, with at least one token",
        "line 5: each token must be text",
        "line 6: the label 'B-PRE' is none of id2label. Did you mean 'B-PER'?",
        "5 of 6 rows",
    ):
        assert part in str(caught.value)

"""Texts to be written: plain ones, answers to a source, and texts without rows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.config.errors import ConfigError, ConfigKeyError
from trainwright.data import DataError, Dataset, TextGenerationDataset, TextGenerationDatasetConfig, TextTokenizer

TOKENIZER = TextTokenizer.train(["abcdef\n"], level="char", add_eos=False)
BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_plain_texts(tmp_path: Path, make: Callable) -> None:
    make("jsonl", tmp_path / "train.jsonl", [{"text": "abc"}, {"text": "d"}])
    dataset = TextGenerationDataset.load(tmp_path, "train", TOKENIZER)
    assert dataset[0] == {"token_ids": [BOS, *ids("abc"), EOS], "labels": [-100, *ids("abc"), EOS]}
    batch = dataset.data_collator([dataset[0], dataset[1]])
    assert batch["labels"][1].tolist() == [-100, *ids("d"), EOS, -100, -100]
    assert batch["attention_mask"][1].tolist() == [1, 1, 1, 0, 0]


def test_the_answer_is_learned_and_the_prompt_is_not(tmp_path: Path, make: Callable) -> None:
    make("csv", tmp_path / "train.csv", ["source", "target"], [["abc", "de"]])
    sample = TextGenerationDataset.load(tmp_path, "train", TOKENIZER)[0]
    assert sample["token_ids"] == [BOS, *ids("abc\nde"), EOS]
    assert sample["labels"] == [-100] * 5 + [*ids("de"), EOS]
    assert TOKENIZER.encode("abc\n") == sample["token_ids"][:5]  # how a prompt is written
    other = TextGenerationDataset.load(tmp_path, "train", TOKENIZER, separator="[EOS]")[0]
    assert other["token_ids"] == [BOS, *ids("abc"), EOS, *ids("de"), EOS]


def test_what_is_too_long_loses_the_end_of_its_source_first(tmp_path: Path, make: Callable) -> None:
    make("csv", tmp_path / "train.csv", ["source", "target"], [["abcabc", "defdef"]])

    def sample(max_length: int) -> dict[str, list[int]]:
        return TextGenerationDataset.load(tmp_path, "train", TOKENIZER, max_length=max_length)[0]

    assert sample(12)["token_ids"] == [BOS, *ids("abc\ndefdef"), EOS]
    assert sample(9)["token_ids"] == [BOS, *ids("\ndefdef"), EOS]
    assert sample(7)["token_ids"] == [BOS, *ids("\ndefd"), EOS]
    for max_length in range(4, 15):
        found = sample(max_length)
        assert len(found["token_ids"]) == len(found["labels"]) == min(max_length, 15)


def test_a_text_file_is_cut_into_samples(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("abcdef\nabc", encoding="utf-8")
    dataset = Dataset.load(tmp_path, "train", TOKENIZER, block_size=4)
    assert isinstance(dataset, TextGenerationDataset)
    assert [row["text"] for row in dataset.data] == ["abcd", "ef\na", "bc"]
    assert dataset.data[1].where == f"{tmp_path / 'train.txt'}, from character 4"
    assert TOKENIZER.decode([sample["token_ids"] for sample in dataset]) == ["abcd", "ef\na", "bc"]


def test_the_tokenizers_own_length_holds_for_the_whole(tmp_path: Path, make: Callable) -> None:
    make("csv", tmp_path / "train.csv", ["source", "target"], [["abc", "de"]])
    tokenizer = TextTokenizer(TOKENIZER.config, TOKENIZER.vocabulary, max_length=6)
    assert TextGenerationDataset.load(tmp_path, "train", tokenizer)[0]["token_ids"] == [BOS, *ids("a\nde"), EOS]


def test_what_is_wrong_is_told(tmp_path: Path, make: Callable) -> None:
    with pytest.raises(ConfigError, match="block_size: got 0"):
        TextGenerationDatasetConfig(block_size=0)
    make("jsonl", tmp_path / "train.jsonl", [{"source": "a", "target": ""}, {"source": 1, "target": "b"}])
    with pytest.raises(DataError) as caught:
        TextGenerationDataset.load(tmp_path, "train")
    assert "line 1: target must be text, and not empty" in str(caught.value)
    assert "line 2: source must be text, and not empty" in str(caught.value)
    make("jsonl", tmp_path / "test.jsonl", [{"source": "a", "targt": "b"}])
    with pytest.raises(ConfigKeyError, match=r"no column 'target'. Did you mean 'targt'\?"):
        TextGenerationDataset.load(tmp_path, "test")

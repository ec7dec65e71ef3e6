"""Rows of packed texts: each token once, no text cut without consent, few tokens of padding."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import PackedDataset

SIZES = [3, 9, 1, 4, 4, 7, 2, 2, 10, 5, 6, 0, 8, 1]


def documents(sizes: list[int] = SIZES, name: str = "input_ids") -> list[dict[str, Any]]:
    """Text i has the tokens 100 i, 100 i + 1, …"""
    return [{name: [100 * number + place for place in range(size)]} for number, size in enumerate(sizes)]


def texts_of(row: dict[str, torch.Tensor], name: str = "input_ids") -> list[list[int]]:
    """The texts of a row by its positions; padding is left out."""
    found: list[list[int]] = []
    for token, position in zip(row[name].tolist(), row["position_ids"].tolist(), strict=True):
        found = [*found, [token]] if position == 0 else [*found[:-1], [*found[-1], token]]
    return [text for text in found if text != [-1]]


@pytest.mark.parametrize("name", ["input_ids", "token_ids"])
def test_each_text_is_in_one_row(name: str) -> None:
    rows = PackedDataset(documents(name=name), 10, pad_id=-1)
    found = [text for row in rows for text in texts_of(row, name)]
    assert sorted(found) == sorted(one[name] for one in documents(name=name) if one[name])
    assert rows.num_tokens == sum(SIZES)
    for row in rows:
        assert list(row) == [name, "labels", "position_ids"]
        assert all(value.shape == (10,) and value.dtype == torch.int64 for value in row.values())
        is_labelled = (row["position_ids"] != 0) & (row[name] != -1)
        assert torch.equal(row["labels"], row[name].where(is_labelled, torch.tensor(-100)))


def test_few_tokens_are_padding() -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = (torch.randn(3000, generator=draw) * 60 + 150).long().clamp(1, 512).tolist()
    rows = PackedDataset(documents(sizes), 512)
    assert rows.num_tokens / (512 * len(rows)) > 0.98
    assert "of them of texts" in repr(rows)


def test_other_fields_are_joined_and_the_masks_of_whole_texts_left_out() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": [-100, 2, 3], "token_type_ids": [0, 1, 1]},
        {"input_ids": [4, 5], "attention_mask": [1, 1], "labels": [4, 5], "token_type_ids": [1, 1]},
    ]
    (row,) = PackedDataset(samples, 6)
    assert {name: value.tolist() for name, value in row.items()} == {
        "input_ids": [1, 2, 3, 4, 5, 0],
        "labels": [-100, 2, 3, -100, 5, -100],
        "token_type_ids": [0, 1, 1, 1, 1, 0],
        "position_ids": [0, 1, 2, 0, 1, 0],
    }


def test_long_texts_are_refused_or_cut() -> None:
    with pytest.raises(ConfigError, match="got 4, but 6 of 14 texts are longer: text 1 has 9 tokens, the longest 10"):
        PackedDataset(documents(), 4)
    rows = PackedDataset(documents(), 4, splits=True, pad_id=-1)
    parts = [text for row in rows for text in texts_of(row)]
    assert max(map(len, parts)) == 4
    whole = [one["input_ids"][start : start + 4] for one in documents() for start in range(0, len(one["input_ids"]), 4)]
    assert sorted(parts) == sorted(whole)


def test_known_lengths_are_not_read_again() -> None:
    reads = Counter[int]()

    class Counted(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            reads[index] += 1
            return super().__getitem__(index)

    texts = Counted(documents([3, 4]))
    rows = PackedDataset(texts, 8, lengths=[3, 4])
    assert not reads
    assert texts_of(rows[0]) == [[0, 1, 2], [100, 101, 102, 103], [0]]
    wrong = PackedDataset(texts, 8, lengths=[3, 5])
    with pytest.raises(ConfigError, match="text 1 has 4 tokens, but 5 by `lengths`"):
        wrong[0]
    short = PackedDataset(texts, 8, lengths=(3, 2))
    with pytest.raises(ConfigError, match=r"text 1 has 4 tokens, but 2 by `lengths`, .* they would be cut"):
        short[0]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(documents())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((documents(), 1), "PackedDataset.length: got 1; it must be a number of tokens >= 2"),
        ((documents(), True), "PackedDataset.length: got True"),
        (([], 8), "there is no text with a token"),
        (([], 8, {"lengths": []}), "there is no text with a token"),
        ((documents([0, 0]), 8), "there is no text with a token"),
        (([{"x": [1]}], 8), "text 0 has no 'input_ids' or 'token_ids', but the fields ['x']"),
        (
            (["hello world"], 8),
            "but str. Tokenize first: [{'input_ids': tokenizer(text)['input_ids']} for text in texts].",
        ),
        (([[1, 2]], 8), "text 0 has no 'input_ids' or 'token_ids', but list"),
        ((documents([2]), 8, {"lengths": [2, 2]}), "PackedDataset.lengths: got 2 numbers for 1 texts"),
        (
            (documents([2]), 8, {"lengths": [-1]}),
            "PackedDataset.lengths: they must be whole numbers of",
        ),
        ((documents([2]), 8, {"lengths": [2.0]}), "PackedDataset.lengths: they must be whole numbers"),
        (([{"input_ids": [1, 2], "source": "a.txt"}], 8), "the field 'source' of text 0 is not one integer for each"),
        (([{"input_ids": [1, 2], "vectors": [0.5, 1.0]}], 8), "the field 'vectors' of text 0 is not one integer"),
        (([{"input_ids": [1, 2], "attention_mask": [1, 0]}], 8), "text 0 is padded"),
        (([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], 8), "texts of row 0 have different fields"),
    ],
)
def test_what_cannot_be_packed_is_named(arguments: Any, message: str) -> None:
    *positional, named = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ConfigError, match=re.escape(message)):
        PackedDataset(*positional, **named)[0]


def test_a_stream_cannot_be_packed() -> None:
    with pytest.raises(ConfigTypeError, match="Stream, which has no length or cannot be read by index"):
        PackedDataset(Stream(), 8)


def test_rows_end() -> None:
    rows = PackedDataset(documents([2, 2]), 2)
    assert torch.equal(rows[-1]["input_ids"], rows[1]["input_ids"])
    with pytest.raises(IndexError):
        rows[2]


@pytest.mark.parametrize("index", [slice(0, 1), [0, 1], "first"])
def test_rows_are_read_one_by_one(index: Any) -> None:
    rows = PackedDataset([{"input_ids": torch.arange(5)} for _ in range(6)], 16)
    with pytest.raises(ConfigTypeError, match=r"index .*one by one.*Subset"):
        rows[index]
    assert rows[np.int64(0)].keys() == rows[0].keys() == rows[torch.tensor(0)].keys()

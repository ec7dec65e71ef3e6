"""TextTokenizer and HFTokenizer: ids and back, cutting, words that are split already, saving and loading."""

import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from trainwright.base.errors import ConfigError, ConfigTypeError, MissingFileError, UserError
from trainwright.data import (
    HFTokenizer,
    Preprocessor,
    TextNormalizer,
    TextTokenizer,
)

TEXTS = ["def to_be(x): return x", "to be or not to be", "سلام ۱۲۳"]


@pytest.mark.parametrize("level", ["char", "byte"])
@pytest.mark.parametrize("text", [*TEXTS, "tabs\tand\nlines  ", "é ☃ 😀", ""])
def test_a_text_comes_back(level: str, text: str) -> None:
    tokenizer = TextTokenizer.train([*TEXTS, text], level=level)
    rows = tokenizer([text, "to"])["token_ids"]
    assert tokenizer.decode(rows) == [text, "to"]
    assert max(map(max, rows)) < tokenizer.vocab_size


def test_words_and_their_ids() -> None:
    tokenizer = TextTokenizer.train(["b a, a", "B"], lowercase=True)
    assert tokenizer.vocabulary == ["a", "b", ","]  # 2, 2 and 1 times; ties by code point
    assert [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [
        0,
        1,
        2,
        3,
    ]
    assert tokenizer.encode("A , z") == [2, 4, 6, 1, 3]
    assert tokenizer.decode([2, 4, 6, 1, 3, -100]) == ["a ,"]
    assert tokenizer.decode([[4, 1]], skip_special_tokens=False) == ["a [UNK]"]
    assert tokenizer.vocab_size == 7
    # The vocabulary may be smaller.
    texts = ["a a a b b c"]
    assert TextTokenizer.train(texts, vocab_size=6).vocabulary == ["a", "b"]
    assert TextTokenizer.train(texts, min_frequency=2).vocabulary == ["a", "b"]


@pytest.mark.parametrize("level", ["word", "char", "byte"])
def test_a_special_tokens_spelling_within_a_text_is_text(level: str) -> None:
    tokenizer = TextTokenizer.train(["[BOS]"], level=level)
    copy = pickle.loads(pickle.dumps(tokenizer))  # as worker processes get it
    assert tokenizer.encode("[BOS]")[1:-1] == copy.encode("[BOS]")[1:-1] != [tokenizer.bos_token_id]
    assert "".join(tokenizer.decode(copy.encode("[BOS]"))).replace(" ", "") == "[BOS]"


def test_words_are_those_of_pythons_regular_expressions() -> None:
    text = "ﬁne ① x² ½ नमस्ते שלום e\u0301 😀 \x1c\x1d\u2028\u00a0z_1 don't"
    assert TextTokenizer().split(text) == re.findall(r"\w+|[^\w\s]", text)


@pytest.mark.parametrize(("level", "vocabulary"), [("word", ["**", "a", "'...'"]), ("char", ["*", ".", "'", "a"])])
def test_a_vocabulary_of_texts_that_are_split_already(level: str, vocabulary: list[str]) -> None:
    texts = [["**", "a"], ("**", "a", "'...'", "")]
    tokenizer = TextTokenizer.train(texts, level=level)
    assert tokenizer.vocabulary == vocabulary
    assert tokenizer.unk_token_id not in tokenizer.encode_words(["a", "'...'", "**"])[0]


def test_a_batch_is_padded(wordpiece: Any) -> None:
    tokenizer = TextTokenizer.train(TEXTS, level="char", add_eos=False)
    batch = tokenizer(["to", "t"], return_tensors="torch")
    t, o = tokenizer.token_id("t"), tokenizer.token_id("o")
    assert batch["token_ids"].tolist() == [[2, t, o], [2, t, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert tokenizer("to")["attention_mask"] == [[1, 1, 1]]
    assert tokenizer.decode(batch["token_ids"]) == ["to", "t"]
    # Long texts are cut with their end token.
    tokenizer = TextTokenizer.train(TEXTS, level="char", max_length=4)
    assert len(tokenizer.encode("to be")) == 4
    assert tokenizer.encode("to be")[-1] == tokenizer.eos_token_id
    assert len(tokenizer.encode("to be", max_length=3)) == 3
    assert tokenizer.encode("to be", max_length=2, add_special_tokens=False) == tokenizer.encode("to")[1:-1]
    # Ids are int64.
    for tokenizer in (HFTokenizer(tokenizer=wordpiece), TextTokenizer.train(TEXTS)):
        assert tokenizer(["to", "to be"], return_tensors="torch")["token_ids"].dtype == torch.int64


def test_words_that_are_split_already() -> None:
    words = TextTokenizer.train(["a_b c"], level="word")
    assert words.encode_words(["a_b", "a b", "c"]) == ([2, 4, 1, 5, 3], [None, 0, 1, 2, None])
    chars = TextTokenizer.train(["abc"], level="char")
    assert chars.encode_words(["ab", "", "c"]) == ([2, 4, 5, 1, 6, 3], [None, 0, 0, 1, 2, None])
    assert chars.encode_words(["ab", "c"], max_length=3) == ([2, 4, 3], [None, 0, None])


@pytest.mark.parametrize("level", ["word", "char", "byte"])
def test_saved_and_loaded_it_is_the_same(level: str, tmp_path: Path) -> None:
    tokenizer = TextTokenizer.train(["a\n\u2028b\u200c۱ 1.5 true null"], level=level, max_length=100)
    tokenizer.save(tmp_path)
    loaded = Preprocessor.load(tmp_path)
    assert loaded.vocabulary == tokenizer.vocabulary
    assert loaded.config == tokenizer.config
    assert loaded("a\n\u2028b\u200c۱ 1.5 true null") == tokenizer("a\n\u2028b\u200c۱ 1.5 true null")


def test_what_is_wrong_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="occurs twice"):
        TextTokenizer(vocabulary=["a", "a"])
    with pytest.raises(ConfigTypeError, match="got int"):
        TextTokenizer().encode(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'torch' or None"):
        TextTokenizer()("a", return_tensors="tf")  # type: ignore[arg-type]
    TextTokenizer.train(["a"]).save(tmp_path)
    (tmp_path / "preprocessor" / "vocabulary.json").write_text("[")
    with pytest.raises(ConfigError, match=r"vocabulary\.json: not valid JSON"):
        Preprocessor.load(tmp_path)
    (tmp_path / "preprocessor" / "vocabulary.json").unlink()
    with pytest.raises(MissingFileError, match=r"vocabulary\.json"):
        Preprocessor.load(tmp_path)
    # The package tokenizers is named where it is absent.
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"tokenizers: pip install tokenizers"):
        TextTokenizer()


@pytest.fixture
def wordpiece() -> Any:
    """As BERT's."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def test_a_tokenizer_of_the_tokenizers_library(wordpiece: Any, tmp_path: Path) -> None:
    wordpiece.enable_truncation(3)
    wordpiece.enable_padding(length=20)
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    ours = HFTokenizer.from_file(tmp_path / "tokenizer.json")
    wordpiece.no_truncation()
    wordpiece.no_padding()
    assert ours("to be or not")["token_ids"] == [wordpiece.encode("to be or not").ids]
    assert ours.encode("to be", add_special_tokens=False) == wordpiece.encode("to be", add_special_tokens=False).ids
    assert [ours.pad_token_id, ours.unk_token_id, ours.bos_token_id, ours.eos_token_id] == [0, 1, 2, 3]
    assert ours.vocab_size == wordpiece.get_vocab_size()
    assert ours.decode(ours("to be")["token_ids"]) == ["to be"]


def test_it_cuts_as_the_library_does(wordpiece: Any) -> None:
    ours = HFTokenizer(tokenizer=wordpiece, max_length=5)
    wordpiece.enable_truncation(5)
    encoding = wordpiece.encode(["to", "be", "not_to", "be"], is_pretokenized=True)
    assert ours.encode_words(["to", "be", "not_to", "be"]) == (encoding.ids, encoding.word_ids)
    assert ours.encode("to be or not to be") == wordpiece.encode("to be or not to be").ids


def test_it_is_saved_and_loaded(wordpiece: Any, tmp_path: Path) -> None:
    ours = HFTokenizer(tokenizer=wordpiece, max_length=7)
    folder = ours.save(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.yaml"]
    loaded = Preprocessor.load(tmp_path)
    assert isinstance(loaded, HFTokenizer)
    assert loaded.config == ours.config
    assert loaded("to be or not to be")["token_ids"] == ours("to be or not to be")["token_ids"]


def test_a_folder_of_transformers_is_enough(wordpiece: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=wordpiece, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )
    theirs.save_pretrained(tmp_path)
    loaded = Preprocessor.load(tmp_path)
    assert loaded("to be or not")["token_ids"] == theirs(["to be or not"])["input_ids"]
    assert loaded.config.bos_token == "[CLS]"
    assert HFTokenizer(tokenizer=theirs).config.eos_token == "[SEP]"


def test_special_tokens_of_other_names_come_from_transformers_settings(wordpiece: Any, tmp_path: Path) -> None:
    wordpiece.add_special_tokens(["<nothing>"])
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": "<nothing>"}}))
    loaded = Preprocessor.load(tmp_path)
    assert loaded.pad_token_id == wordpiece.token_to_id("<nothing>")


def test_a_file_that_is_none_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not a file of the tokenizers library"):
        Preprocessor.load(tmp_path)
    with pytest.raises(MissingFileError, match="no such tokenizer file"):
        HFTokenizer.from_file(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="tokenizer= is missing"):
        HFTokenizer()


def test_the_text_normalizer() -> None:
    normalizer = TextNormalizer()
    assert normalizer(["ﬁn", "e\u0301", " a\t\n b ", "①"]) == ["fin", "é", "a b", "1"]
    assert normalizer("Ａ") == "A"
    # Settings.
    assert TextNormalizer(form="", collapse_spaces=False)(" ﬁ ") == " ﬁ "
    assert TextNormalizer(lowercase=True, replace_patterns=[["ي", "ی"], [r"\d+", "0"]])("AB ي 123") == "ab ی 0"

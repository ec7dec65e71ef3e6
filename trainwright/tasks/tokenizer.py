"""Tokenizers, an adapter to the package tokenizers, and `TextNormalizer`.

`TextTokenizer` splits into words, characters or bytes; `HFTokenizer` wraps a tokenizer of the tokenizers library or of
transformers. Both have the same methods.
"""

import collections
import dataclasses
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor

from trainwright.base.errors import ConfigError, ConfigTypeError, MissingFileError, import_optional
from trainwright.base.files import PathLike, atomic_write
from trainwright.config.yaml_config import check_positive
from trainwright.tasks.padding import pad, pad_mask
from trainwright.tasks.preprocessor import Preprocessor, PreprocessorConfig, register_preprocessor

VOCABULARY = "vocabulary.json"
_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"  # of transformers
_LEVELS = ("word", "char", "byte")
# Python's \w+|[^\w\s] in the library's syntax, whose \w takes combining marks as well.
_WORDS = r"[\p{L}\p{N}_]+|[^\p{L}\p{N}_\s\x{1c}-\x{1f}]"
# Names of special tokens in transformers, and their usual texts.
_USUAL = {
    "pad_token": (["pad_token"], ["[PAD]", "<pad>", "<|padding|>", "<|endoftext|>"]),
    "unk_token": (["unk_token"], ["[UNK]", "<unk>"]),
    "bos_token": (["bos_token", "cls_token"], ["[BOS]", "<s>", "<bos>", "[CLS]", "<|endoftext|>"]),
    "eos_token": (["eos_token", "sep_token"], ["[EOS]", "</s>", "<eos>", "[SEP]", "<|endoftext|>"]),
}


@dataclasses.dataclass
class TokenizerConfig(PreprocessorConfig):
    """Settings of all tokenizers.

    Fields:
        max_length: longer texts are truncated to this number of tokens, special ones included; None never truncates.
        pad_token, unk_token, bos_token, eos_token: the special tokens. ``bos_token`` begins a text (BERT's [CLS]),
            ``eos_token`` ends it.
    """

    filename = "tokenizer_config.yaml"

    max_length: int | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "max_length", or_none=True)


class Tokenizer(Preprocessor):
    """Base of tokenizers: ``tokenizer(texts)`` gives ``{"token_ids", "attention_mask"}``, ``decode(ids)`` the texts.

    A subclass sets ``_tokenizer``, a `tokenizers.Tokenizer`, or overrides the methods that use it.
    """

    kind = "tokenizer"
    _tokenizer: Any

    def __call__(
        self,
        texts: str | Iterable[str],
        *,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        return_tensors: Literal["torch", "pt"] | None = None,
    ) -> dict[str, Any]:
        """Ids of one text or several: B lists, or with ``return_tensors="torch"`` int64 (B, L), padded on the right.

        Args:
            max_length: truncate to this number of tokens; None means the config's.
            add_special_tokens: begin with ``bos_token`` and end with ``eos_token``, if they exist.
        """
        rows = [
            self.encode(text, max_length=max_length, add_special_tokens=add_special_tokens)
            for text in ([texts] if isinstance(texts, str) else texts)
        ]
        if return_tensors is None:
            return {"token_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        if return_tensors not in ("torch", "pt"):
            raise ConfigError(f"return_tensors: got {return_tensors!r}; 'torch' or None is allowed.")
        return {"token_ids": pad(rows, self.pad_token_id), "attention_mask": pad_mask(rows)}

    def encode(self, text: str, *, max_length: int | None = None, add_special_tokens: bool = True) -> list[int]:
        """The ids of one text."""
        ids: list[int] = self._encoding(text, max_length, add_special_tokens).ids
        return ids

    def encode_words(
        self, words: Sequence[str], *, max_length: int | None = None
    ) -> tuple[list[int], list[int | None]]:
        """The ids of a text that is already split into words, and the word index of each id (None: a special token)."""
        encoding = self._encoding(list(words), max_length, True)
        return encoding.ids, encoding.word_ids

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> list[str]:
        """The texts of ids (B, L) or (L,). Negative ids, the padding of labels, are ignored."""
        rows = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        is_one = not rows or not hasattr(rows[0], "__iter__")
        kept = [[int(number) for number in row if number >= 0] for row in ([rows] if is_one else rows)]
        return [self.decode_one(row, skip_special_tokens) for row in kept]

    def decode_one(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str | None) -> int | None:
        """The id of a token; None if the vocabulary does not have it."""
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """The number of ids; they begin at 0."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def pad_token_id(self) -> int:
        """The id of padding; 0 if there is no padding token (the attention mask marks the padding)."""
        return self.token_id(self.config.pad_token) or 0

    unk_token_id = property(lambda self: self.token_id(self.config.unk_token))
    bos_token_id = property(lambda self: self.token_id(self.config.bos_token))
    eos_token_id = property(lambda self: self.token_id(self.config.eos_token))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r}, <vocabulary of {self.vocab_size}>)"

    def _limit(self, max_length: int | None, num_special: int) -> int | None:
        """The largest number of tokens without the special ones; None: no limit."""
        limit = self.config.max_length if max_length is None else max_length
        return None if limit is None else max(0, limit - num_special)

    def _encoding(self, text: str | list[str], max_length: int | None, add_special_tokens: bool) -> Any:
        # encode, not encode_batch: its threads do not survive in forked workers.
        encoding = self._tokenizer.encode(text, is_pretokenized=isinstance(text, list), add_special_tokens=False)
        num_special = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        limit = self._limit(max_length, num_special)
        if limit is not None:
            encoding.truncate(limit)
        return self._tokenizer.post_process(encoding, None, add_special_tokens)


@dataclasses.dataclass
class TextTokenizerConfig(TokenizerConfig):
    """Settings of a `TextTokenizer`.

    Fields:
        level: "word" (words and punctuation marks; white space is lost), "char" (code points) or "byte" (of UTF-8).
        lowercase: convert texts to lower case.
        add_bos, add_eos: whether texts begin with ``bos_token`` and end with ``eos_token``. Use ``add_eos=False`` for
            text generation: a prompt must not end, and the data set adds the end to its texts.
    """

    name = "text_tokenizer"

    pad_token: str | None = "[PAD]"
    unk_token: str | None = "[UNK]"
    bos_token: str | None = "[BOS]"
    eos_token: str | None = "[EOS]"
    level: str = "word"
    lowercase: bool = False
    add_bos: bool = True
    add_eos: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level not in _LEVELS:
            raise ConfigError(f"TextTokenizerConfig.level: got {self.level!r}; {', '.join(_LEVELS)} are allowed.")


@register_preprocessor("text_tokenizer", config_class=TextTokenizerConfig)
class TextTokenizer(Tokenizer):
    """Splits texts into words, characters or bytes. The first ids are special tokens: padding (0), unknown, begin, end.

    >>> tokenizer = TextTokenizer.train(["to be or not to be"], level="word")
    >>> tokenizer("to be", return_tensors="torch")["token_ids"]
    tensor([[2, 5, 4, 3]])
    >>> tokenizer.decode([[2, 5, 4, 3]])
    ['to be']
    """

    def __init__(
        self, config: TextTokenizerConfig | None = None, vocabulary: Sequence[str] = (), **overrides: Any
    ) -> None:
        super().__init__(config, **overrides)
        level = self.config.level
        if level == "byte" and vocabulary:
            raise ConfigError("TextTokenizer: level='byte' takes no vocabulary.")
        self.vocabulary = list(vocabulary)
        self._special = list(dict.fromkeys(getattr(self.config, name) for name in _USUAL))
        tokens = [*self._special, *(_byte_characters() if level == "byte" else self.vocabulary)]
        ids = {token: number for number, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            raise ConfigError("TextTokenizer.vocabulary: a token occurs twice, or is a special token.")
        self._tokenizer = _tokenizer_of(level, ids, self.config.unk_token)

    @classmethod
    def train(
        cls,
        texts: Iterable[str | Sequence[str]],
        *,
        vocab_size: int | None = None,
        min_frequency: int = 1,
        **fields: Any,
    ) -> Self:
        """A tokenizer with the tokens of ``texts`` as its vocabulary: the most frequent first, ties by code points.

        Args:
            texts: strings, or lists of words for `encode_words`.
            vocab_size: the largest size of the vocabulary, special tokens included; None means no limit.
            min_frequency: less frequent tokens are left out.
            fields: of `TextTokenizerConfig`, for example ``level="char"``.
        """
        empty = cls(TextTokenizerConfig(**fields))
        if empty.config.level == "byte":
            return empty
        counts = collections.Counter(token for text in texts for token in empty._tokens(text))
        often = [token for token, count in counts.items() if count >= min_frequency and token not in empty._special]
        often.sort(key=lambda token: (-counts[token], token))
        room = None if vocab_size is None else max(0, vocab_size - len(empty._special))
        return cls(empty.config, often[:room])

    def split(self, text: str) -> list[str]:
        """The tokens of a text, known or unknown. For level "byte": each byte as a character."""
        text = self._checked(text)
        if self.config.level == "word":
            return [token for token, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return list(text) if self.config.level == "char" else list(text.encode().decode("latin-1"))

    def encode(self, text: str, *, max_length: int | None = None, add_special_tokens: bool = True) -> list[int]:
        begin, end = self._frame() if add_special_tokens else ([], [])
        return [*begin, *self._ids(text)[: self._limit(max_length, len(begin) + len(end))], *end]

    def encode_words(
        self, words: Sequence[str], *, max_length: int | None = None
    ) -> tuple[list[int], list[int | None]]:
        begin, end = self._frame()
        pairs = [(number, index) for index, word in enumerate(words) for number in self._ids_of_word(word)]
        pairs = pairs[: self._limit(max_length, len(begin) + len(end))]
        ids = [*begin, *(number for number, _ in pairs), *end]
        return ids, [*[None] * len(begin), *(index for _, index in pairs), *[None] * len(end)]

    def decode_one(self, ids: list[int], skip_special_tokens: bool) -> str:
        return super().decode_one([i for i in ids if not skip_special_tokens or i >= len(self._special)], False)

    def save_files(self, folder: Path) -> None:
        if self.config.level != "byte":
            atomic_write(folder / VOCABULARY, json.dumps(self.vocabulary, ensure_ascii=False, indent=0).encode())

    @classmethod
    def from_files(cls, config: Any, folder: Path) -> Self:
        if config.level == "byte":
            return cls(config)
        vocabulary = _read_json(folder / VOCABULARY)
        if vocabulary is None:
            raise MissingFileError(f"{folder / VOCABULARY}: the tokenizer's vocabulary, a JSON list, is missing.")
        return cls(config, vocabulary)

    def _checked(self, text: str) -> str:
        if not isinstance(text, str):
            raise ConfigTypeError(f"TextTokenizer: got {type(text).__name__}; it must be a string.")
        # Python's lower: that of the library does not handle the final sigma.
        return text.lower() if self.config.lowercase else text

    def _tokens(self, text: str | Sequence[str]) -> list[str]:
        """The tokens of a text, or of a list of words, which are not split further."""
        if not isinstance(text, list | tuple):
            return self.split(text)  # type: ignore[arg-type]  # raises for other types
        words = [self._checked(word) for word in text if word]
        return words if self.config.level == "word" else [token for word in words for token in self.split(word)]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(self._checked(text), add_special_tokens=False).ids
        return ids

    def _ids_of_word(self, word: str) -> list[int]:
        if self.config.level != "word":
            return self._ids(word) or [self.unk_token_id]
        number = self.token_id(self._checked(word))
        return [self.unk_token_id if number is None else number]

    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        return [self.bos_token_id] * self.config.add_bos, [self.eos_token_id] * self.config.add_eos


@dataclasses.dataclass
class HFTokenizerConfig(TokenizerConfig):
    """Settings of an `HFTokenizer`.

    Special tokens that are None are taken from transformers' ``tokenizer_config.json``, or are the usual ones.
    """

    name = "hf_tokenizer"


@register_preprocessor("hf_tokenizer", config_class=HFTokenizerConfig)
class HFTokenizer(Tokenizer):
    """Wraps a `tokenizers.Tokenizer` or a fast tokenizer of transformers.

    The tokenizer itself (its post-processor) decides which special tokens begin and end a text.
    """

    def __init__(self, config: HFTokenizerConfig | None = None, tokenizer: Any = None, **overrides: Any) -> None:
        if tokenizer is None:
            raise ConfigError("HFTokenizer: tokenizer= is missing; HFTokenizer.from_file('tokenizer.json') reads one.")
        super().__init__(config, **overrides)
        inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
        # A copy: this class pads and truncates, and the caller's tokenizer keeps its settings.
        self._tokenizer: Any = type(inner).from_str(inner.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        for field, (names, usual) in _USUAL.items():
            if getattr(self.config, field) is None:
                candidates = [*(getattr(tokenizer, name, None) for name in names), *usual]
                found = next((c for c in candidates if isinstance(c, str) and self.token_id(c) is not None), None)
                setattr(self.config, field, found)

    @classmethod
    def from_file(cls, path: PathLike, **fields: Any) -> Self:
        """The tokenizer in a ``tokenizer.json``; ``fields`` are those of `HFTokenizerConfig`."""
        return cls(HFTokenizerConfig(**fields), _read(Path(path)))

    def save_files(self, folder: Path) -> None:
        atomic_write(folder / _FILE, self._tokenizer.to_str(pretty=True).encode())

    @classmethod
    def from_files(cls, config: Any, folder: Path) -> Self:
        fields = {field: getattr(config, field) for field in _USUAL}
        settings = _special_tokens(folder / _SETTINGS)
        for field, (names, _) in _USUAL.items():
            if fields[field] is None:
                fields[field] = next((settings[name] for name in names if name in settings), None)
        return cls(config, _read(folder / _FILE), **fields)


def _read(path: Path) -> Any:
    tokenizers = _library()
    if not path.is_file():
        raise MissingFileError(f"{path}: there is no such tokenizer file.")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library's own, which is a plain Exception
        raise ConfigError(f"{path}: is not a file of the tokenizers library: {error}") from error


def _special_tokens(path: Path) -> dict[str, str]:
    """Names and texts of special tokens in transformers' settings; a token may be a mapping with a ``content``."""
    settings = _read_json(path) or {}
    tokens = {
        name: v.get("content") if isinstance(v, dict) else v for name, v in settings.items() if name.endswith("_token")
    }
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def _library() -> Any:
    return import_optional("tokenizers", "Tokenizers need the package tokenizers: pip install tokenizers.")


def _tokenizer_of(level: str, ids: dict[str, int], unk_token: str) -> Any:
    """A tokenizer of a vocabulary, without special tokens: a text that is spelled like one stays text."""
    library = _library()
    if level == "word":
        tokenizer = library.Tokenizer(library.models.WordLevel(ids, unk_token))
        tokenizer.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(_WORDS), "removed", invert=True)
    else:  # byte pair encoding without merges gives characters
        tokenizer = library.Tokenizer(library.models.BPE(ids, [], unk_token=unk_token))
        tokenizer.decoder = library.decoders.Fuse()
    if level == "byte":
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """The library's characters for bytes 0 to 255: printable ones themselves, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _read_json(path: Path) -> Any:
    """The content of a JSON file; None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error


_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "")


@dataclasses.dataclass
class TextNormalizerConfig(PreprocessorConfig):
    """Settings of a `TextNormalizer`: what is done to a text, in this order.

    Fields:
        form: Unicode's normal form: "NFKC" (default), "NFC", "NFD", "NFKD", or "" for none.
        replace_patterns: pairs of a regular expression and its replacement, applied in order.
        lowercase: convert to lower case.
        collapse_spaces: each run of white space becomes one space; white space at both ends is removed.
    """

    name = "text_normalizer"
    filename = "normalizer_config.yaml"

    form: str = "NFKC"
    replace_patterns: list[Any] = dataclasses.field(default_factory=list)
    lowercase: bool = False
    collapse_spaces: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in _FORMS:
            raise ConfigError(f"TextNormalizerConfig.form: got {self.form!r}; NFC, NFD, NFKC, NFKD or '' is allowed.")
        for pair in self.replace_patterns:
            try:
                pattern, replacement = pair
                re.sub(pattern, replacement, "")
            except (ValueError, TypeError, re.error) as error:
                raise ConfigError(
                    f"TextNormalizerConfig.replace_patterns: got {pair!r}; each is a pair of a regular expression and "
                    f"its replacement ({error})."
                ) from error


@register_preprocessor("text_normalizer", config_class=TextNormalizerConfig)
class TextNormalizer(Preprocessor):
    """Gives texts that look the same one spelling.

    >>> TextNormalizer()("ﬁne   ①")
    'fine 1'
    """

    kind = "text_normalizer"

    def __call__(self, texts: Any) -> Any:
        """One text, or a list of them."""
        return self._one(texts) if isinstance(texts, str) else [self._one(text) for text in texts]

    def _one(self, text: str) -> str:
        config = self.config
        text = unicodedata.normalize(config.form, text) if config.form else text
        for pattern, replacement in config.replace_patterns:
            text = re.sub(pattern, replacement, text)
        text = text.lower() if config.lowercase else text
        return " ".join(text.split()) if config.collapse_spaces else text

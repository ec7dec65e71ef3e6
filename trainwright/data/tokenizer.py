"""Tokenizers: texts to the ids of their tokens, and back.

`TextTokenizer` splits into words, characters or bytes and needs nothing else. `HFTokenizer` is what the tokenizers
library, or transformers, has trained. Both are used alike.
"""

import collections
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor

from trainwright.checkpoint.files import atomic_write
from trainwright.config.errors import ConfigError, ConfigTypeError, MissingFileError
from trainwright.data.padding import pad, pad_mask
from trainwright.data.preprocessor import Preprocessor, PreprocessorConfig, register_preprocessor

VOCABULARY = "vocabulary.json"
_WORDS = re.compile(r"\w+|[^\w\s]")
_LEVELS = ("word", "char", "byte")


@dataclass
class TokenizerConfig(PreprocessorConfig):
    """What all tokenizers have: ``max_length``, in tokens with the special ones, cuts longer texts; None never cuts.

    The special tokens' texts: ``bos_token`` begins a text (it is BERT's [CLS]), ``eos_token`` ends it.
    """

    filename = "tokenizer_config.yaml"

    max_length: int | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_max_length(self)


class Tokenizer(Preprocessor):
    """Base of tokenizers: ``tokenizer(texts)`` gives ``{"token_ids", "attention_mask"}``, ``decode(ids)`` the texts."""

    kind = "tokenizer"

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
            max_length: cut behind so many tokens; None means the config's.
            add_special_tokens: begin with ``bos_token`` and end with ``eos_token``, where there are any.
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
        raise NotImplementedError

    def encode_words(
        self, words: Sequence[str], *, max_length: int | None = None
    ) -> tuple[list[int], list[int | None]]:
        """The ids of a text that is split already, and for each id the number of its word (None: a special token)."""
        raise NotImplementedError

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> list[str]:
        """The texts of ids (B, L), or of one text's (L,). Negative ids, the padding of labels, are left out."""
        rows = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        is_one = not rows or not hasattr(rows[0], "__iter__")
        kept = [[int(number) for number in row if number >= 0] for row in ([rows] if is_one else rows)]
        return [self.decode_one(row, skip_special_tokens) for row in kept]

    def decode_one(self, ids: list[int], skip_special_tokens: bool) -> str:
        raise NotImplementedError

    def token_id(self, token: str | None) -> int | None:
        """The id of a token; None if the vocabulary has it not."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to this, without it."""
        raise NotImplementedError

    @property
    def pad_token_id(self) -> int:
        """What fills up shorter texts; 0 if there is no padding token (the attention mask tells it from a token)."""
        return self.token_id(self.config.pad_token) or 0

    @property
    def unk_token_id(self) -> int | None:
        return self.token_id(self.config.unk_token)

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.config.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.config.eos_token)


@dataclass
class TextTokenizerConfig(TokenizerConfig):
    """How texts are split.

    Fields:
        level: "word" (words and single signs; white space is lost), "char" (code points) or "byte" (of UTF-8).
        lowercase: small letters only.
        add_bos, add_eos: whether texts begin with ``bos_token`` and end with ``eos_token``. A prompt that is to be
            gone on with must not end: ``add_eos=False`` for text generation, whose data set ends its texts itself.
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
    """Words, characters or bytes. The special tokens come first: padding has id 0, then unknown, begin, end.

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
        special = [getattr(self.config, f"{name}_token") for name in ("pad", "unk", "bos", "eos")]
        self._special = list(dict.fromkeys(token for token in special if token is not None))
        if self.config.level == "byte" and vocabulary:
            raise ConfigError("TextTokenizer: bytes need no vocabulary.")
        self.vocabulary = [] if self.config.level == "byte" else list(vocabulary)
        self._ids = {token: number for number, token in enumerate([*self._special, *self.vocabulary])}
        if len(self._ids) != len(self._special) + len(self.vocabulary):
            raise ConfigError("TextTokenizer.vocabulary: a token occurs twice, or is a special token.")

    @classmethod
    def train(
        cls,
        texts: Iterable[str | Sequence[str]],
        *,
        vocab_size: int | None = None,
        min_frequency: int = 1,
        **fields: Any,
    ) -> Self:
        """A tokenizer whose vocabulary is the tokens of ``texts``, the most frequent first, ties by code points.

        Args:
            texts: as they are, or as lists of their words, for what will be encoded by ``encode_words``.
            vocab_size: at most so many, with the special ones; None means all.
            min_frequency: only those that occur so often.
            fields: of `TextTokenizerConfig`, for example ``level="char"``.
        """
        empty = cls(TextTokenizerConfig(**fields))
        if empty.config.level == "byte":
            return empty
        counts = collections.Counter(token for text in texts for token in empty._tokens(text))
        often = [token for token, count in counts.items() if count >= min_frequency and token not in empty._ids]
        often.sort(key=lambda token: (-counts[token], token))
        room = None if vocab_size is None else max(0, vocab_size - len(empty._special))
        return cls(empty.config, often[:room])

    def split(self, text: str) -> list[str]:
        """The tokens of a text, known or not; of level "byte" the bytes as characters."""
        if not isinstance(text, str):
            raise ConfigTypeError(f"TextTokenizer: got {type(text).__name__}; a text is wanted.")
        text = text.lower() if self.config.lowercase else text
        if self.config.level == "word":
            return _WORDS.findall(text)
        return list(text) if self.config.level == "char" else list(text.encode().decode("latin-1"))

    def encode(self, text: str, *, max_length: int | None = None, add_special_tokens: bool = True) -> list[int]:
        ids = [self._id(token) for token in self.split(text)]
        begin, end = self._frame() if add_special_tokens else ([], [])
        return [*begin, *self._cut(ids, max_length, len(begin) + len(end)), *end]

    def encode_words(
        self, words: Sequence[str], *, max_length: int | None = None
    ) -> tuple[list[int], list[int | None]]:
        pairs = [(self._id(token), n) for n, word in enumerate(words) for token in self._pieces(word)]
        begin, end = self._frame()
        pairs = self._cut(pairs, max_length, len(begin) + len(end))
        ids = [*begin, *(number for number, _ in pairs), *end]
        return ids, [*[None] * len(begin), *(word for _, word in pairs), *[None] * len(end)]

    def decode_one(self, ids: list[int], skip_special_tokens: bool) -> str:
        first = len(self._special)
        if self.config.level == "byte":
            kept = [
                bytes([i - first]) if i >= first else self._special[i].encode()
                for i in ids
                if i >= first or not skip_special_tokens
            ]
            return b"".join(kept).decode("utf-8", errors="replace")
        tokens = [*self._special, *self.vocabulary]
        kept_tokens = [tokens[i] for i in ids if i < len(tokens) and (i >= first or not skip_special_tokens)]
        return (" " if self.config.level == "word" else "").join(kept_tokens)

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self._ids.get(token)

    @property
    def vocab_size(self) -> int:
        return len(self._ids) + (256 if self.config.level == "byte" else 0)

    def save_files(self, folder: Path) -> None:
        if self.config.level != "byte":
            atomic_write(folder / VOCABULARY, json.dumps(self.vocabulary, ensure_ascii=False, indent=0).encode())

    @classmethod
    def from_files(cls, config: Any, folder: Path) -> Self:
        if config.level == "byte":
            return cls(config)
        try:
            vocabulary = json.loads((folder / VOCABULARY).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise MissingFileError(
                f"{folder / VOCABULARY}: the tokenizer's vocabulary, a JSON list, is missing."
            ) from error
        except ValueError as error:
            raise ConfigError(f"{folder / VOCABULARY}: not valid JSON: {error}") from error
        return cls(config, vocabulary)

    def __repr__(self) -> str:
        return f"TextTokenizer({self.config!r}, <vocabulary of {self.vocab_size}>)"

    def _tokens(self, text: str | Sequence[str]) -> list[str]:
        """The tokens of a text, or of one that is split into words already."""
        if isinstance(text, list | tuple):
            return [token for word in text if word for token in self._pieces(word)]
        return self.split(text)  # type: ignore[arg-type]  # refuses what is no text

    def _pieces(self, word: str) -> list[str]:
        # A word that is given as one stays one, as `import_module` of Python's tokens; empty ones are unknown.
        if self.config.level == "word":
            return [word.lower() if self.config.lowercase else word]
        return self.split(word) or [""]

    def _id(self, token: str) -> int:
        if self.config.level == "byte":
            return len(self._special) + ord(token) if token else self._unknown()
        return self._ids[token] if token in self._ids else self._unknown()

    def _unknown(self) -> int:
        if self.unk_token_id is None:
            raise ConfigError(
                "TextTokenizer: a text has tokens that the vocabulary has not, and there is no unk_token."
            )
        return self.unk_token_id

    def _frame(self) -> tuple[list[int], list[int]]:
        begin = [] if self.bos_token_id is None or not self.config.add_bos else [self.bos_token_id]
        end = [] if self.eos_token_id is None or not self.config.add_eos else [self.eos_token_id]
        return begin, end

    def _cut(self, items: list[Any], max_length: int | None, num_special: int) -> list[Any]:
        return cut(items, self.config.max_length if max_length is None else max_length, num_special)


def cut(items: list[Any], max_length: int | None, num_special: int) -> list[Any]:
    """As many of ``items`` as fit beside the special tokens."""
    return items if max_length is None else items[: max(0, max_length - num_special)]


def check_max_length(config: Any) -> None:
    """Hold ``max_length`` to a whole number >= 1, or None."""
    value = config.max_length
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(
            f"{type(config).__name__}.max_length: got {value!r}; it must be a whole number >= 1, or None."
        )

"""HFTokenizer: a ``tokenizer.json`` of the tokenizers library, as transformers' fast tokenizers are saved, too."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from trainwright.checkpoint.files import PathLike, atomic_write
from trainwright.config.errors import ConfigError, MissingFileError, UserError
from trainwright.data.preprocessor import register_preprocessor
from trainwright.data.tokenizer import Tokenizer, TokenizerConfig

FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"  # transformers' own
# What trained tokenizers call their special tokens, and transformers' names for them.
_CUSTOMARY = {
    "pad_token": (["pad_token"], ["[PAD]", "<pad>", "<|padding|>", "<|endoftext|>"]),
    "unk_token": (["unk_token"], ["[UNK]", "<unk>"]),
    "bos_token": (["bos_token", "cls_token"], ["[BOS]", "<s>", "<bos>", "[CLS]", "<|endoftext|>"]),
    "eos_token": (["eos_token", "sep_token"], ["[EOS]", "</s>", "<eos>", "[SEP]", "<|endoftext|>"]),
}


@dataclass
class HFTokenizerConfig(TokenizerConfig):
    """Special tokens that are None are those of transformers' ``tokenizer_config.json``, or the customary ones."""

    name = "hf_tokenizer"


@register_preprocessor("hf_tokenizer", config_class=HFTokenizerConfig)
class HFTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer`, used as all tokenizers here. ``tokenizer`` may be a transformers' fast one as well.

    Which special tokens begin and end a text is the tokenizer's own affair (its post-processor).
    """

    def __init__(self, config: HFTokenizerConfig | None = None, tokenizer: Any = None, **overrides: Any) -> None:
        if tokenizer is None:
            raise ConfigError("HFTokenizer: tokenizer= is missing; HFTokenizer.from_file('tokenizer.json') reads one.")
        super().__init__(config, **overrides)
        inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
        # A copy: lengths are this class's business, and the caller's keeps its own settings.
        self._tokenizer: Any = type(inner).from_str(inner.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        for field, (names, customary) in _CUSTOMARY.items():
            if getattr(self.config, field) is None:
                candidates = [*(getattr(tokenizer, name, None) for name in names), *customary]
                found = next((c for c in candidates if isinstance(c, str) and self.token_id(c) is not None), None)
                setattr(self.config, field, found)

    @classmethod
    def from_file(cls, path: PathLike, **fields: Any) -> Self:
        """The tokenizer in a ``tokenizer.json``; ``fields`` are those of `HFTokenizerConfig`."""
        return cls(HFTokenizerConfig(**fields), _read(Path(path)))

    def encode(self, text: str, *, max_length: int | None = None, add_special_tokens: bool = True) -> list[int]:
        found: list[int] = self._encoding(text, max_length, add_special_tokens).ids
        return found

    def encode_words(
        self, words: Sequence[str], *, max_length: int | None = None
    ) -> tuple[list[int], list[int | None]]:
        encoding = self._encoding(list(words), max_length, True)
        return encoding.ids, encoding.word_ids

    def decode_one(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def save_files(self, folder: Path) -> None:
        atomic_write(folder / FILE, self._tokenizer.to_str(pretty=True).encode())

    @classmethod
    def from_files(cls, config: Any, folder: Path) -> Self:
        fields = {field: getattr(config, field) for field in _CUSTOMARY}
        settings = _special_tokens(folder / _SETTINGS)
        for field, (names, _) in _CUSTOMARY.items():
            if fields[field] is None:
                fields[field] = next((settings[name] for name in names if name in settings), None)
        return cls(config, _read(folder / FILE), **fields)

    def __repr__(self) -> str:
        return f"HFTokenizer({self.config!r}, <vocabulary of {self.vocab_size}>)"

    def _encoding(self, text: str | list[str], max_length: int | None, add_special_tokens: bool) -> Any:
        # encode, not encode_batch: its threads do not live in forked workers.
        encoding = self._tokenizer.encode(text, is_pretokenized=isinstance(text, list), add_special_tokens=False)
        limit = self.config.max_length if max_length is None else max_length
        if limit is not None:
            num_special = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
            encoding.truncate(max(0, limit - num_special))
        return self._tokenizer.post_process(encoding, None, add_special_tokens)


def _read(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f"{path}: is read by the package tokenizers, which is not there: pip install tokenizers."
        ) from error
    if not path.is_file():
        raise MissingFileError(f"{path}: there is no such tokenizer file.")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library's own, which is a plain Exception
        raise ConfigError(f"{path}: is no file of the tokenizers library: {error}") from error


def _special_tokens(path: Path) -> dict[str, str]:
    """Names and texts of special tokens in transformers' settings; a token may be a mapping with its ``content``."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    tokens = {
        name: v.get("content") if isinstance(v, dict) else v for name, v in settings.items() if name.endswith("_token")
    }
    return {name: token for name, token in tokens.items() if isinstance(token, str)}

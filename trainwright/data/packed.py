"""Packed texts: several whole texts in a row of fixed length, which do not attend to each other.

N texts, R rows, L tokens of a row.
"""

import operator
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.base.batch import IGNORED, fields
from trainwright.base.errors import ConfigError, ConfigTypeError

_TOKENS = ("input_ids", "token_ids")  # the names of transformers' models, and of ours
_LABELS, _MASK, _POSITIONS = "labels", "attention_mask", "position_ids"


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of ``length`` tokens, each of one or more whole texts of ``dataset``: hardly any token is padding.

    A row has the fields of the texts, joined, and ``position_ids``, which begin again at 0 with each text: so models of
    transformers and `GPTTextGeneration` know the texts, and no text attends to another one. ``labels`` are those of the
    texts, or without them the tokens; the first token of each text has no label (-100), because models predict it from
    the token before. All of a row are int64 (L,); a batch needs no collator.

    Each text is placed into the row where it leaves the least space, the longest first (best-fit decreasing, Johnson
    1973). So the rows depend on the lengths only: each epoch shuffles the same rows, and a resume is exact.

    Args:
        dataset: its samples are dicts with ``input_ids`` or ``token_ids`` (their number of tokens,), not padded, and
            perhaps ``labels`` and other fields with one integer for each token. It is read once for the lengths.
        length: L, the largest number of tokens that the model gets at once.
        lengths: the number of tokens of each text, if it is known: then the data set is not read at the start.
        splits: cut texts of more than ``length`` tokens into several, instead of refusing them.
        pad_id: the token that fills a row; it has no label and belongs to no text.

    Raises:
        ConfigError: a text is longer than a row, its fields are not equally long, or there is no text.

    Attributes:
        num_tokens: those of all texts; ``num_tokens / (len(self) * length)`` is the share that is not padding.

    >>> texts = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [4, 3, 2, 1]}]
    >>> rows = PackedDataset(texts, 5)
    >>> len(rows), rows[0]["input_ids"].tolist(), rows[0]["position_ids"].tolist()
    (2, [5, 6, 7, 8, 9], [0, 1, 2, 0, 1])
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        lengths: Sequence[int] | None = None,
        splits: bool = False,
        pad_id: int = 0,
    ) -> None:
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 2:
            raise ConfigError(f"PackedDataset.length: got {length!r}; it must be a number of tokens >= 2.")
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ConfigTypeError(
                f"PackedDataset: got {type(dataset).__name__}, which has no length or cannot be read by index. A stream"
                " cannot be packed so; collect its texts in a list, or in a data set of the package datasets."
            )
        self.dataset, self.length, self.pad_id = dataset, int(length), pad_id
        self._lengths = lengths_N = self._read_lengths(lengths)
        self.num_tokens = int(lengths_N.sum())
        # The parts of texts: which text, and where it begins there.
        texts_P, starts_P = _parts(lengths_N, length, splits=splits)
        self._sizes = np.minimum(lengths_N[texts_P] - starts_P, length)
        row_of_P = _rows(self._sizes, length)
        self._order = np.argsort(row_of_P, kind="stable")  # the parts, by row
        self._firsts = np.searchsorted(row_of_P[self._order], np.arange(int(row_of_P.max()) + 2))
        self._texts, self._starts = texts_P, starts_P

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __repr__(self) -> str:
        share = self.num_tokens / (len(self) * self.length)
        return f"PackedDataset({len(self)} rows of {self.length} tokens, {share:.1%} of them of texts)"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        try:
            index = operator.index(index)
        except TypeError as error:
            raise ConfigTypeError(
                f"PackedDataset: got the index {index!r}; rows are read one by one, by whole numbers. For several:"
                " torch.utils.data.Subset(data, range(8))."
            ) from error
        if not -len(self) <= index < len(self):
            raise IndexError(f"PackedDataset: row {index} of {len(self)}")
        row = index % len(self)
        parts = [self._part(one) for one in self._order[self._firsts[row] : self._firsts[row + 1]]]
        if any(part.keys() != parts[0].keys() for part in parts):
            names = " and ".join(str(list(one)) for one in dict.fromkeys(tuple(part) for part in parts))
            raise ConfigError(f"PackedDataset: texts of row {row} have different fields: {names}.")
        for part in parts:
            tokens = next(part[name] for name in _TOKENS if name in part)
            part[_LABELS] = part.get(_LABELS, tokens).clone()
            part[_LABELS][0] = IGNORED
            part[_POSITIONS] = torch.arange(len(tokens))
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        missing = self.length - len(joined[_POSITIONS])
        fill = dict.fromkeys(_TOKENS, self.pad_id) | {_LABELS: IGNORED}
        return {name: F.pad(value, (0, missing), value=fill.get(name, 0)) for name, value in joined.items()}

    def _part(self, part: int) -> dict[str, Tensor]:
        """The fields of a part of a text, without its mask."""
        text, start, size = int(self._texts[part]), int(self._starts[part]), int(self._sizes[part])
        sample, name = self._sample(text)
        if len(sample[name]) != self._lengths[text]:
            raise ConfigError(
                f"PackedDataset: text {text} has {len(sample[name])} tokens, but {self._lengths[text]} by `lengths`, or"
                " when it was first read: they would be cut, or others missing."
            )
        found = {}
        for key, value in sample.items():
            try:
                value_L = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError):
                value_L = torch.empty(0)
            if value_L.dim() != 1 or value_L.is_floating_point() or len(value_L) != len(sample[name]):
                advice = f" Remove the field, for example with dataset.remove_columns({key!r})."
                raise ConfigError(
                    f"PackedDataset: the field {key!r} of text {text} is not one integer for each of its"
                    f" {len(sample[name])} tokens.{'' if key in (name, _LABELS) else advice}"
                )
            found[key] = value_L[start : start + size].long()
        if _MASK in found and not bool(found.pop(_MASK).bool().all()):
            raise ConfigError(f"PackedDataset: text {text} is padded ({_MASK!r} has a 0). Tokenize without padding.")
        return found

    def _sample(self, text: int) -> tuple[dict[str, Any], str]:
        """The fields of a text, and the name of its tokens."""
        sample = self.dataset[text]
        named = fields(sample)
        name = next((one for one in _TOKENS if named is not None and one in named), None)
        if named is None or name is None:
            what = type(sample).__name__ if named is None else f"the fields {list(named)}"
            hint = " Tokenize first: [{'input_ids': tokenizer(text)['input_ids']} for text in texts]."
            hint = hint if isinstance(sample, str) else ""
            raise ConfigError(f"PackedDataset: text {text} has no {' or '.join(map(repr, _TOKENS))}, but {what}.{hint}")
        return dict(named), name

    def _read_lengths(self, given: Sequence[int] | None) -> np.ndarray:
        number = len(self.dataset)
        if given is not None:
            numbers = np.asarray(given if hasattr(given, "__len__") else [*given])
            if numbers.shape != (number,):
                raise ConfigError(f"PackedDataset.lengths: got {numbers.size} numbers for {number} texts.")
            if numbers.size and (numbers.dtype.kind not in "iu" or numbers.min() < 0):
                raise ConfigError("PackedDataset.lengths: they must be whole numbers of tokens, 0 or more.")
            given = numbers.tolist()
        if given is None:
            samples = map(self._sample, range(number))
            given = [len(sample[name]) for sample, name in samples]
        lengths_N = np.asarray(given, dtype=np.int64)
        if not number or not lengths_N.any():
            raise ConfigError("PackedDataset: there is no text with a token.")
        return lengths_N


def _parts(lengths_N: np.ndarray, length: int, *, splits: bool) -> tuple[np.ndarray, np.ndarray]:
    """The number of the text of each part, and the token of it where the part begins. Texts without tokens have none.

    Raises:
        ConfigError: a text is longer than ``length``, and is not to be split.
    """
    too_long = np.flatnonzero(lengths_N > length)
    if len(too_long) and not splits:
        text = int(too_long[0])
        raise ConfigError(
            f"PackedDataset.length: got {length}, but {len(too_long)} of {len(lengths_N)} texts are longer: text {text}"
            f" has {lengths_N[text]} tokens, the longest {lengths_N.max()}. Use a larger length, splits=True, or cut"
            " them when they are tokenized."
        )
    numbers_N = -(-lengths_N // length)
    texts_P = np.repeat(np.arange(len(lengths_N)), numbers_N)
    firsts_P = np.repeat(np.cumsum(numbers_N) - numbers_N, numbers_N)
    return texts_P, (np.arange(len(texts_P)) - firsts_P) * length


def _rows(sizes_P: np.ndarray, length: int) -> np.ndarray:
    """The row of each part: best-fit decreasing. Rows are numbered by the first of their parts."""
    row_of_P = np.empty(len(sizes_P), dtype=np.int64)
    open_rows: dict[int, list[int]] = {}  # by the tokens that still fit
    spaces: list[int] = []  # the keys of it, sorted
    num_rows = 0
    for part in np.argsort(-sizes_P, kind="stable").tolist():
        size = int(sizes_P[part])
        place = bisect_left(spaces, size)
        if place == len(spaces):
            row, space = num_rows, length
            num_rows += 1
        else:
            space = spaces[place]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[place]
        row_of_P[part] = row
        if left := space - size:
            if left not in open_rows:
                open_rows[left] = []
                insort(spaces, left)
            open_rows[left].append(row)
    _, firsts, numbers_P = np.unique(row_of_P, return_index=True, return_inverse=True)
    ranks = np.empty(len(firsts), dtype=np.int64)
    ranks[np.argsort(firsts)] = np.arange(len(firsts))
    rows_P: np.ndarray = ranks[numbers_P]
    return rows_P

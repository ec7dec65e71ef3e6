"""The values of a sweep in the overrides of its command line: ``optim.lr=0.1,0.01``, ``optim.lr=log(1e-4,1e-1)``.

Commas divide values as in hydra's grammar: outside of brackets, braces and quotes only.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.base.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_MAX_NAME = 100  # bytes of the name of a folder


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    is_log: bool = False
    is_int: bool = False

    def __str__(self) -> str:
        kind = {(False, False): "uniform", (True, False): "log", (False, True): "int", (True, True): "logint"}
        return f"{kind[self.is_log, self.is_int]}({self.low:g},{self.high:g})"


@dataclass(frozen=True, slots=True)
class Values:
    """The overrides of a command line.

    ``fixed``: those with one value. ``choices`` and ``ranges``: the others by their keys, with the texts of the values.
    """

    fixed: tuple[str, ...]
    choices: Mapping[str, Sequence[str]]
    ranges: Mapping[str, Range]

    @property
    def keys(self) -> list[str]:
        return [*self.choices, *self.ranges]

    def grid(self) -> Iterator[dict[str, str]]:
        """Each combination of choices, the last key changing first."""
        for texts in itertools.product(*self.choices.values()):
            yield dict(zip(self.choices, texts, strict=True))

    def examples(self) -> Iterator[dict[str, str]]:
        """Combinations with each choice and with both ends of each range."""
        ends = {key: [text_of(range_, end) for end in (range_.low, range_.high)] for key, range_ in self.ranges.items()}
        every = {**self.choices, **ends}
        for number in range(max(map(len, every.values()))):
            yield {key: texts[min(number, len(texts) - 1)] for key, texts in every.items()}

    def __str__(self) -> str:
        parts = [f"{key} ({len(texts)} values)" for key, texts in self.choices.items()]
        return ", ".join([*parts, *(f"{key} in {range_}" for key, range_ in self.ranges.items())])


def read_values(overrides: Iterable[str]) -> Values:
    """Divide overrides into those with one value and those with several.

    Raises:
        ConfigError: an override cannot be read, a key with several values is given twice, or a range is none.
    """
    from trainwright.config.lazy.overrides import RANGE, parse_override

    fixed, choices, ranges = list[str](), dict[str, list[str]](), dict[str, Range]()
    given = dict[str, str]()
    for text in overrides:
        key, _, value = text.partition("=")
        if match := RANGE.fullmatch(value):
            ranges[key] = _range(text, match[1], match[2], match[3])
        else:
            override = parse_override(text)
            key = override.get_key_element()
            if override.is_interval_sweep():
                interval: Any = override.value()
                kind = "log" if "log" in interval.tags else "uniform"
                ranges[key] = _range(text, kind, str(interval.start), str(interval.end))
            elif override.is_sweep_override():
                choices[key] = _choices(text, override)
            else:
                fixed.append(text)
        before = given.setdefault(name := key.lstrip("+~"), text)
        if before is not text and ({key, name} & {*choices, *ranges}):
            raise ConfigError(f"overrides {before!r} and {text!r}: one of them has several values, so give one only.")
    return Values(tuple(fixed), choices, ranges)


def _choices(text: str, override: "Override") -> list[str]:
    from hydra.errors import HydraException

    try:
        found = list(dict.fromkeys(override.sweep_string_iterator()))
    except HydraException as error:
        raise ConfigError(f"override {text!r}: {error}. Write the values, separated by commas.") from error
    names = {_unquoted(one): one for one in found}
    if len(names) < len(found):
        same = next(one for one in found if names[_unquoted(one)] != one)
        raise ConfigError(
            f"override {text!r}: {same} and {names[_unquoted(same)]} would have one folder, whose name is without"
            " quotes. Give one of them."
        )
    return found


def _range(text: str, kind: str, first: str, last: str) -> Range:
    is_int, is_log = kind in ("int", "logint"), kind in ("log", "logint")
    try:
        low, high = float(first), float(last)
    except ValueError:
        raise ConfigError(f"override {text!r}: a range has two numbers, as in log(1e-4,1e-1).") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"override {text!r}: a range begins below its end, and both are finite.")
    if is_log and low <= 0:
        raise ConfigError(f"override {text!r}: a range on a logarithmic scale begins above 0.")
    if is_int and not (low.is_integer() and high.is_integer()):
        raise ConfigError(f"override {text!r}: the ends of a range of whole numbers are whole numbers.")
    return Range(low, high, is_log, is_int)


def text_of(range_: Range, value: float) -> str:
    """The text of a number in a range, in an override: exact."""
    return str(int(value)) if range_.is_int else repr(float(value))


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """The shortest ends of dotted keys that differ; an index of a list is no name of its own.

    >>> short_keys(["optim.lr", "model.width", "train.loader.0"])
    {'optim.lr': 'lr', 'model.width': 'width', 'train.loader.0': 'loader.0'}
    >>> short_keys(["a.lr", "b.lr"])
    {'a.lr': 'a.lr', 'b.lr': 'b.lr'}
    """
    parts = {key: key.lstrip("+").split(".") for key in keys}

    def end(key: str, number: int) -> str:
        return ".".join(parts[key][-number:])

    found = {}
    for key, names in parts.items():
        lengths = range(1 + names[-1].isdigit(), len(names) + 1)
        others = [other for other in parts if other != key]
        number = next((n for n in lengths if all(end(other, n) != end(key, n) for other in others)), len(names))
        found[key] = end(key, number)
    return found


def name_of(texts: Mapping[str, str]) -> str:
    """The name of a folder for these values, which no other values have.

    >>> name_of({"optim.lr": "0.1", "model.dims": "[1,2]"}), name_of({"data": "'a b/c'"})
    ('lr=0.1,dims=[1,2]', 'data=a_b_c-6ccff0fa')
    """
    short = short_keys(texts)
    return folder_name(",".join(f"{short[key]}={_unquoted(text)}" for key, text in texts.items()), texts)


def _unquoted(text: str) -> str:
    return text[1:-1] if text[0] in ("'", '"') else text


def folder_name(text: str, identity: object) -> str:
    """``text``, or what a filesystem takes of it, with a hash of ``identity``."""
    name = re.sub(r"[^\w.+=\[\],@-]", "_", text)
    content = name.encode()  # a filesystem limits bytes, not characters
    if name == text and len(content) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()
    return f"{content[: _MAX_NAME - 9].decode(errors='ignore')}-{digest[:8]}"

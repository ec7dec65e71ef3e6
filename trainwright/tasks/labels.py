"""Labels as ids: the characters of texts, for models that read character by character, and classes.

Characters are Unicode code points in the composed form (NFC): "é" is one character in whichever way it was typed.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from trainwright.config.errors import ConfigError, did_you_mean

BLANK = ""


def labels_of(texts: Iterable[str]) -> dict[int, str]:
    """``id2label`` of all characters in ``texts``, sorted by code point, after the blank "" with id 0.

    >>> labels_of(["ba", "b1"])
    {0: '', 1: '1', 2: 'a', 3: 'b'}
    """
    characters = sorted({character for text in texts for character in composed(text)})
    return dict(enumerate([BLANK, *characters]))


def classes_of(labels: Iterable[Any]) -> dict[int, str]:
    """``id2label`` of all labels, sorted: as numbers if all are whole numbers, otherwise as texts."""
    found = {str(label) for label in labels if label is not None}
    are_numbers = all(label.isdecimal() for label in found)
    return dict(enumerate(sorted(found, key=int if are_numbers else str)))


def checked_labels(value: Any, where: str) -> dict[int, str] | None:
    """``id2label`` with int keys, from a mapping (its keys may be strings, as in JSON) or a list."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    try:
        labels = {int(key): str(label) for key, label in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"{where}.id2label: got {value!r}; it must map whole numbers to texts, such as {{0: '', 1: 'a'}}."
        ) from None
    if len(set(labels.values())) < len(labels):
        twice = next(label for label in labels.values() if list(labels.values()).count(label) > 1)
        raise ConfigError(f"{where}.id2label: {twice!r} occurs twice.")
    return dict(sorted(labels.items()))


def composed(text: str) -> str:
    """The text in Unicode's composed form."""
    return unicodedata.normalize("NFC", text)


def reverse_digits(text: str) -> str:
    """Reverse each run of digits, of any script: the order of numbers in a line that is read from the right.

    >>> reverse_digits("12ب345")
    '21ب543'
    """
    return re.sub(r"\d+", lambda match: match.group()[::-1], text)


def fault_of(text: str, label2id: Mapping[str, int], max_length: int | None) -> str | None:
    """What is wrong with a label; None if it is valid."""
    if not text:
        return "the label is empty"
    if max_length is not None and len(text) > max_length:
        return f"the label {text!r} has {len(text)} characters; max_length is {max_length}"
    unknown = sorted({character for character in text if character not in label2id})
    if unknown:
        named = ", ".join(f"{c!r} (U+{ord(c):04X} {unicodedata.name(c, 'without a name')})" for c in unknown)
        return f"the label {text!r} has characters that are missing in id2label: {named}"
    return None


def id_of(label: Any, label2id: Mapping[str, int]) -> int | None:
    """The id of a class, by its label or by the id itself; None if it is neither."""
    if str(label) in label2id:
        return label2id[str(label)]
    is_id = str(label).isdecimal() and int(label) in label2id.values()  # a CSV file has ids as text
    return int(label) if is_id else None


def unknown_label(label: Any, label2id: Mapping[str, int]) -> str:
    """The message about a label that is not in id2label."""
    return f"the label {label!r} is not in id2label. {did_you_mean(str(label), label2id)}"

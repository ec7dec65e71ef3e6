"""Labels as ids: the characters of texts, for models that read character by character, and classes.

Characters are Unicode code points in the composed form (NFC): "é" is one character in whichever way it was typed.
"""

import logging
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trainwright.base.errors import ConfigError, ConfigTypeError, did_you_mean
from trainwright.data.errors import DataError

logger = logging.getLogger("trainwright.tasks")

BLANK = ""
# Unicode's Bidi_Control: marks of the direction of text, which are invisible and which editors insert.
_DIRECTION_MARKS = dict.fromkeys([0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])
_SPAN_LABEL = re.compile(r"[BIESLUMW]-.+")


def id2label_of_texts(texts: Iterable[str]) -> dict[int, str]:
    """``id2label`` of all characters in ``texts``, sorted by code point, after the blank "" with id 0.

    >>> id2label_of_texts(["ba", "b1"])
    {0: '', 1: '1', 2: 'a', 3: 'b'}
    """
    characters = sorted({character for text in texts for character in composed(text)})
    return dict(enumerate([BLANK, *characters]))


def classes_of(labels: Iterable[Any], where: str) -> dict[int, str]:
    """``id2label`` of all labels, sorted: as numbers if all are whole numbers, otherwise as texts.

    Missing labels, white space around a label, and direction marks do not count, nor do lists. 1.0 is the class 1.
    """
    labels = (label for label in labels if not _is_collection(label))  # `class_fault` names its row
    kinds = {(_name_of(label), isinstance(label, bool)) for label in labels if not _is_missing(label)}
    found = {name for name, _ in kinds}
    numbers = {name for name in found if name.isdecimal()}
    if numbers and any(is_bool for _, is_bool in kinds):
        raise DataError(f"{where}: labels are true or false in some rows, and numbers in others. Write all in one way.")
    unsure = sorted(found & {"-1", "-100"})
    if unsure and numbers and found == numbers.union(unsure):
        raise DataError(
            f"{where}: the label {unsure[0]} is among labels that are whole numbers >= 0. If it means that the label "
            f"is missing, remove its rows; if it is a class, set id2label, with {unsure[0]!r} in it."
        )
    if len(found) == 1:
        logger.warning(
            "%s: all labels are %r, so that there is nothing to learn. Check the column of the labels.", where, *found
        )
    return dict(enumerate(sorted(found, key=int if found == numbers else str)))


def span_scheme(names: Iterable[str], is_spans: bool | None = None) -> tuple[bool, dict[str, str]]:
    """Whether labels name spans (the schemes IOB1, IOB2, IOE, IOBES, BILOU and BMES), and faults of other labels.

    Without ``is_spans`` most of the labels decide, "O" aside: a stray label does not change how the others are scored.

    >>> span_scheme(["B-PER", "I-PER", "O", "b-PER"])
    (True, {'b-PER': "the label 'b-PER' is of no scheme of spans, as other labels are, and counts as O in metrics"})
    >>> span_scheme(["NOUN", "VERB", "O"])
    (False, {})
    """
    labels = [name for name in names if name != "O"]
    letters = set("BIESLUMW") if "B" in labels else set()  # spans of one kind have no name
    spans = [label for label in labels if label in letters or _SPAN_LABEL.fullmatch(label)]
    others = [label for label in labels if label not in spans]
    if is_spans or (is_spans is None and len(spans) >= len(others)):
        fault = "is of no scheme of spans, as other labels are, and counts as O in metrics"
        return True, {label: f"the label {label!r} {fault}" for label in others}
    fault = "is one of a span, as other labels are not, and counts for its token alone in metrics"
    return False, {} if is_spans is False else {label: f"the label {label!r} {fault}" for label in spans}


def checked_labels(value: Any, where: str) -> dict[int, str]:
    """``id2label`` with int keys, from a mapping (its keys may be strings, as in JSON) or a list."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    try:
        labels = {int(key): str(label) for key, label in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigTypeError(
            f"{where}.id2label: got {value!r}; it must map whole numbers to texts, such as {{0: 'no', 1: 'yes'}}."
        ) from None
    return dict(sorted(labels.items()))


def id2label_of_data(value: Any, where: str) -> dict[int, str] | None:
    """``id2label`` of a data set: None is inferred, and no label occurs twice."""
    labels = None if value is None else checked_labels(value, where)
    names = [] if labels is None else list(labels.values())
    if len(set(names)) < len(names):
        twice = next(label for label in names if names.count(label) > 1)
        raise ConfigError(f"{where}.id2label: {twice!r} occurs twice.")
    return labels


def id2label_of_model(value: Any, where: str) -> dict[int, str]:
    """``id2label`` of a model, which has a score for each id: 0, 1, 2, ..."""
    labels = checked_labels(value, where)
    gap = next((i for i in range(len(labels) or 1) if i not in labels), None)
    if gap is not None:
        raise ConfigError(f"{where}.id2label: the ids are 0, 1, 2, ... without a gap; {gap} is missing.")
    return labels


def characters_of_model(value: Any, silent_id: int, field: str, where: str) -> dict[int, str]:
    """``id2label`` of a model whose texts leave out one id (CTC's blank, padding). ``field`` is the name of that id."""
    labels = id2label_of_model(value, where)
    if silent_id not in labels:
        raise ConfigError(f"{where}.{field}: got {silent_id}; it must be an id of id2label, 0 to {len(labels) - 1}.")
    if len(labels[silent_id]) == 1:
        raise ConfigError(
            f"{where}.id2label: id {silent_id} is {field}, which is left out of texts, and stands for the character "
            f"{labels[silent_id]!r} here. Give it the text '' and move the characters up by one."
        )
    return labels


def composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def stripped(text: str) -> str:
    """The text without direction marks, and without white space at its ends.

    >>> stripped("\\u200f ab\\u200e c ")
    'ab c'
    """
    return text.translate(_DIRECTION_MARKS).strip()


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
    if label is None or _is_collection(label) or label != label:
        return None
    name = str(label) if str(label) in label2id else _name_of(label)
    if name in label2id:
        return label2id[name]
    is_id = name.isdecimal() and int(name) in label2id.values()  # a CSV file has ids as text
    return int(name) if is_id else None


def known_id(label: Any, label2id: Mapping[str, int]) -> int:
    """The id of a class as in `id_of`.

    Raises:
        DataError: there is no such class.
    """
    number = id_of(label, label2id)
    if number is None:
        raise DataError(class_fault(label, label2id))
    return number


def class_fault(label: Any, label2id: Mapping[str, int]) -> str | None:
    """What is wrong with the label of a class; None if it is valid."""
    if _is_collection(label):
        return f"the label {label!r} is a {type(label).__name__}; a label is a text or a number"
    if id_of(label, label2id) is not None:
        return None
    if _is_missing(label):
        return f"the label is missing (got {label!r}); if that is a class, set id2label with it"
    return f"the label {label!r} is not in id2label. {did_you_mean(str(label), label2id)}"


def _name_of(label: Any) -> str:
    return stripped(str(int(label) if isinstance(label, float) and label.is_integer() else label))


def _is_collection(label: Any) -> bool:
    return isinstance(label, Collection) and not isinstance(label, str)


def _is_missing(label: Any) -> bool:
    """Whether it is None, NaN, or what pandas writes into a file for them."""
    return label is None or label != label or _name_of(label).lower() in ("", "nan", "<na>")

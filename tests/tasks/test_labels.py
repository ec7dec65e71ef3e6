"""Texts as the ids of their characters."""

import pytest

from trainwright.config.errors import ConfigError
from trainwright.tasks.labels import fault_of, id_of, labels_of, labels_of_data, reverse_digits


def test_the_blank_comes_first_and_the_rest_is_sorted() -> None:
    assert labels_of(["b۱", "ab"]) == {0: "", 1: "a", 2: "b", 3: "۱"}
    assert labels_of(["e\u0301", "é"]) == {0: "", 1: "é"}  # one character, however it was typed


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("۱۲ب۳۴۵", "۲۱ب۵۴۳"), ("12a345b", "21a543b"), ("ab", "ab"), ("", ""), ("1٢3", "3٢1"), ("123 123", "321 321")],
)
def test_each_run_of_digits_is_reversed(text: str, wanted: str) -> None:
    assert reverse_digits(text) == wanted
    assert reverse_digits(wanted) == text


def test_id2label_of_files() -> None:
    assert labels_of_data({"1": "a", "0": ""}, "X") == {0: "", 1: "a"}
    assert labels_of_data(["", "a"], "X") == {0: "", 1: "a"}
    assert labels_of_data(None, "X") is None
    for wrong in ("ab", {"x": "a"}, 3):
        with pytest.raises(ConfigError, match=r"X\.id2label: got .*must map whole numbers to texts"):
            labels_of_data(wrong, "X")
    with pytest.raises(ConfigError, match=r"X\.id2label: 'a' occurs twice"):
        labels_of_data(["a", "a"], "X")


def test_what_is_wrong_with_a_label() -> None:
    label2id = {"": 0, "a": 1}
    assert fault_of("aa", label2id, 2) is None
    assert fault_of("", label2id, 2) == "the label is empty"
    assert fault_of("aaa", label2id, 2) == "the label 'aaa' has 3 characters; max_length is 2"
    assert "'\\u200c' (U+200C ZERO WIDTH NON-JOINER)" in str(fault_of("a\u200c", label2id, None))


def test_a_class_by_its_label_or_id() -> None:
    label2id = {"neg": 0, "pos": 1}
    assert [id_of(label, label2id) for label in ("pos", 1, "1", 2, True, None)] == [1, 1, 1, None, None, None]

"""Splits as files: found, read, and where they are broken."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.base.errors import ConfigError, ConfigKeyError, MissingFileError
from trainwright.data import DataError
from trainwright.tasks.tables import check_columns, columns_of, find_split, raise_faults, read_rows, split_files


def test_splits_are_found_in_all_forms(tmp_path: Path) -> None:
    for name in ("train.csv", "test.jsonl", "validation.txt", "extra/labels.csv", "README.txt", "notes.md", "a/b.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("a\n1\n")
    assert {split: path.relative_to(tmp_path).as_posix() for split, path in split_files(tmp_path).items()} == {
        "extra": "extra/labels.csv",
        "test": "test.jsonl",
        "train": "train.csv",
        "validation": "validation.txt",
    }
    assert find_split(tmp_path, "train") == ("train", tmp_path / "train.csv")
    with pytest.raises(ConfigKeyError, match=r"'tran'.*'train'.*extra, test, train, validation"):
        find_split(tmp_path, "tran")
    with pytest.raises(ConfigError, match="choose one with split="):
        find_split(tmp_path, None)
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"'train' has two files.*Keep one"):
        split_files(tmp_path)


def test_one_split_needs_no_name_and_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"has no split: a file such as train\.csv"):
        find_split(tmp_path, "train")
    (tmp_path / "all.csv").write_text("a\n1\n")
    assert find_split(tmp_path, None)[0] == "all"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_of_any_spreadsheet(delimiter: str, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    text = f'\ufeffimage_path{delimiter} label\r\na.png{delimiter}"1{delimiter} ""2"""\r\n\r\nb.png{delimiter}۱\r\n'
    path.write_bytes(text.encode())
    rows = read_rows(path)
    assert rows == [{"image_path": "a.png", "label": f'1{delimiter} "2"'}, {"image_path": "b.png", "label": "۱"}]
    assert [row.where for row in rows] == [f"{path}, line 2", f"{path}, line 4"]
    assert columns_of(path) == ["image_path", "label"]


@pytest.mark.parametrize("ending", ["csv", "tsv"])
@pytest.mark.parametrize(
    "content", ["\n  \nx;label\na;1\n", "\r\nx;label\r\na;1\r\n", "x;label\ra;1\r", "\rx;label\ra;1"]
)
def test_blank_first_lines_and_all_line_ends(content: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"train.{ending}"
    path.write_bytes(content.replace(";", "\t" if ending == "tsv" else ";").encode())
    assert columns_of(path) == ["x", "label"]
    assert read_rows(path) == [{"x": "a", "label": "1"}]
    path.write_text("x" * 200_000)
    with pytest.raises(DataError, match=f"train.{ending}: the header is not valid as CSV"):
        columns_of(path)


def test_stray_quotes_of_a_tsv_merge_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('x\ty\n"Hi\t1\nthere"\t2\n"a ""b"""\t3\n"c" d\t4\n')
    assert [row["x"] for row in read_rows(tmp_path / "a.tsv")] == ['"Hi', 'there"', 'a "b"', '"c" d']
    (tmp_path / "a.tsv").write_text('x\ty\n"two\nlines"\t1\n')  # as pandas writes them
    assert read_rows(tmp_path / "a.tsv") == [{"x": "two\nlines", "y": "1"}]


def test_jsonl(tmp_path: Path, make: Callable) -> None:
    path = make("jsonl", tmp_path / "train.jsonl", [{"text": "a\u2028b\nc", "label": 1}, {"text": "د", "label": 2}])
    assert read_rows(path) == [{"text": "a\u2028b\nc", "label": 1}, {"text": "د", "label": 2}]
    assert columns_of(path) == ["text", "label"]
    (tmp_path / "train.json").write_text('[\n{"text": "a"}, {"text": "b"}]')
    assert read_rows(tmp_path / "train.json") == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.csv", "x,y\n1,2\n3\n", r"a\.csv, line 3: has 1 fields; the header has 2 \(x, y\)"),
        ("a.csv", "x,y\n1,2,3\n", "line 2: has 3 fields"),
        ("a.csv", 'x,y\n1,"2\n', "not valid as CSV"),
        ("a.csv", "x,y,x\n1,2,3\n", "has two columns 'x'"),
        ("a.tsv", "x\ty\n1\t2\n3\n", "line 3: has 1 fields"),
        ("a.csv", "x,y\n", "has no rows"),
        ("a.csv", "", "has no rows"),
        ("a.jsonl", '{"x": 1}\n{x}\n', r"a\.jsonl, line 2: not valid JSON"),
        ("a.jsonl", '{"x": "fine"}\n{"x": ["cut \\ud83d"]}\n', r"a\.jsonl, line 2: has '\\ud83d', one half of"),
        ("a.json", '[{"x": "fine"}, {"x": "\\uDE00"}]', r"a\.json, row 2: has '\\ude00'"),
        ("a.jsonl", "[1]\n", "line 1: must be an object"),
        ("a.jsonl", "\n", "has no rows"),
    ],
)
def test_broken_rows_are_named(name: str, content: str, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=match):
        read_rows(tmp_path / name)


def test_missing_columns_are_reported_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("image,lable\n1,2\n")
    with pytest.raises(ConfigKeyError, match=r"no column 'label'. Did you mean 'lable'\?") as caught:
        check_columns(tmp_path / "a.csv", read_rows(tmp_path / "a.csv")[0], ["image_path", "label"])
    assert "no column 'image_path'" in str(caught.value)
    # Another encoding is reported.
    (tmp_path / "a.csv").write_bytes("x\né\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.csv: is not UTF-8.*Save it as UTF-8"):
        read_rows(tmp_path / "a.csv")


def test_many_faults_are_one_error() -> None:
    raise_faults([], 10)
    with pytest.raises(DataError) as caught:
        raise_faults([f"fault {n}" for n in range(8)], 10)
    assert str(caught.value).splitlines()[0] == "fault 0"
    assert "... and 3 more." in str(caught.value)
    assert "8 of 10 rows cannot be used" in str(caught.value)


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_cells_may_be_as_long_as_an_article(delimiter: str, tmp_path: Path) -> None:
    before, article = csv.field_size_limit(), '"' + "word\n" * 40_000 + '"'
    (tmp_path / "a.csv").write_text(f"x{delimiter}y\n{article}{delimiter}1\n")
    assert read_rows(tmp_path / "a.csv") == [{"x": article.strip('"'), "y": "1"}]
    assert csv.field_size_limit() == before  # it is that of the process


def test_complete_emojis_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": "\\ud83d\\ude00"}\n')
    assert read_rows(tmp_path / "a.jsonl") == [{"x": "\N{GRINNING FACE}"}]

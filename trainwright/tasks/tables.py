"""Splits of a data set as tables: ``train.csv``, ``train.tsv``, ``test.jsonl``, ``train.txt``, ``train/labels.csv``."""

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainwright.base.errors import ConfigError, ConfigKeyError, MissingFileError, did_you_mean
from trainwright.data.errors import DataError
from trainwright.events.formats import cells_up_to


class FileFinder:
    """Finds files in the folder of the table, in the root folder of the data, and in ``subfolder`` of both.

    Each folder is listed once, however many rows name a file in it.
    """

    def __init__(self, table_folder: Path, root: Path, subfolder: str, *, is_foreign: bool = False) -> None:
        """``is_foreign``: the table is from an untrusted source and must not name a file outside of ``root``."""
        self._root = os.path.join(os.path.abspath(root), "") if is_foreign else None
        roots = dict.fromkeys(os.path.abspath(folder) for folder in (table_folder, root))
        self._places = [place for base in roots for place in (base, os.path.join(base, subfolder))]
        self._listed: dict[str, tuple[str, frozenset[str]]] = {}

    @property
    def places(self) -> str:
        """The searched folders, for messages."""
        return ", ".join(self._places)

    def find(self, name: str) -> str | None:
        """The absolute path of a file; None if it is not found. Windows' separators are accepted, too."""
        if not name:
            return None
        for spelling in [name, name.replace("\\", "/")] if "\\" in name else [name]:
            for place in self._places:
                folder, file = os.path.split(os.path.join(place, os.path.expanduser(spelling)))
                absolute, files = self._listing(folder)
                is_allowed = self._root is None or os.path.join(absolute, "").startswith(self._root)
                if file in files and is_allowed:
                    return os.path.join(absolute, file)
        return None

    def _listing(self, folder: str) -> tuple[str, frozenset[str]]:
        if folder not in self._listed:
            try:
                with os.scandir(folder) as entries:
                    files = frozenset(entry.name for entry in entries if entry.is_file())
            except OSError:
                files = frozenset()
            self._listed[folder] = (os.path.abspath(folder), files)
        return self._listed[folder]


_ENDINGS = (".csv", ".tsv", ".jsonl")
COLUMN_FILES = (".conll", ".conllu", ".bio")  # a token in each line
_OTHER_ENDINGS = (".txt", ".json", *COLUMN_FILES)  # of these splits; another such file may be a README or settings
_SPLITS = ("train", "validation", "valid", "dev", "eval", "test")
_IN_FOLDER = [f"labels{ending}" for ending in _ENDINGS]
_DELIMITERS = ",;\t"
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
_SHOWN = 5  # faults that an error lists


class Row(dict[str, Any]):
    """A row: values by column. ``where`` is its file and line, for messages."""

    where: str = ""

    def at(self, where: str) -> "Row":
        self.where = where
        return self

    def with_values(self, **values: Any) -> "Row":
        """A row of other values from the same place."""
        return Row(values).at(self.where)


def split_files(folder: Path) -> dict[str, Path]:
    """The file of each split in a folder, by the name of the split, sorted."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        files = [path / name for name in _IN_FOLDER] if path.is_dir() else [path]
        for file in files:
            split = path.name if path.is_dir() else path.stem
            is_split = file.suffix in _ENDINGS or (file.suffix in _OTHER_ENDINGS and split in _SPLITS)
            if not (is_split and file.is_file()) or split.startswith("."):
                continue
            if split in found:
                raise ConfigError(f"{folder}: the split {split!r} has two files, {found[split]} and {file}. Keep one.")
            found[split] = file
    return found


def find_split(folder: Path, split: str | None) -> tuple[str, Path]:
    """Name and file of a split; of the only split for None."""
    files = split_files(folder)
    if not files:
        names = sorted(path.name for path in folder.iterdir())[:8]
        raise MissingFileError(
            f"{folder}: has no split: a file such as train.csv, train.tsv, train.jsonl, train.json, train.txt, "
            "train.conll or train/labels.csv; "
            f"it has {names}."
        )
    if split is None:
        if len(files) > 1:
            raise ConfigError(f"{folder}: has the splits {', '.join(files)}; choose one with split=.")
        split = next(iter(files))
    if split not in files:
        raise ConfigKeyError(
            f"{folder}: has no split {split!r}. {did_you_mean(split, files)} (It has {', '.join(files)}.)"
        )
    return split, files[split]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of JSON lines, or of a CSV or TSV file with a header, in order; UTF-8."""
    text = read_text(path)
    rows = _json(path, text) if path.suffix in (".json", ".jsonl") else _csv(path, text)
    if not rows:
        raise DataError(f"{path}: has no rows.")
    return rows


def read_text(path: Path) -> str:
    """The content of a UTF-8 file, without the byte order mark of spreadsheet programs; lines may end in CR alone."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 ({error}). Save it as UTF-8.") from error
    return text if "\n" in text else text.replace("\r", "\n")


def columns_of(path: Path) -> list[str]:
    """The columns of a file, from its header or its first row; ``["text"]`` for a text file."""
    if path.suffix == ".txt":
        return ["text"]
    if path.suffix in COLUMN_FILES:
        return ["tokens", "labels"]
    if path.suffix in (".json", ".jsonl"):
        return list(read_rows(path)[0])
    header = _header(read_text(path))
    try:
        return [name.strip() for name in next(csv.reader([header], delimiter=_delimiter(header)), [])]
    except csv.Error as error:
        raise DataError(f"{path}: the header is not valid as CSV: {error}") from error


def text_of(row: Row, column: str) -> str:
    """A field as text: "" if it is missing, a number of JSON as its digits.

    Raises:
        DataError: it is a list or an object.
    """
    value = row.get(column)
    if isinstance(value, list | dict):
        raise DataError(f"{row.where}: {column} is a {type(value).__name__}; it must be a text or a number: {value!r}")
    return "" if value is None or value != value else str(value)


def check_columns(path: Path, row: Row, wanted: Iterable[str]) -> None:
    """Check that a file has the columns that a data set needs."""
    wanted = list(wanted)
    faults = [
        f"{path}: has no column {name!r}. {did_you_mean(name, row)} (Its columns: {', '.join(row)}.)"
        for name in wanted
        if name not in row
    ]
    if len(faults) == len(wanted) and path.suffix in (".csv", ".tsv"):
        faults.append(f"Is the header missing? Then write {','.join(wanted)} as the first line.")
    if faults:
        raise ConfigKeyError("\n".join(faults))


def raise_faults(faults: Sequence[str], total: int) -> None:
    """Raise one error about all faults of ``total`` rows; it lists the first ones."""
    if not faults:
        return
    rest = f"\n... and {len(faults) - _SHOWN} more." if len(faults) > _SHOWN else ""
    shown = "\n".join(faults[:_SHOWN])
    raise DataError(f"{shown}{rest}\n{len(faults)} of {total} rows cannot be used: fix or remove them.")


def _csv(path: Path, text: str) -> list[Row]:
    lines = _lines_of_csv(path, text, _delimiter(_header(text)))
    while lines and not "".join(lines[0][1]).strip():
        del lines[0]
    header = [name.strip() for name in lines[0][1]] if lines else []
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        raise DataError(f"{path}: has two columns {twice!r}. Remove or rename one.")
    for line, fields in lines:
        if len(fields) != len(header):
            raise DataError(
                f"{path}, line {line}: has {len(fields)} fields; the header has {len(header)} ({', '.join(header)}). "
                'Quote a field that contains a comma: "a, b".'
            )
    return [Row(zip(header, fields, strict=True)).at(f"{path}, line {line}") for line, fields in lines[1:]]


def _lines_of_csv(path: Path, text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """The fields of each line that is not empty, with the number of the line."""
    by_tabs = []
    if delimiter == "\t":  # most such files have no quoted fields, and a quotation mark is one of the text
        lines = ((number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1))
        by_tabs = [(number, [*map(_unquoted, line.split("\t"))]) for number, line in lines if line]
        if _is_even(by_tabs):
            return by_tabs
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    found, line = [], 1
    try:
        with cells_up_to(len(text)):
            for fields in reader:
                found.append((line, fields))
                line = reader.line_num + 1
    except csv.Error as error:
        if not by_tabs:
            raise DataError(f"{path}, line {line}: not valid as CSV: {error}") from error
        return by_tabs
    found = [(number, fields) for number, fields in found if fields]
    return by_tabs if by_tabs and not _is_even(found) else found


def _is_even(lines: list[tuple[int, list[str]]]) -> bool:
    return len({len(fields) for _, fields in lines}) <= 1


def _unquoted(field: str) -> str:
    return field[1:-1].replace('""', '"') if _QUOTED.fullmatch(field) else field


def _json(path: Path, text: str) -> list[Row]:
    if path.suffix == ".json" and text.lstrip().startswith("["):
        found = [(f"{path}, row {number}", row) for number, row in enumerate(_parsed(text, str(path)), start=1)]
    else:  # not splitlines, which also splits at U+2028 in a text
        lines = ((f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), start=1))
        found = [(where, _parsed(line, where)) for where, line in lines if line.strip()]
    for where, content in found:
        if not isinstance(content, dict):
            raise DataError(f'{where}: must be an object, {{"column": value, ...}}; got {json.dumps(content)[:60]}')
        if "\\ud" in text or "\\uD" in text:  # JSON's way to write half of a character
            _check_characters(where, content)
    return [Row(content).at(where) for where, content in found]


def _check_characters(where: str, row: dict[str, Any]) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(
            f"{where}: has {half!a}, one half of a surrogate pair, which is no character. Was a text cut within an "
            "emoji? Remove it."
        ) from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error


def _header(text: str) -> str:
    """The first line that is not blank; empty fields are blank, too."""
    lines = io.StringIO(text, newline="")  # splits at all line ends
    return next((line.rstrip("\r\n") for line in lines if line.strip(f' "\r\n{_DELIMITERS}')), "")


def _delimiter(header: str) -> str:
    return max(_DELIMITERS, key=header.count)  # the comma if the header has none of them

"""examples/tasks/label_tokens.py learns what is named in a line of Python; the labels that it is taught are right."""

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TASKS = Path(__file__).parents[2] / "examples" / "tasks"


@pytest.mark.exhaustive
def test_spans_are_found_far_better_than_by_each_tokens_commonest_label(run_python: Callable, tmp_path: Path) -> None:
    done = run_python("-W", "error", TASKS / "label_tokens.py", "--quick", cwd=tmp_path)
    f1, commonest = map(float, re.search(r"^f1: (\S+) \(.*: (\S+)\)", done.stdout, flags=re.MULTILINE).groups())
    assert commonest < 0.3
    assert f1 > commonest + 0.3  # 0.74 was measured, against 0.13

    from seqeval.metrics import f1_score

    rows = read(tmp_path / "output" / "label_tokens" / "predictions.jsonl")
    assert abs(f1_score([row["labels"] for row in rows], [row["predicted"] for row in rows]) - f1) < 6e-4
    trained = read(tmp_path / "output" / "label_tokens" / "data" / "train.jsonl")
    assert len(rows) == 750
    assert not {tuple(row["tokens"]) for row in trained} & {tuple(row["tokens"]) for row in rows}


@pytest.fixture
def token_labels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TASKS))
    return importlib.import_module("token_labels")


@pytest.mark.parametrize(
    ("line", "marked"),
    [
        ("async def f(x: int, *, y=1, **k): ...", ["FUNCTION f", "PARAMETER x", "PARAMETER y", "PARAMETER k"]),
        ("class A(b.C, D, metaclass=M): ...", ["CLASS A", "BASE b . C", "BASE D", "KEYWORD metaclass"]),
        ("from .a.b import c as d", ["MODULE . a . b"]),
        ("import os.path as p, re", ["MODULE os . path", "MODULE re"]),
        ("x = a.b.c(1, key='é', **rest)(2) + d(e())", ["CALL a . b . c", "KEYWORD key", "CALL d", "CALL e"]),
        ("call().method('é', other)", ["CALL call"]),
        ("g = lambda first, *more: first", ["PARAMETER first", "PARAMETER more"]),
        ("x = y.z", []),
    ],
)
def test_labels_are_what_the_parser_says(token_labels: ModuleType, line: str, marked: list[str]) -> None:
    (row,) = token_labels.labeled_lines(line + "\n")
    found: list[str] = []
    for token, label in zip(row["tokens"], row["labels"], strict=True):
        if label.startswith("B-"):
            found.append(f"{label[2:]} {token}")
        elif label != "O":
            assert found[-1].startswith(label[2:])
            found[-1] += f" {token}"
    assert found == marked


def test_lines_with_f_strings_are_left_out(token_labels: ModuleType) -> None:
    source = 'a = f"{b(c)} é"\nd = rF"""\n{e}"""\nf("f")\n'
    assert [row["tokens"] for row in token_labels.labeled_lines(source)] == [["f", "(", '"..."', ")"]]


def read(path: Path) -> list[dict[str, list[str]]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

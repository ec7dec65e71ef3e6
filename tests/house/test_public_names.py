"""What users' code depends on is what ``tests/public_names.txt`` lists, and all that the documents name is in it."""

import ast
import difflib
import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainwright

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "public_names.py"))
COMMAND = "python tools/public_names.py > tests/public_names.txt"


def test_the_public_names_are_those_of_the_list() -> None:
    listed = (ROOT / "tests" / "public_names.txt").read_text(encoding="utf-8").splitlines()
    changes = difflib.unified_diff(listed, TOOL["public_names"]().splitlines(), "listed", "in the package", lineterm="")
    text = "\n".join(changes)
    assert not text, f"docs/stability.md says what a version may change; then: {COMMAND}\n{text}"


def test_members_that_are_not_public_are_there() -> None:
    classes = {
        name: getattr(importlib.import_module(module), name)
        for module in TOOL["MODULES"]
        for name in TOOL["names_of"](module)
    }
    for name, members in TOOL["INTERNAL"].items():
        known = {member for kind in classes[name].__mro__ for member in vars(kind)}
        source = "".join(
            Path(importlib.import_module(kind.__module__).__file__ or "").read_text(encoding="utf-8")
            for kind in classes[name].__mro__
            if kind.__module__.startswith("trainwright.")
        )
        missing = [one for one in members.split() if one not in known and f"self.{one}" not in source]
        assert not missing, name


def imported_names() -> Iterator[tuple[str, str, str]]:
    """What the programs of the documents and of the examples import: the file, the module and the name."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for block in re.findall(r"(?ms)^```python\n(.*?)^```", page.read_text(encoding="utf-8")):
            yield from ((page.name, *found) for found in imports_of(block))
    for program in (ROOT / "examples").rglob("*.py"):
        yield from ((program.name, *found) for found in imports_of(program.read_text(encoding="utf-8")))


def imports_of(program: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(program)
    except SyntaxError:  # a part of a program
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trainwright":
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_what_the_documents_import_is_public() -> None:
    found = {*imported_names()}
    assert len({name for _, _, name in found}) > 60
    modules = TOOL["MODULES"]
    names = {module: {*TOOL["names_of"](module)} for module in modules}
    private = [one for one in found if one[2] not in names.get(one[1], ()) and f"{one[1]}.{one[2]}" not in modules]
    assert not private


def test_the_page_names_the_modules_that_are_public() -> None:
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    part = page.partition("## What is public")[2].partition("Not public")[0]
    assert {*re.findall(r"`(trainwright[\w.]*)`", part)} == {*TOOL["MODULES"]}


@pytest.mark.parametrize("name", trainwright.__all__)
def test_a_top_level_name_is_there(name: str) -> None:
    assert getattr(trainwright, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trainr"):
        trainwright.Trainr  # noqa: B018
    with pytest.raises(AttributeError, match=r"'trainwright\.data' has no attribute 'Datset'"):
        importlib.import_module("trainwright.data").Datset  # noqa: B018


@pytest.mark.parametrize(
    ("package", "name", "line"),
    [
        ("trainwright", "EarlyStoppingCallback", "from trainwright.hooks import EarlyStoppingCallback"),
        ("trainwright", "EarlyStopping", "from trainwright.hooks import EarlyStoppingCallback"),
        ("trainwright", "HookBase", "from trainwright.hooks import HookBase"),
        ("trainwright.engine", "EventStorage", "from trainwright.events import EventStorage"),
        ("trainwright.hooks", "Trainer", "from trainwright import Trainer"),
        ("trainwright.data", "Datset", "from trainwright.data import Dataset"),
    ],
)
def test_a_name_of_another_package_is_answered_with_its_import(package: str, name: str, line: str) -> None:
    with pytest.raises(ImportError, match=f"`{line}`"):
        exec(f"from {package} import {name}")
    with pytest.raises(AttributeError, match=f"`{line}`"):
        getattr(importlib.import_module(package), name)
    assert not hasattr(importlib.import_module(package), name)

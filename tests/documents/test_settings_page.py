"""The reference pages are those that the table of settings makes, and the tables of other pages name its defaults."""

import ast
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainwright import get_config
from trainwright.config.settings import KEYS, TrainingConfig
from trainwright.optim.weight_average import WeightAverage

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = runpy.run_path(str(ROOT / "tools" / "reference_page.py"))
reference_page, keys_page = PAGES["reference_page"], PAGES["keys_page"]
_OTHER_TEXT = ("", "see there")  # of a setting without a default, or with its defaults in another table
_NO_PARAMETERS = ("start", "every")  # keys of ``ema`` that no signature has


def tables(page: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Head and rows of each table with a column of defaults."""
    table: list[list[str]] = []
    for line in [*(DOCS / page).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif table:
            head, _, *rows = table
            if "default" in head:
                yield head, rows
            table = []


def stated(page: str) -> Iterator[tuple[str, str]]:
    """Each setting of the tables of a page, and the text of its default."""
    for head, rows in tables(page):
        prefix = "train.evaluation." if head[0] == "key of `train.evaluation`" else ""
        for row in rows:
            names, text = re.findall(r"`([^`]+)`", row[0]), row[head.index("default")]
            texts = text.split(", ") if len(names) > 1 and ", " in text else [text] * len(names)
            for name, one in zip(names, texts, strict=True):
                full = names[0].rpartition(".")[0] + name if name.startswith(".") else prefix + name
                yield full, one.partition(":")[0].strip("`")


def real_default(page: str, name: str) -> Any:
    if page == "finetuning.md":
        return inspect.signature(WeightAverage).parameters[name].default
    value = OmegaConf.select(get_config("common/defaults.py"), name, throw_on_missing=True, default=Ellipsis)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


@pytest.mark.parametrize("page", ["training.md", "evaluation.md", "finetuning.md"])
def test_the_tables_have_the_defaults_of_the_settings(page: str) -> None:
    found = [(name, text) for name, text in stated(page) if text not in _OTHER_TEXT and name not in _NO_PARAMETERS]
    assert len(found) >= 3
    for name, text in found:
        real = real_default(page, name)
        if isinstance(real, dict):  # a lazy call
            assert real["_target_"].rpartition(".")[2] == text.partition("(")[0], name
        else:
            assert ast.literal_eval(text) == real, name


def test_the_pages_are_current() -> None:
    for name, page, argument in (("trainer-config", reference_page, ""), ("config-reference", keys_page, " config")):
        command = f"python tools/reference_page.py{argument} > docs/{name}.md"
        assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == page(), f"regenerate it: {command}"


def test_the_page_of_config_files_has_every_key_and_its_default() -> None:
    page = keys_page()
    for path in KEYS:
        assert f"\n| `{path}` | " in page
    assert "| `train.log_period` | int >= 1, or a share | `20` | " in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {7}


def test_the_page_has_every_name() -> None:
    page = reference_page()
    for name in TrainingConfig.model_fields:
        assert f"\n| `{name}` | " in page
    for name in TrainingConfig.aliases:
        assert f"`{name}`" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}

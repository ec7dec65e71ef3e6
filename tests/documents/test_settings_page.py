"""The reference pages in docs are those that the table of settings makes."""

import runpy
from pathlib import Path

from trainwright.config.settings import KEYS, TrainingConfig

ROOT = Path(__file__).parents[2]
PAGES = runpy.run_path(str(ROOT / "tools" / "reference_page.py"))
reference_page, keys_page = PAGES["reference_page"], PAGES["keys_page"]


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
    assert {row.count("|") for row in rows} == {6}


def test_the_page_has_every_name() -> None:
    page = reference_page()
    for name in TrainingConfig.model_fields:
        assert f"\n| `{name}` | " in page
    for name in TrainingConfig.aliases:
        assert f"`{name}`" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {6}

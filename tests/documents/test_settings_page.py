"""The reference page in docs is the one that the settings make."""

import runpy
from pathlib import Path

from trainwright.config.training.aliases import ALIASES
from trainwright.config.training.training_config import TrainingConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trainer-config.md"
reference_page = runpy.run_path(str(ROOT / "tools" / "reference_page.py"))["reference_page"]


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_page(), (
        "regenerate it: python tools/reference_page.py > docs/trainer-config.md"
    )


def test_the_page_has_every_name() -> None:
    page = reference_page()
    for name in TrainingConfig.model_fields:
        assert f"\n| `{name}` | " in page
    for name in ALIASES:
        assert f"`{name}`" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {6}

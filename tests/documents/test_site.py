"""What surrounds the documentation: messages that a page quotes, and the files that a host of repositories reads."""

import re
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
QUOTED = re.findall(r"(?m)^### (.*)$", (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
OF_TORCH = "CUDA out of memory"


@pytest.mark.parametrize("heading", [heading for heading in QUOTED if OF_TORCH not in heading])
def test_a_message_of_the_troubleshooting_page_is_one_of_ours(heading: str) -> None:
    message = heading.strip("`")
    sources = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "trainwright").rglob("*.py"))
    assert any(message in re.sub(r'"\n\s*f?"', "", source) for source in sources), message


@pytest.mark.parametrize(
    "name", ["CITATION.cff", *(str(p.relative_to(REPOSITORY)) for p in REPOSITORY.glob(".github/**/*.yml"))]
)
def test_files_of_the_host_are_valid(name: str) -> None:
    content = yaml.safe_load((REPOSITORY / name).read_text(encoding="utf-8"))
    expected = {"cff-version", "title", "authors"} if name == "CITATION.cff" else {"name"}
    assert expected <= set(content)


def test_the_site_does_not_break_names_of_settings() -> None:
    options = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    style = (REPOSITORY / "docs" / "site.css").read_text(encoding="utf-8")
    assert "extra_css: [site.css]" in options
    assert re.search(r"td:first-child code \{\s*white-space: nowrap", style)
    assert re.search(r"td code,[^}]*word-break: normal", style)


@pytest.mark.parametrize("page", sorted(REPOSITORY.glob("docs/*.md")), ids=lambda page: page.stem)
def test_code_in_tables_looks_the_same_on_the_site_and_in_the_repository(page: Path) -> None:
    """In code in a table, one shows an escaped bar with its backslash, the other ends the cell at a bar without it."""
    rows = (line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|"))
    assert [code for row in rows for code in re.findall(r"`[^`]*`", row) if "|" in code] == []

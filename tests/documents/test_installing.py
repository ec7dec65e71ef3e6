"""One place says how the package is installed, and what names a version names this one."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import trainwright

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# A clone or an index: `pip install .`, `pip install '.[texts]'`, `pip install trainwright`.
OWN = re.compile(r"pip install (?:-\S+ )*['\"]?(?:\.(?=[\s'\"\[`]|$)|trainwright\b)")


def test_only_one_place_says_how_to_install_the_package() -> None:
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "trainwright").rglob("*.py")]
    found = [
        (path.name, line)
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if OWN.search(line)
    ]
    ((name, line),) = found
    assert name == "README.md"
    in_clone, _, from_index = line.partition("#")
    assert in_clone.strip() == "pip install '.[examples]'"
    assert from_index.endswith("pip install 'trainwright[examples]'")


def test_the_table_of_extras_has_all_that_a_user_needs() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Install")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"(?m)^\| (`.*?) \|", page) for name in re.findall(r"`(\w+)`", row)}
    assert named == {*PROJECT["optional-dependencies"]} - {"test", "site", "check", "release"}


def test_all_that_names_the_version_names_the_same() -> None:
    version = PROJECT["version"]
    assert trainwright.__version__ == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    command = [sys.executable, "-m", "trainwright", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"trainwright {version}\n"
    assert (ROOT / "tests" / "releases" / version).is_dir()


def test_the_changelog_begins_with_this_version_or_what_follows_it() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"(?m)^## (.*)$", text)
    dates = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in headings]
    assert all(dates) or (headings[0] == "[Unreleased]" and all(dates[1:])), headings
    released = [match for match in dates if match]
    assert released[0][1] == PROJECT["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["date-released"]) == released[0][2]


def test_the_supported_versions_are_the_same_everywhere() -> None:
    prefix = "Programming Language :: Python :: 3."
    pythons = [f"3.{line.removeprefix(prefix)}" for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    assert f"| Python | {', '.join(pythons)} |" in page
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == pythons
    row = re.search(r"(?m)^\| torch \| ([\d., ]+) \|", page)
    assert row is not None
    torches = row[1].split(", ")
    assert len(torches) == 4
    assert f"torch>={torches[0]}" in PROJECT["dependencies"]
    assert workflow["jobs"]["torch"]["strategy"]["matrix"]["torch"] == torches


@pytest.mark.parametrize("page", ["index.md", "tasks.md", "checkpoints.md"])
def test_other_pages_refer_to_it(page: str) -> None:
    assert "(../README.md#install)" in (ROOT / "docs" / page).read_text(encoding="utf-8")

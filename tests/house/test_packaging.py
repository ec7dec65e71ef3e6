"""The wheel carries what an installed library needs."""

import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_installed_elsewhere_has_the_default_configurations(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    files = run("git", "ls-files", "pyproject.toml", "README.md", "LICENSE", "trainwright", cwd=REPOSITORY).splitlines()
    for name in files:  # a copy, since building leaves folders behind
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((REPOSITORY / name).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    defaults = [f"trainwright/config/defaults/common/{name}.py" for name in ("train", "optim", "graph", "defaults")]
    assert {"trainwright/py.typed", *defaults} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "examples", "benchmarks"))]

    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel), cwd=tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import trainwright\n"
        f"assert trainwright.__file__.startswith({str(site)!r}), trainwright.__file__\n"
        "print(trainwright.get_config('common/train.py').train.seed)"
    )
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == "1234"


def test_a_release_names_one_version_everywhere(tmp_path: Path) -> None:
    version_faults = runpy.run_path(str(REPOSITORY / "tools" / "release.py"))["version_faults"]
    # After a release the changelog begins with what is not released.
    assert [one for one in version_faults(REPOSITORY) if "the first heading is [Unreleased]" not in one] == []
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "trainwright/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((REPOSITORY / name).read_bytes())
    project = tmp_path / "pyproject.toml"
    project.write_text(re.sub(r'(?m)^version = ".*"', 'version = "7.8.9"', project.read_text()))
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(re.sub(r"(?m)^## \[.*$", "## [Unreleased]", changes.read_text(), count=1))
    first, citation, heading, runs = version_faults(tmp_path)
    assert re.fullmatch(r"trainwright/__init__\.py: __version__ is \S+; pyproject\.toml has 7\.8\.9\.", first)
    assert citation.startswith("CITATION.cff: version is")
    assert heading == "CHANGELOG.md: the first heading is [Unreleased]; pyproject.toml has 7.8.9."
    assert runs.startswith("tests/releases/7.8.9: make the runs")

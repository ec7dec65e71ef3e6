"""Build the package, check it, and try it where it is installed: ``python tools/release.py [--torch 2.13.0 ...]``.

For each version of torch, the wheel is installed into an empty environment, where the programs of the README, the quick
tests and the type checks run; the sources of the package are not beside them. ``dist/`` gets the wheel, the source
archive and the lists of what the package depends on. Nothing is published.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TOOLS = Path(sys.executable).parent  # twine, mypy and the others, which are not in the environment under test
_QUICK = "not (exhaustive or slow or subprocess or compile)"
_OF_REPOSITORY = ("house", "documents", "torture")  # tests of the sources and documents, not of what is installed
_LICENSES = """
from importlib.metadata import distributions
for one in sorted(distributions(), key=lambda one: one.name.lower()):
    kinds = [line for line in one.metadata.get_all("Classifier", []) if line.startswith("License")]
    known = "; ".join(line.rpartition(" :: ")[2] for line in kinds)
    text = one.metadata.get("License-Expression") or known or one.metadata.get("License") or "?"
    print(one.name, one.version, text.splitlines()[0], sep="\\t")
"""


def main() -> None:
    """Do all steps; the first that fails ends the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", action="append", help="a version to try; by default that of constraints.txt")
    arguments = parser.parse_args()
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    versions = arguments.torch or re.findall(r"(?m)^torch==(.*)$", constraints)
    begin = time.monotonic()
    if faults := version_faults(ROOT):
        sys.exit("\n".join(faults))
    with tempfile.TemporaryDirectory(prefix="trainwright-release-") as folder:
        wheel = _build(Path(folder))
        for number, version in enumerate(versions):
            _try(wheel, version, Path(folder) / version, constraints, lists=number == len(versions) - 1)
    print(f"== Done in {time.monotonic() - begin:.0f} s. dist/ holds:", *sorted(path.name for path in DIST.iterdir()))


def version_faults(root: Path) -> list[str]:
    """What names another version than pyproject.toml; empty for a release."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    source = (root / "trainwright" / "__init__.py").read_text(encoding="utf-8")
    assigned = [ast.literal_eval(text) for text in re.findall(r"(?m)^__version__ = (.*)$", source)]
    heading = re.findall(r"(?m)^## (.*)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"))[0]
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    changes = re.fullmatch(r"\[(.+)\] - (\d{4}-\d\d-\d\d)", heading)
    found = {
        "trainwright/__init__.py: __version__": assigned[0],
        "CITATION.cff: version": citation["version"],
        "CHANGELOG.md: the first heading": changes[1] if changes else heading,
    }
    faults = [
        f"{place} is {other}; pyproject.toml has {version}." for place, other in found.items() if other != version
    ]
    if changes and str(citation.get("date-released")) != changes[2]:
        faults.append(f"CITATION.cff: date-released is {citation.get('date-released')}; CHANGELOG.md has {changes[2]}.")
    if not (root / "tests" / "releases" / version).is_dir():
        faults.append(f"tests/releases/{version}: make the runs that this version keeps: python tools/keep_runs.py")
    return faults


def _build(folder: Path) -> Path:
    """Build from the committed files, and check what was built; returns the wheel."""
    _say("Building the wheel and the source archive")
    sources = _committed(folder / "sources")
    shutil.rmtree(DIST, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", DIST, ".", cwd=sources)
    _say("Checking them")
    _run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    (wheel,) = DIST.glob("*.whl")
    _run(TOOLS / "check-wheel-contents", "--toplevel", "trainwright", wheel)
    _run(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *_workflows())
    return wheel


def _committed(folder: Path) -> Path:
    """The committed files, in a new folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def _workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _try(wheel: Path, torch: str, folder: Path, constraints: str, *, lists: bool) -> None:
    """Install the wheel with this torch, and use it. ``lists``: write the lists of dependencies."""
    _say(f"Installing the wheel with torch {torch}")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    # torchvision and setuptools are those that fit this torch.
    others = re.sub(r"(?m)^(torch|torchvision|setuptools)==.*\n", "", constraints)
    (folder / "constraints.txt").write_text(f"{others}torch=={torch}\n", encoding="utf-8")
    install = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", folder / "constraints.txt")
    _run(*install, wheel)
    _run(python, "-m", "pip", "check")
    if lists:
        _run(TOOLS / "cyclonedx-py", "environment", python, "--of", "JSON", "-o", DIST / "sbom.cdx.json")
        (DIST / "licenses.txt").write_text(_run(python, "-c", _LICENSES, quiet=True), encoding="utf-8")
    _run(*install, f"{wheel}[examples,test]")

    _use(python, torch, folder)


def _use(python: Path, torch: str, folder: Path) -> None:
    """Run what users run, and the quick tests, with the installed package."""
    work = _committed(folder / "work")
    shutil.rmtree(work / "trainwright")
    _run(python, "tests/environment/cpu_torchvision.py", cwd=work)
    place = _run(python, "-c", "import torch, trainwright; print(trainwright.__file__, torch.__version__)", cwd=work)
    assert "site-packages" in place, place
    assert place.split()[-1].startswith(torch), place

    pytest = (python, "-m", "pytest", "-q")
    _say(f"torch {torch}: the programs of the README")
    _run(*pytest, "tests/documents/test_docs.py", "-k", "README", cwd=work)
    _say(f"torch {torch}: the quick tests")
    ignored = [f"--ignore=tests/{name}" for name in _OF_REPOSITORY]
    _run(*pytest, "-n", "2", "--dist", "loadfile", "-m", _QUICK, *ignored, cwd=work)
    _say(f"torch {torch}: types, seen from outside")
    typed = folder / "typed"
    shutil.copytree(ROOT / "tests" / "typed", typed)
    for program in sorted(path.name for path in typed.glob("*.py")):
        _run(TOOLS / "mypy", "--strict", "--python-executable", python, program, cwd=typed)
        _run(python, program, cwd=typed)
    _run(TOOLS / "pyright", "--pythonpath", python, cwd=typed)


def _say(text: str) -> None:
    print(f"== {text}", flush=True)


def _run(*command: object, cwd: Path = ROOT, quiet: bool = False) -> str:
    """Run a command; returns what it prints, which is shown too."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run([str(one) for one in command], cwd=cwd, stdout=subprocess.PIPE, text=True, env=variables)
    if done.returncode or not quiet:
        print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


if __name__ == "__main__":
    main()

"""The wheel carries what an installed library needs."""

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

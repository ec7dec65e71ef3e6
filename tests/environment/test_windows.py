"""The package where the system has only what Windows has: it imports, trains, and resumes bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.releases.runs import RUNS, ended, working_in

ROOT = Path(__file__).parents[2]
_FIRST = "import sys; sys.path.insert(0, {root!r})\nimport tests.environment.windows\nimport os\n"
EACH_MODULE = """
import importlib, pkgutil, trainwright
assert not hasattr(os, "fork") and os.name == "nt"
for module in pkgutil.walk_packages(trainwright.__path__, "trainwright."):
    if "config.defaults" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(sum(name.startswith("trainwright.") for name in sys.modules))
"""
STOPPED_AND_RESUMED = """
import json
from tests.releases.runs import RUNS, ended, stop_within
stop_within({name!r})
trainer = RUNS[{name!r}](resume=True)
start = trainer.start_iter
trainer.train()

result = ended(trainer)
print(json.dumps([start, result]))
"""


def on_windows(program: str, cwd: Path) -> str:
    code = _FIRST.format(root=str(ROOT)) + program
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it asks /proc for open files")
class TestWindows:
    def test_each_module_is_imported(self, tmp_path: Path) -> None:
        assert int(on_windows(EACH_MODULE, tmp_path)) > 250

    @pytest.mark.parametrize("name", RUNS)
    def test_a_run_stops_and_resumes_to_the_same_bits(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "here").mkdir()
        start, result = json.loads(on_windows(STOPPED_AND_RESUMED.format(name=name), tmp_path))
        with working_in(tmp_path / "here"):
            whole = RUNS[name](resume=False)
            whole.train()
        assert start == 5
        assert result == json.loads(json.dumps(ended(whole)))
        assert (tmp_path / name / ("checkpoints/model_best" if name == "python" else "model_best")).is_dir()
        assert not [path for path in (tmp_path / name).rglob("*") if path.is_symlink()]

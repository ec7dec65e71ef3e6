"""Make the runs that a release keeps in the tests: ``python tools/keep_runs.py``.

Run it once, right before a release, and never again for the same version: later versions must continue these files.
They are in ``tests/releases/VERSION``, without logs and without what is known of this machine.
"""

import json
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.releases.runs import RUNS, stop_within, working_in  # noqa: E402

_OF_THE_MACHINE = ("command", "working_folder", "git", "machine", "versions", "numerics", "peak_memory_bytes", "phases")


def main() -> None:
    """Make the runs of this version; those that are there are not replaced."""
    target = ROOT / "tests" / "releases" / metadata.version("trainwright")
    with tempfile.TemporaryDirectory() as folder, working_in(Path(folder)):
        for name in RUNS:
            stop_within(name)
            clean(Path(name))
            shutil.copytree(name, target / name, symlinks=True)


def clean(run: Path) -> None:
    """Remove logs, and from ``run.json`` what describes this machine."""
    for pattern in ("log.txt*", "events.out.tfevents.*"):
        for log in run.glob(pattern):
            log.unlink()
    record = json.loads((run / "run.json").read_text())
    for start in record["starts"]:
        for name in _OF_THE_MACHINE:
            start.pop(name, None)
    (run / "run.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The limit of open files of a process is raised to what the connections to the others need."""

import os
import subprocess
import sys
from textwrap import dedent

import pytest

pytest.importorskip("resource", reason="Windows has no such limit")

from trainwright.base.open_files import connect_when_used

PROGRAM = """
    import resource
    from trainwright.base.open_files import allow_files, allowed_files, needed_files
    soft, hard = {limits}
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(allow_files({processes}), *resource.getrlimit(resource.RLIMIT_NOFILE), allowed_files())
"""


@pytest.mark.parametrize(
    ("limits", "processes", "expected"),
    [
        ((256, 4096), 8, [True, 544, 4096, 4096]),
        ((1024, 4096), 8, [True, 1024, 4096, 4096]),
        ((256, 1024), 1024, [False, 1024, 1024, 1024]),
    ],
    ids=["raised", "enough", "too low"],
)
def test_the_limit_is_raised_as_far_as_needed(limits: tuple[int, int], processes: int, expected: list[object]) -> None:
    program = dedent(PROGRAM).format(limits=limits, processes=processes)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(one) for one in expected]


@pytest.mark.parametrize(
    ("processes", "given", "expected"),
    [(64, None, None), (65, None, "1"), (65, "0", "0")],
    ids=["few", "many", "given"],
)
def test_many_processes_connect_when_they_exchange(
    processes: int, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    connect_when_used(processes)
    assert os.environ.pop("TORCH_GLOO_LAZY_INIT", None) == expected

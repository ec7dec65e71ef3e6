"""A short form of ``make torture``: killed runs become what undisturbed ones do, and a judge that would see if not."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torture.judge import KINDS

REPOSITORY = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="other processes are looked at through /proc"),
]


@pytest.fixture
def torture(run_python: Callable, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """``torture(*arguments)``: run the command; what it has reported, by name."""

    def run(*arguments: str) -> dict[str, str]:
        command = ["-m", "tests.torture.run", *arguments, "--folder", tmp_path]
        done = run_python(*command, cwd=REPOSITORY, code=None, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == "ok"
        assert not list(tmp_path.iterdir()), "it leaves nothing"
        return dict(re.findall(r"^([^:\n]+): (.+)$", done.stdout, re.MULTILINE))

    return run


@pytest.mark.exhaustive
def test_a_run_that_is_killed_at_any_moment_becomes_what_it_would_have_become(torture: Callable) -> None:
    found = torture("--only", "kills", "--kills", "20")
    assert found["kills"].startswith("20 (")
    assert int(found["inside a save"]) >= 8
    assert "1 command" in found["kills"]
    assert int(found["resumes"]) >= 5
    assert int(found["lines of history compared"]) >= 100
    assert {found[name] for name in KINDS.values()} == {"0"}


@pytest.mark.exhaustive
def test_a_library_that_loses_work_is_found_out(torture: Callable) -> None:
    found = torture("--only", "spoiled")
    spoiled = {name: text for name, text in found.items() if text.startswith("found after")}
    assert len(spoiled) == 5


@pytest.mark.exhaustive
def test_a_long_run_takes_no_more_of_the_machine_than_a_short_one(torture: Callable) -> None:
    found = torture("--only", "soak", "--quick")
    assert found["iterations"].startswith("2000;")
    assert found["threads"].endswith("growth +0")
    assert found["files"].endswith("growth +0")

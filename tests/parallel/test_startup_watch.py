"""Which processes of torchrun have ended, by the environments of those that run."""

import time
from pathlib import Path

import pytest

from trainwright.parallel import startup_watch
from trainwright.parallel.startup_watch import ended_siblings, siblings_awaited

JOB = {
    "TORCHELASTIC_RUN_ID": "a",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "LOCAL_WORLD_SIZE": "3",
}


def start(processes: Path, pid: int, environment: dict[str, str]) -> None:
    (processes / str(pid)).mkdir()
    (processes / str(pid) / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in environment.items()))


def test_a_process_that_has_ended_is_found_by_its_rank(tmp_path: Path) -> None:
    own = JOB | {"LOCAL_RANK": "0"}
    start(tmp_path, 10, own)
    start(tmp_path, 11, JOB | {"LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"})  # of another attempt
    start(tmp_path, 12, JOB | {"LOCAL_RANK": "2"})
    start(tmp_path, 13, {"HOME": "/"})
    (tmp_path / "14").mkdir()  # it has ended meanwhile
    assert ended_siblings(own, tmp_path) == {1}
    start(tmp_path, 15, JOB | {"LOCAL_RANK": "1"})
    assert ended_siblings(own, tmp_path) == set()


def test_one_process_with_the_variables_of_several_logs_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup_watch, "_FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(startup_watch, "_LOG_AFTER_S", 0.0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}.items():
        monkeypatch.setenv(name, value)
    with siblings_awaited():
        end = time.monotonic() + 20
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.05)
    (line,) = caplog.messages
    assert "waits for the other processes of WORLD_SIZE=2 at 127.0.0.1:29777" in line

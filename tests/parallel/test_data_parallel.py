"""The device is the accelerator if there is one; one that is missing is a warning, not an error."""

import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.fork_server import python
from trainwright.base.devices import warn_missing
from trainwright.base.errors import ConfigError
from trainwright.parallel.data_parallel import pick_device, setup_dist_util

has_accelerator = torch.accelerator.is_available()


def test_the_cpu_may_be_asked_for() -> None:
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(has_accelerator, reason="this machine has an accelerator, so none is missing")
def test_a_missing_accelerator_is_one_warning_and_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    warn_missing.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert pick_device("cuda") == torch.device("cpu")
        assert pick_device("cuda:1") == torch.device("cpu")
        assert pick_device(None) == torch.device("cpu")
    assert len([r for r in caplog.records if "cuda" in r.message]) == 1


def test_a_layout_has_no_effect_in_one_process(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert setup_dist_util({"tensor_parallel_size": 2, "device_type": "cpu"}) == torch.device("cpu")
        assert setup_dist_util({"zero_stage": 3, "device_type": "cpu"}) == torch.device("cpu")
    assert "train.dist.tensor_parallel_size=2 has no effect: there is only one process" in caplog.text
    assert "=3 has no effect: there is only one process" in caplog.text


def test_a_layout_that_does_not_fit_is_printed_by_one_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from trainwright.parallel import setup_dist_util\nsetup_dist_util({'tensor_parallel_size': 2})\n"
    )
    environment = {**os.environ, "WORLD_SIZE": "3", "PYTHONPATH": str(Path(__file__).parents[2])}
    lines = [
        subprocess.run(
            [python(), str(script)], env={**environment, "RANK": str(rank)}, capture_output=True, text=True
        ).stderr.strip().splitlines()
        for rank in (0, 1)
    ]  # fmt: skip
    assert "needs a multiple of 2 processes" in lines[0][-1]
    assert lines[1] == ["rank 1: ended with the ConfigError of rank 0."]


def test_a_layout_that_does_not_fit_is_refused_before_the_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")  # without MASTER_ADDR: joining them would fail
    with pytest.raises(ConfigError, match=r"train\.dist\.tensor_parallel_size=4 .*multiple of 4 processes.*but 6 were"):
        setup_dist_util({"tensor_parallel_size": 4})


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.parallel.data_parallel.find_device", lambda device_type: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"4 processes were started .* 2 cuda devices: start at most 2"):
        pick_device()


def test_restarted_processes_do_not_read_the_addresses_of_the_attempt_before() -> None:
    """As torchrun restarts them: one store for both attempts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = """if True:
        from trainwright.parallel import setup_dist_util
        print("starts", flush=True)
        setup_dist_util({"device_type": "cpu"})
    """

    def start(rank: int, attempt: int) -> "subprocess.Popen[str]":
        launched = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": attempt,
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        environment = {**os.environ, **{name: str(value) for name, value in launched.items()}}
        process = subprocess.Popen([python(), "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        return process

    for attempt in (0, 1):
        processes = [start(rank, attempt) for rank in (1, 0)]  # rank 1 asks before rank 0 is there
        for process in processes:
            process.communicate(timeout=60)
        assert [process.returncode for process in processes] == [0, 0], f"attempt {attempt}"

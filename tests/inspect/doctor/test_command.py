"""The checks of `trainwright doctor`: on this machine, in two processes, and on hosts with something wrong."""

import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.inspect.doctor.command import (
    judge,
    judge_clocks,
    judge_meeting,
    judge_speed,
    report,
)
from trainwright.inspect.doctor.group import Speed
from trainwright.inspect.doctor.host import Facts

VERSIONS = {"Python": "3.11.7", "torch": "2.13.0", "trainwright": "0.1.0"}
A = Facts(
    host="a", versions=VERSIONS, addresses={"eth0": "10.0.0.1"}, resolved="10.0.0.1", device="cuda", devices=2,
    shm_bytes=8_000_000_000, free_bytes=10**12, bytes_per_s=1e9,
)  # fmt: skip
B = replace(A, rank=1, host="b", addresses={"eth0": "10.0.0.2"}, resolved="10.0.0.2")
FOLDER = Path("/output")


@pytest.fixture(autouse=True)
def own_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_two_healthy_hosts() -> None:
    lines = [*judge([A, B], FOLDER, [A, B]), judge_clocks([A, B]), judge_speed(Speed(1e-4, 4_000_000, 0.004), 2)]
    assert [line.name for line in lines if line.advice] == []
    table = report([A, B], lines, 3.2)
    assert "2 processes on 2 hosts: Python 3.11.7, torch 2.13.0" in table
    assert "10.0.0.2 (eth0)" in table
    assert "the same on all hosts" in table
    assert "1.00 GB/s (float32 gradients of 100 M parameters: 0.4 s)" in table
    assert table.endswith("10 checks, none failed (3.2 s).")


@pytest.mark.parametrize(
    ("wrong", "name", "facts"),
    [
        (replace(B, resolved="127.0.1.1"), "addresses", ["b: ", "127.0.1.1", "GLOO_SOCKET_IFNAME", "=eth0"]),
        (replace(B, resolved="", addresses={}), "addresses", ["b: ", "no address", "/etc/hosts"]),
        (replace(B, versions={**VERSIONS, "torch": "2.12.0"}), "versions", ["2.13.0 on rank 0 (a)", "2.12.0 on"]),
        (replace(B, device="cpu", devices=0), "devices", ["cuda on rank 0 (a)", "cpu on rank 1 (b)", "same kind"]),
        (replace(B, host="a"), "devices", ["2 x cuda", "several ranks use one", "LOCAL_RANK"]),
        (replace(B, master_fault="10.0.0.1:29500: timed out"), "ports", ["rank 1 on b", "10.0.0.1:29500", "firewall"]),
        (replace(B, sees_token=False), "output folder", ["b: does not see", "/output", "share"]),
        (replace(B, folder_fault="/output: Permission denied"), "output folder", ["b: /output: Permission denied"]),
        (replace(B, free_bytes=10**8), "disk", ["0.1 GB free", "make space on b"]),
        (replace(B, clock_s=-2.5), "clocks", ["b is 2.5 s behind a", "chrony"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_fault_of_a_host(wrong: Facts, name: str, facts: list[str]) -> None:
    hosts = [A, wrong] if wrong.host == "b" else [A]
    lines = [*judge([A, wrong], FOLDER, hosts), judge_clocks(hosts)]
    failed = [line for line in lines if line.failed]
    assert [line.name for line in failed] == [name]
    shown = report([A, wrong], lines, 1.0)
    assert all(fact in shown for fact in facts), shown
    assert f"FAIL  {name}" in shown
    assert re.search("1 of [89] checks failed", shown)  # a folder with a fault is not measured


def test_little_shared_memory_and_many_threads_are_warnings() -> None:
    small = replace(A, device="cpu", devices=0, cores=4, threads=4, shm_bytes=64_000_000)
    ranks = [replace(small, rank=rank) for rank in range(4)]
    lines = judge(ranks, FOLDER, ranks[:1])
    assert [line.name for line in lines if line.is_warning] == ["devices", "shared memory"]
    shown = report(ranks, lines, 1.0)
    assert "OMP_NUM_THREADS=1" in shown
    assert "--ipc=host" in shown
    assert "none failed, 2 warnings" in shown


def test_too_few_open_files_are_a_warning() -> None:
    hosts = [A, replace(B, files=1024)]
    assert [line.name for line in judge(hosts, FOLDER, hosts) if line.advice] == []
    ranks = [replace(A, rank=rank) for rank in range(256)]
    (line,) = [line for line in judge(ranks, FOLDER, hosts) if line.name == "open files"]
    assert line.is_warning
    assert line.text == "1,024 of a process on b"
    assert "256 processes may need 1,536 each" in line.advice


def test_ranks_that_cannot_exchange_anything() -> None:
    line = judge_meeting("Gloo connectFullMesh failed with timed out\nmore")
    assert line.failed
    assert "Gloo connectFullMesh failed with timed out" in line.text
    assert "firewall" in line.advice


def test_this_machine(run_python: Callable, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        (tmp_path / "file").touch()
        done = run_python(
            *("-m", "trainwright", "doctor", "--output-dir", tmp_path / "file", "--port", port), cwd=tmp_path, code=1
        )
    assert re.search(rf"FAIL  port +{port}: .*in use\n +-> .*--rdzv-endpoint", done.stdout)
    assert re.search(r"FAIL  output folder", done.stdout)
    assert re.search(r"ok    versions", done.stdout)
    assert "2 of" in done.stdout.splitlines()[-1]


@pytest.mark.exhaustive
def test_two_processes_take_less_than_20_s(run_python: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "output"
    done = run_python("-m", "trainwright", "launch", "-n", 2, "doctor", "--output-dir", folder, cwd=tmp_path)
    assert "2 processes on 1 host" in done.stdout
    assert re.search(r"ok    all-reduce +2 ranks: [\d.]+ ms latency, [\d.]+ GB/s", done.stdout)
    assert done.stdout.count("checks, none failed") == 1  # one rank prints
    assert float(re.search(r"\(([\d.]+) s\)\.$", done.stdout.strip())[1]) < 20  # type: ignore[index]
    assert list(tmp_path.iterdir()) == []

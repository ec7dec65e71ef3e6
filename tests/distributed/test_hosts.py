"""Two hosts: network namespaces with names and addresses of their own, one cable, and a shared output folder."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.kinds import only_in_torture

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
ITERATIONS = 300
CONFIG = f"""
from tests.distributed.hosts_project import SlowSamples
from tests.distributed.project import Model

from trainwright.config import LazyCall, get_config
from trainwright.data import build_image_train_loader

model = LazyCall(Model)()
dataloader = dict(train=LazyCall(build_image_train_loader)(dataset=LazyCall(SlowSamples)(length=50), num_workers=0))
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train
train.update(dict(train_iter={ITERATIONS}, log_period=1, train_micro_batch_size=4, global_batch_size=8))
train.checkpointer.period = 10
train.dist.elastic = True
"""
# Seconds instead of minutes until a host counts as lost.
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=5,join_timeout=30"


class Hosts:
    """Two namespaces and a cable between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = {host: f"trainwright-{os.getpid()}-{host}" for host in ADDRESSES}
        self.processes: list[subprocess.Popen[bytes]] = []
        names = "".join(f"{address} {host}\n" for host, address in ADDRESSES.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        for name in self.names.values():
            ip("netns", "add", name)
        a, b = self.names.values()
        ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        for host, name in self.names.items():
            ip("-n", name, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def start(
        self, host: str, *arguments: object, mounts: Sequence[str] = (), **environment: str
    ) -> "subprocess.Popen[bytes]":
        """Run Python on one of them; its output is in ``HOST.log``."""
        own = "; ".join([f"hostname {host}", f"mount --bind {self.folder}/hosts /etc/hosts", *mounts, 'exec "$@"'])
        command = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--mount", "bash", "-c", own, "bash"]
        # torchrun starts its processes with PYTHON_EXEC, which may be the fork server: that one is on no host.
        own_python = {"PYTHON_EXEC": sys.executable, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{host}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, sys.executable, *map(str, arguments)],
                env={**os.environ, **own_python, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def plug(self, *, connected: bool) -> None:
        ip("-n", self.names["b"], "link", "set", "eth0", "up" if connected else "down")

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self.folder.glob("?.log")))

    def remove(self) -> None:
        for name in self.names.values():
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for number in found.stdout.split():
                os.kill(int(number), signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=10)
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("network namespaces need root on Linux")
    missing = [name for name in ("ip", "unshare", "bash") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"network namespaces need {', '.join(missing)}")
    name = f"trainwright-{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"this system makes no network namespace: {probe.stderr.strip()}")
    ip("netns", "del", name)
    made = Hosts(tmp_path)
    yield made
    made.remove()


def wait_until(happened: Callable[[], bool], what: str, hosts: Hosts, *, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}\n{hosts.logs()}"
        time.sleep(0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "private"])
def test_the_doctor_examines_both_hosts(hosts: Hosts, tmp_path: Path, is_shared: bool) -> None:
    began = time.monotonic()
    launch = ("-m", "trainwright", "launch", "-n", 1, "--nnodes", 2, "--rdzv-endpoint", f"{ADDRESSES['a']}:29500")
    processes = []
    for host, address in ADDRESSES.items():
        folder = tmp_path / ("output" if is_shared else f"output-{host}")
        folder.mkdir(exist_ok=True)
        mounted = [] if is_shared else [f"mount --bind {folder} /mnt"]
        arguments = (*launch, "--local-addr", address, "doctor", "--output-dir", folder if is_shared else "/mnt")
        processes.append(hosts.start(host, *arguments, mounts=mounted))
    codes = [process.wait(timeout=60) for process in processes]
    assert codes == ([0, 0] if is_shared else [1, 1]), hosts.logs()
    assert time.monotonic() - began < 40  # 20 s on a machine with nothing else to do
    table = (tmp_path / "a.log").read_text()
    assert "2 processes on 2 hosts" in table
    assert "a: 10.77.0.1 (eth0); b: 10.77.0.2 (eth0)" in table
    assert re.search(r"ok    clocks +at most [\d.]+ ms between hosts", table)
    assert re.search(r"ok    all-reduce +2 ranks: ", table)
    if not is_shared:
        assert re.search(r"FAIL  output folder +b: does not see what rank 0 writes into /mnt", table)


def train_on(hosts: Hosts, nodes: str, *options: object, meet_at: str = "a") -> "list[subprocess.Popen[bytes]]":
    """The launchers of both hosts, in the order of their names."""
    folder = hosts.folder
    (folder / "config.py").write_text(CONFIG)
    (folder / "seen").mkdir()
    launch = [
        *("-m", "trainwright", "launch", "--nproc-per-node", 1, "--nnodes", nodes, "--max-restarts", 9, *options),
        *("--rdzv-endpoint", f"{ADDRESSES[meet_at]}:29500", "--rdzv-conf", QUICK, "--monitor-interval", 0.3),
    ]
    script = [HERE / "hosts_script.py", "--config-file", folder / "config.py", "--resume"]
    environment = {"SEEN_FOLDER": str(folder / "seen"), "GLOO_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": ""}
    output = f"train.output_dir={folder}/output"
    return [hosts.start(h, *launch, "--local-addr", ADDRESSES[h], *script, output, **environment) for h in ADDRESSES]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_host_is_cut_off_and_comes_back_and_the_run_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    def lines(rank: int) -> list[int]:
        """The iteration of each micro-batch that a rank has trained on."""
        path = tmp_path / "seen" / f"rank{rank}.jsonl"
        return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []

    processes = train_on(hosts, "1:2", "--rejoin", 20)
    wait_until(lambda: len(lines(1)) > 5, "both hosts train", hosts)

    hosts.plug(connected=False)
    before = len(lines(0))
    wait_until(
        lambda: len(lines(0)) > before + 6 and lines(0)[-2:].count(lines(0)[-1]) == 2,
        "the other host trains alone, with two micro-batches in an update",
        hosts,
    )
    alone_at, of_lost_host = lines(0)[-1], len(lines(1))

    hosts.plug(connected=True)
    wait_until(lambda: len(lines(1)) > of_lost_host + 3, "both hosts train again", hosts)
    assert lines(1)[-1] > alone_at - 10  # from a checkpoint of the run that went on
    (tmp_path / "seen" / "finish").touch()

    assert [process.wait(timeout=40) for process in processes] == [0, 0], hosts.logs()
    rows = [json.loads(line) for line in (tmp_path / "output" / "metrics.json").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("nodes", "meet_at", "codes"),
    [pytest.param("2", "a", [75, 75], marks=only_in_torture), ("1:2", "b", [75, 0])],
    ids=["2", "1:2"],
)
def test_a_host_that_stays_cut_off_leaves_no_process_waiting(
    hosts: Hosts, tmp_path: Path, nodes: str, meet_at: str, codes: list[int]
) -> None:
    processes = train_on(hosts, nodes, meet_at=meet_at)
    seen = tmp_path / "seen" / "rank1.jsonl"
    wait_until(lambda: seen.exists() and len(seen.read_text().splitlines()) > 5, "both hosts train", hosts)
    hosts.plug(connected=False)
    (tmp_path / "seen" / "finish").touch()  # the host where they meet may train alone if one is enough
    wait_until(lambda: all(process.poll() is not None for process in processes), "both end", hosts, timeout_s=120)
    assert [process.returncode for process in processes] == codes, hosts.logs()

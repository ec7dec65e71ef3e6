"""Starts of a training: forks of a process that has the library loaded, or the installed command; and their ends.

A fork begins where the command begins, with all modules imported and nothing else done, so that a start costs a tenth
of a second rather than three. Each start leads a session of its own, by which its processes are known.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture.operations import Death, Operations

HERE = Path(__file__).parent
CONFIG = HERE / "config.py"
TRACE = "TORTURE_TRACE"  # environment: where the project writes its history
GONE_WITHIN_S = 10.0  # for the workers of a loader, after their trainer was killed
Spoiler = Callable[[], None]  # makes the library worse, in the process that calls it
_FORKS = multiprocessing.get_context("fork")


def load_library() -> None:
    """Import what a training will. Starts no thread: a fork would not have it.

    Raises:
        RuntimeError: something has started one all the same.
    """
    # pyarrow, which scikit-learn imports where it is installed, starts a thread that frees memory.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    import antlr4  # noqa: F401
    import hydra.core.override_parser.overrides_parser  # noqa: F401
    import sklearn.datasets.data  # noqa: F401
    import torch._dynamo  # what torch.optim imports when it is first used
    import torch.utils.tensorboard  # noqa: F401

    import trainwright.cli.train
    import trainwright.config.defaults
    import trainwright.engine
    import trainwright.evaluation  # noqa: F401

    if len(threads := os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"{len(threads)} threads are running before the first fork; set OMP_NUM_THREADS=1.")


@dataclass
class Files:
    """The files that a start writes next to the folder of its run."""

    log: Path
    trace: Path
    operations: Path

    def __init__(self, work_dir: Path, number: int) -> None:
        self.log = work_dir / f"start-{number:03d}.log"
        self.trace = work_dir / f"start-{number:03d}.trace"
        self.operations = work_dir / f"start-{number:03d}.operations"

    def noted(self) -> "Noted":
        noted = Noted()
        for line in self.operations.read_text().splitlines() if self.operations.exists() else ():
            mark, _, text = line.partition(" ")
            if mark == "+":
                noted.done.append(text)
            elif mark == "=":
                noted.pointed.append(text)
            else:
                noted.died_at = text.partition(" ")[2]
        return noted


@dataclass
class Noted:
    """The operations of a start: those done, the names that last_checkpoint got, and the one it died at."""

    done: list[str] = field(default_factory=list)
    pointed: list[str] = field(default_factory=list)
    died_at: str | None = None


class Fork:
    """``trainwright train …`` in a fork of this process."""

    def __init__(
        self, arguments: list[str], folder: Path, files: Files, death: Death | None, spoil: Spoiler | None = None
    ) -> None:
        files.log.touch()  # it may be killed before it writes there
        self._process = _FORKS.Process(target=_train, args=(arguments, folder, files, death, spoil))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, minus the signal where one has ended it; None if it is still running."""
        # Not join(): that waits for the workers too, which outlive a killed trainer for a while.
        end = time.monotonic() + timeout_s
        while self._process.exitcode is None and time.monotonic() < end:
            time.sleep(0.002)
        return self._process.exitcode


class Command:
    """Another program that trains: by default the installed command."""

    def __init__(
        self, arguments: list[str], folder: Path, files: Files, program: Sequence[str] = (), *, traced: bool = True
    ) -> None:
        trace = {TRACE: str(files.trace)} if traced else {}
        with open(files.log, "wb") as log:
            self._process = subprocess.Popen(
                [*(program or (*installed(), "train")), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder.parent,
                env={**os.environ, **trace, "GLOO_SOCKET_IFNAME": "lo"},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


def installed() -> list[str]:
    """The ``trainwright`` that belongs to this Python."""
    script = Path(sys.executable).with_name("trainwright")
    return [str(script)] if script.exists() else [sys.executable, "-m", "trainwright.cli.main"]


def torchrun(processes: int) -> list[str]:
    """The program that trains in several processes, which talk over this machine's own network alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [*launcher, str(HERE.parents[1] / "tools" / "train_net.py"), "--config-file"]


def _train(arguments: list[str], folder: Path, files: Files, death: Death | None, spoil: Spoiler | None) -> None:
    os.setsid()
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ[TRACE] = str(files.trace)
    os.chdir(folder.parent)
    Operations(folder, files.operations, death).install()
    if spoil is not None:
        spoil()
    from trainwright.cli.train import main

    sys.exit(main(arguments, prog="trainwright train"))


def kill(start: Fork | Command, *, with_group: bool) -> None:
    """SIGKILL, for the process alone or for all that it has started. It may have ended meanwhile."""
    try:
        os.killpg(start.pid, signal.SIGKILL) if with_group else os.kill(start.pid, signal.SIGKILL)
    except ProcessLookupError:  # not a leader yet, or over
        if start.wait(0) is None:
            os.kill(start.pid, signal.SIGKILL)


def session_processes(session: int) -> list[int]:
    """The running processes of a session; zombies have ended."""
    return [pid for pid, stat in _stats() if stat[0] not in "ZX" and int(stat[3]) == session]


def processes_of(files: Files) -> dict[int, int]:
    """The running processes of a start, with the rank that torchrun has given them (-1: none)."""
    wanted = f"{TRACE}={files.trace}".encode()
    found = {}
    for pid, stat in _stats():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            continue
        if stat[0] not in "ZX" and wanted in environment:
            found[pid] = next((int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")), -1)
    return found


def _stats() -> list[tuple[int, list[str]]]:
    """The fields of /proc/PID/stat behind the program's name: state, parent, group, session, …"""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text()
            except OSError:
                continue
            found.append((int(entry.name), text.rpartition(")")[2].split()))
    return found


class Leftovers:
    """The sessions that were killed, until no process of theirs is left."""

    def __init__(self) -> None:
        self._killed: list[tuple[int, float, str]] = []  # session, when, whose

    def add(self, session: int, whose: str) -> None:
        self._killed.append((session, time.monotonic(), whose))

    def overdue(self, *, wait: bool = False) -> list[str]:
        """Who has had processes for longer than they may. ``wait``: for all to end, or to be overdue."""
        faults: list[str] = []
        while True:
            self._killed = [entry for entry in self._killed if session_processes(entry[0])]
            late = [entry for entry in self._killed if time.monotonic() - entry[1] > GONE_WITHIN_S]
            for entry in late:
                pids = session_processes(entry[0])
                faults.append(f"{entry[2]}: processes {pids} are left {GONE_WITHIN_S:.0f} s after the kill")
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                self._killed.remove(entry)
            if not wait or not self._killed:
                return faults
            time.sleep(0.1)

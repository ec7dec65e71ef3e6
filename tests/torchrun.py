"""Programs under torchrun, whose processes talk over this machine's own network alone."""

import os
import socket
import subprocess
from pathlib import Path

from tests.fork_server import python

REPOSITORY = Path(__file__).parents[1]


def started(
    program: Path, *arguments: object, processes: int = 2, options: tuple[str, ...] = (), **variables: str
) -> "subprocess.Popen[str]":
    """The program in a session of its own; errors are part of its output. One process: without torchrun."""
    launcher: list[str] = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), *options]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [python(), *launcher, str(program), *map(str, arguments)],
        env={**os.environ, **own, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def torchrun(
    program: Path,
    *arguments: object,
    processes: int = 2,
    options: tuple[str, ...] = (),
    code: int | None = 0,
    timeout: float = 240,
    **variables: str,
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, and check its exit code."""
    process = started(program, *arguments, processes=processes, options=options, **variables)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert code is None or process.returncode == code, output
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])

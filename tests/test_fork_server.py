"""A program started by the fork server is what the same program is in a Python of its own."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import python

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the server needs Linux: elsewhere it is Python")

SHOWN = "import os, sys; print(sys.argv, os.getcwd(), sys.path[0], __name__, os.environ.get('OWN'), sys.stdin.read())"


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_arguments_streams_and_environment_are_the_callers(kind: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    program = {"-c": ["-c", SHOWN], "-m": ["-m", "shown"], "script": ["shown.py"]}[kind]

    def run(executable: str) -> tuple[int, str, str]:
        given = {"input": "typed", "capture_output": True, "text": True, "cwd": tmp_path}
        done = subprocess.run([executable, *program, "a", "b"], env={**os.environ, "OWN": "1"}, **given)
        return done.returncode, done.stdout, done.stderr

    assert run(python()) == run(sys.executable)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os._exit(7)", 7),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
        ("import threading, time; threading.Thread(target=lambda: time.sleep(0.1) or print('end')).start()", 0),
    ],
)
def test_it_ends_as_the_program_does(program: str, code: int) -> None:
    done = subprocess.run([python(), "-c", program], capture_output=True, text=True)
    assert done.returncode == code
    assert ("ZeroDivisionError" in done.stderr) == (code == 1)
    assert ("end" in done.stdout) == ("threading" in program)


def test_a_signal_reaches_the_program_and_a_kill_ends_it() -> None:
    program = "import time; print('running', flush=True); time.sleep(60)"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        with subprocess.Popen([python(), "-c", program], stdout=-1, stderr=-1) as process:
            process.stdout.readline()  # type: ignore[union-attr]
            process.send_signal(number)
            process.communicate()  # its pipes are closed when the program has ended
        assert process.returncode == -number


def test_a_client_that_is_killed_within_its_request_does_not_stop_the_server() -> None:
    address = str(Path(python()).with_name("socket"))
    for sent in (b"", (100).to_bytes(8, "big"), (100).to_bytes(8, "big") + b"half"):
        with socket.socket(socket.AF_UNIX) as client, open(os.devnull) as null:
            client.connect(address)
            if sent:
                socket.send_fds(client, [sent], [null.fileno()] * 4)
    done = subprocess.run([python(), "-c", "print(1)"], capture_output=True, text=True, timeout=30)
    assert done.stdout == "1\n"


def test_what_would_change_an_import_gets_a_fresh_interpreter() -> None:
    program = "import sys; print('torch' in sys.modules, 'error' in sys.warnoptions)"

    def output(*options: str, **environment: str) -> str:
        command = [python(), *options, "-c", program]
        return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True).stdout

    assert output() == "True False\n"
    assert output("-X", "utf8", "-W", "error") == output(PYTHONWARNINGS="error") == "False True\n"
    assert output(OMP_NUM_THREADS="2") == "False False\n"

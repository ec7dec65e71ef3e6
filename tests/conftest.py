"""What tests of several rooms share: the digits, the example project on them, and the command line."""

import os

# Workers of pytest-xdist share the cores: more threads in each only wait for each other. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On the CPU also where there is a GPU, unless one is named: many tests compare with a loop of their own on the CPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import gc
import json
import logging
import multiprocessing
import random
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fork_server import SHARED, python
from tests.kinds import add_marks

if TYPE_CHECKING:
    from tests.hub_server import HubServer
    from tests.s3_server import S3Server

# A shell starts what runs in its background with Ctrl-C ignored, and programs that we start here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).parents[1]
EXAMPLE = REPOSITORY / "examples" / "mnist"

# Files that take minutes, which begin first: the others fill the workers up at the end.
LONG = ("torture", "engine", "distributed", "examples", "documents", "cli", "benchmarks", "house", "checkpoint")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


MEMORY = Path("/dev/shm")


def pytest_configure(config: pytest.Config) -> None:
    """Temporary folders in memory: runs sync what they save, and would wait for a disk more than half of their time.

    One fork server for the workers of pytest-xdist, where programs are started. No garbage is collected until the tests
    are: what they import stays.
    """
    gc.disable()
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    is_controller = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if is_controller and "subprocess" not in config.getoption("markexpr"):
        os.environ[SHARED] = python()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they do, and begin with the folders that take longest."""
    cases: Counter[str] = Counter()
    for item in items:
        if " at 0x" in item.name:  # it differs in each process, so that pytest-xdist would run no test
            raise pytest.UsageError(f"an address is part of the test's name: give the case an id. {item.nodeid}")
        add_marks(item)
        exhaustive = item.get_closest_marker("exhaustive")
        every = exhaustive.kwargs.get("every", 1) if exhaustive else 1
        if every > 1:
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] % every == 1:
                item.own_markers = [mark for mark in item.own_markers if mark.name != "exhaustive"]

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(REPOSITORY / "tests").parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """What is imported by now, a million objects, is no garbage of a test: each collection would look at all of it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def logging_as_it_was() -> Iterator[None]:
    """A trainer that a test makes begins logging for the whole process."""
    library = logging.getLogger("trainwright")
    level, handlers = library.level, library.handlers
    library.setLevel(logging.NOTSET)
    library.handlers = []
    yield
    library.setLevel(level)
    library.handlers = handlers


@pytest.fixture(autouse=True)
def no_log_files_of_earlier_tests() -> Iterator[None]:
    """A log file of a trainer that a test left open would get the lines of later tests, in a thread of its own."""
    library = logging.getLogger("trainwright")
    before = [*library.handlers]
    yield
    for handler in [*library.handlers]:
        if handler not in before and isinstance(handler, MemoryHandler):
            library.removeHandler(handler)
            if handler.target is not None:
                handler.target.close()
            handler.close()


@pytest.fixture(autouse=True)
def generators_begin_alike() -> None:
    """What a test draws, and which of its seeds change anything, would depend on the tests before it."""
    import numpy as np
    import torch

    random.seed(2026)
    np.random.seed(2026)
    torch.manual_seed(2026)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products in bfloat16 are rounded otherwise by several threads, where each has a part of the rows."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """Workers of loaders are forked, so lambdas and local classes reach them: the default of Linux before 3.14."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system has no fork")
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph mode then runs the operations of its programs one by one, in place of minutes of a C++ compiler."""
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of ``tests/spent_time.py``, which goes only where a test spends time."""
    from tests.spent_time import CLOCK

    monkeypatch.setattr(time, "perf_counter", CLOCK)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Of a process that finds this trainwright from any working folder, and leaves a core for its neighbours."""
    python()  # torchrun then starts its processes with it
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COLUMNS"))}
    return {**inherited, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def run_python(environment: dict[str, str]) -> Run:
    """``run_python(*arguments, cwd, code=0)``: run this Python, and check its exit code.

    ``fresh``: in an interpreter that has imported nothing, as a user starts it.
    """

    def run(
        *arguments: object, cwd: Path, code: int | None = 0, timeout: float = 120, fresh: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable if fresh else python(), *map(str, arguments)]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
        if code is not None:
            assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def train(run_python: Run) -> Run:
    """``train(*arguments, cwd, code=0)``: ``trainwright train …`` as a user types it."""

    def run(*arguments: object, **how: Any) -> "subprocess.CompletedProcess[str]":
        return run_python("-m", "trainwright.cli.main", "train", *arguments, **how)

    return run


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real handwritten digits, as MNIST's files."""
    folder = tmp_path_factory.mktemp("digits")
    arguments = sys.argv
    sys.argv = ["prepare_digits.py", str(folder)]
    try:
        runpy.run_path(str(EXAMPLE / "prepare_digits.py"), run_name="__main__")
    finally:
        sys.argv = arguments
    return folder


@pytest.fixture(scope="session")
def mnist_project(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """A copy of examples/mnist with its data: nothing in it may be changed by a test."""
    project = tmp_path_factory.mktemp("project") / "mnist"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("data", "__pycache__", "output"))
    (project / "data").symlink_to(digits)
    return project


@pytest.fixture(scope="session")
def read_rows() -> Callable[[Path], list[dict[str, Any]]]:
    """The rows of a run's metrics.json, read as strict JSON: NaN and Infinity are not in it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    def read(folder: Path) -> list[dict[str, Any]]:
        lines = (folder / "metrics.json").read_text(encoding="utf-8").splitlines()
        return [json.loads(line, parse_constant=refuse) for line in lines]

    return read


@pytest.fixture(scope="session")
def s3_server() -> "Iterator[S3Server]":
    from tests.s3_server import S3Server

    with S3Server() as server:
        yield server


@pytest.fixture
def s3(s3_server: "S3Server", monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place in the bucket of a real S3 server on loopback, which this process may use."""
    for name, value in s3_server.variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{secrets.token_hex(8)}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[HubServer]":
    """A hub on loopback with its ``url``, over the folder ``root``, which huggingface_hub asks in this test.

    Repositories lie at ``root/models/<owner>/<name>/…`` and ``root/datasets/<owner>/<name>/…``.
    """
    from huggingface_hub import constants

    from tests.hub_server import HubServer

    server = HubServer(tmp_path / "hub")
    environment = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "hub-cache"), "HF_HOME": str(tmp_path)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    # What huggingface_hub has read at its import: nothing of a test may ask another hub.
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.close()

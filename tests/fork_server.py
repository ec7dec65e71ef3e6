"""A Python that starts in 30 ms with torch and trainwright imported, for tests that start programs.

``python()`` is the path of an executable that takes the arguments of ``python`` (``-c``, ``-m`` or a script; ``-u``,
``-W`` and ``-P``). It asks a server, which has imported torch and trainwright and nothing else has happened in, to
fork. The fork gets the caller's arguments, environment, working folder and streams, runs the program as ``__main__``
and ends as an interpreter does; exit code, signals and a kill of the executable are passed on. Everything else, such as
an environment that changes what an import does, is given to a fresh interpreter.

What such a program cannot show is what it imports and how long that takes: tests of imports, of a signal during the
start and of the installed command use ``sys.executable``.

With ``SHORT_EXIT=1``, as in ``make test``, a fork that has run all functions of ``atexit`` ends there. Python would
then free what is imported, which takes 0.3 s of each program; in ``make test-all`` it does.
"""

import atexit
import functools
import gc
import importlib
import inspect
import io
import marshal
import os
import pkgutil
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch.utils.data",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    "hydra.core.override_parser.overrides_parser",
    "antlr4",
    "sklearn.datasets",
    "pytest",  # modules of tests are imported by their ranks
    "torchmetrics",  # and torch's compiler, which it imports: three seconds, more than half of a program's time
)
# Variables that are read at an import, or when the interpreter starts.
READ_EARLY = ("PYTHON", "OMP_", "MKL_", "LD_", "TORCHDYNAMO", "TORCH_LOGS")
READ_LATE = {"PYTHONPATH", "PYTHON_EXEC"}
SHARED = "FORK_SERVER_PYTHON"  # the executable of a server that another process has started

CLIENT = """#!{python} -IS
import _socket, marshal, os, signal, sys

def fresh():
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

try:
    for fd in (0, 1, 2):
        os.fstat(fd)
except OSError:  # a closed stream
    fresh()
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
try:
    server.connect({address!r})
except OSError:
    fresh()
request = marshal.dumps((sys.argv[1:], dict(os.environb)))
streams = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2, os.open(".", os.O_RDONLY)))
server.sendmsg([len(request).to_bytes(8, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
view = memoryview(request)
while view:
    view = view[server.send(view):]
pid = int.from_bytes(server.recv(8), "big")
if not pid:
    fresh()
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
answer = server.recv(8)
code = int.from_bytes(answer, "big", signed=True) if answer else -signal.SIGKILL
if code < 0:
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def python() -> str:
    """The executable; its server starts now and ends with this process, or is that of the process that began all."""
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    if SHARED in os.environ:
        return os.environ[SHARED]
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    address = folder / "socket"
    client = folder / "python"
    client.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    client.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)  # callers wait here while the server imports
    repository = str(Path(__file__).parents[1])
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.fork_server", str(listener.fileno())],
        pass_fds=[listener.fileno()],
        stdin=subprocess.PIPE,  # closed when this process ends
        cwd=repository,
        # pyarrow, which scikit-learn imports where it is installed, would start a thread.
        env={
            **os.environ,
            "PYTHONPATH": repository,
            "OMP_NUM_THREADS": "1",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        },
    )
    listener.close()

    def stop() -> None:
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:  # it still imports, on a busy machine
            server.kill()
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    os.environ["PYTHON_EXEC"] = str(client)  # torchrun starts its ranks with it
    return str(client)


def own_modules() -> list[str]:
    """The package's modules, which load each other on first use: half a second of each program."""
    import trainwright

    found = (module.name for module in pkgutil.walk_packages(trainwright.__path__, "trainwright."))
    return [name for name in found if not name.startswith("trainwright.config.defaults.") and "__main__" not in name]


class Request:
    """A program that a client asks for."""

    def __init__(self, connection: socket.socket) -> None:
        head, self.fds, _, _ = socket.recv_fds(connection, 8, 4)
        size, body = int.from_bytes(head, "big"), b""
        while len(body) < size:
            more = connection.recv(size - len(body))
            if not more:
                raise EOFError("the client was killed")
            body += more
        self.arguments: list[str]
        self.arguments, environment = marshal.loads(body)
        self.environment: dict[bytes, bytes] = environment

    def is_served(self) -> bool:
        """Whether a fork shows what a fresh interpreter would."""
        if early(self.environment) != early(dict(os.environb)):
            return False
        options = iter(self.arguments)
        for word in options:
            if word == "-W":
                next(options, None)
            elif word not in ("-u", "-P"):
                return word in ("-c", "-m") or not word.startswith("-")
        return False

    def become(self) -> None:
        """Make this process the program's."""
        for number, fd in enumerate(self.fds[:3]):
            os.dup2(fd, number)
        os.fchdir(self.fds[3])
        for fd in self.fds:
            os.close(fd)
        base = sys.path[len(import_paths()) + 1 :]  # without the server's own, before which `-m` has put its folder
        os.environb.clear()
        os.environb.update(self.environment)
        sys.path[:] = [*import_paths(), *base]

    def run(self) -> None:
        words = list(self.arguments)
        while (option := words[0]) in ("-u", "-W", "-P"):
            del words[0]
            if option == "-W":
                warnings._processoptions([words.pop(0)])  # type: ignore[attr-defined]
            elif option == "-u":  # -P changes a flag of Python that cannot be set here: `-m` adds its folder as without
                for name, fd in (("stdout", 1), ("stderr", 2)):
                    raw: Any = io.FileIO(fd, "w", closefd=False)
                    setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            sys.path.insert(0, os.getcwd())
            sys.modules.pop(words[1], None)  # runpy warns about a module that has been imported already
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
            return
        if words[0] == "-c":
            sys.argv, name, source = ["-c", *words[2:]], "<string>", words[1].encode()
            sys.path.insert(0, "")
        else:
            sys.argv, name, source = words, words[0], Path(words[0]).read_bytes()
            sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
            main.__file__ = name
        exec(compile(source, name, "exec"), main.__dict__)


def early(environment: dict[bytes, bytes]) -> dict[bytes, bytes]:
    names = tuple(name.encode() for name in READ_EARLY)
    late = {name.encode() for name in READ_LATE}
    return {name: value for name, value in environment.items() if name.startswith(names) and name not in late}


def import_paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def serve(listener: socket.socket) -> Request | None:
    """Fork for each request. Returns in each fork, with the request, and here when the caller has ended."""
    with selectors.DefaultSelector() as events:
        events.register(sys.stdin.fileno(), selectors.EVENT_READ, "caller")
        events.register(listener, selectors.EVENT_READ, "request")
        running: dict[int, tuple[socket.socket, int]] = {}  # pid: its client, and a descriptor that shows its end
        while True:
            for key, _ in events.select():
                if key.data == "caller":
                    for pid in running:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.data == "request":
                    connection, _ = listener.accept()
                    try:
                        request = Request(connection)
                    except (OSError, ValueError, EOFError):  # the client was killed meanwhile
                        connection.close()
                        continue
                    is_served = request.is_served()
                    pid = os.fork() if is_served else 0
                    if is_served and not pid:
                        for other, descriptor in running.values():
                            other.close()
                            os.close(descriptor)
                        connection.close()
                        return request
                    for fd in request.fds:
                        os.close(fd)
                    with suppress(OSError):
                        connection.sendall(pid.to_bytes(8, "big"))
                    if not pid:
                        connection.close()
                        continue
                    descriptor = os.pidfd_open(pid)
                    running[pid] = connection, descriptor
                    events.register(connection, selectors.EVENT_READ, ("client", pid))
                    events.register(descriptor, selectors.EVENT_READ, ("end", pid))
                    continue
                what, pid = key.data
                if pid not in running:
                    continue
                connection, descriptor = running[pid]
                if what == "client":  # it was killed: so is the program
                    os.kill(pid, signal.SIGKILL)
                    events.unregister(connection)
                    continue
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError):
                    connection.sendall(code.to_bytes(8, "big", signed=True))
                with suppress(KeyError):
                    events.unregister(connection)
                events.unregister(descriptor)
                connection.close()
                os.close(descriptor)
                del running[pid]


class ShortExit:
    """Ends the process with the program's exit code after the functions of ``atexit``, once this code is known."""

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self)  # what is registered later is called before

    def run(self, program: Callable[[], None]) -> None:
        try:
            program()
        except SystemExit as end:
            self.code = end.code if isinstance(end.code, int) else int(end.code is not None)
            raise
        except Exception:
            self.code = 1
            raise
        self.code = 0

    def __call__(self) -> None:
        if self.code is None:  # a Ctrl-C: the process ends by this signal
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except Exception:  # Python's own end has a message and an exit code for that
            return
        os._exit(self.code & 0xFF)


def main() -> None:
    short_exit = ShortExit() if os.environ.get("SHORT_EXIT") else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*PRELOADED, *own_modules()):
            importlib.import_module(name)
    # Compiles text when Python ends, which makes it forget that a Ctrl-C is the reason: the exit code would be 1.
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("an import has started a thread, which a fork would not have")
    # torchrun asks for the modules of its callers, again and again; one that is no module's is sought among thousands.
    inspect.getmodule(inspect.currentframe(), "<none>")
    inspect.modulesbyfile |= {"<frozen runpy>": "runpy", __file__: "tests.fork_server"}
    gc.collect()
    gc.freeze()  # what is imported is no garbage of the program
    listener = socket.socket(fileno=int(sys.argv[1]))
    request = serve(listener)
    listener.close()
    if request is not None:
        request.become()
        if short_exit is None:
            request.run()
        else:
            short_exit.run(request.run)


if __name__ == "__main__":
    main()

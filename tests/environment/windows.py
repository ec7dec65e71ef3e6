"""A process that has of the system what Windows has: ``import tests.environment.windows`` before trainwright.

Modules of POSIX cannot be imported, ``os`` and ``signal`` are without its names, folders cannot be opened, links need a
privilege, and a file that is open or mapped can be neither deleted nor renamed. What was imported before keeps the
real modules: torch and the other packages have their own ways.
"""

import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
_OF_OS = """
O_CLOEXEC O_DIRECTORY O_DSYNC O_NOFOLLOW O_NONBLOCK O_SYNC chown copy_file_range fchmod fork forkpty
getegid geteuid getgid getloadavg getpgid getpgrp getsid getuid killpg lchown mkfifo mknod nice openpty
pathconf posix_fadvise posix_fallocate pread pwrite register_at_fork sched_getaffinity sched_yield
sendfile setpgid setpriority setsid statvfs sync sysconf uname wait waitid fchdir fdatasync ttyname
PRIO_PROCESS
"""
_OF_SIGNAL = """
SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU
SIGUSR1 SIGUSR2 SIGWINCH SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause pthread_kill
pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait sigwaitinfo
"""
_PACKAGES = (
    *("torch", "numpy", "omegaconf", "hydra.core.override_parser.overrides_parser", "pydantic", "safetensors.torch"),
    *("huggingface_hub", "xxhash", "torchmetrics", "tensorboard", "torch.utils.tensorboard", "rich.live", "rich.table"),
    *("multiprocessing.util", "multiprocessing.connection", "platform", "tempfile", "subprocess", "concurrent.futures"),
    *("torch.optim.swa_utils", "torch.utils.data", "torch.distributed", "torch.multiprocessing", "tqdm", "ctypes"),
)


class _Without(ModuleType):
    """A module without some of its names, and with others."""

    def __init__(self, module: ModuleType, missing: str, **others: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update({name: value for name, value in vars(module).items() if name not in missing.split()})
        self.__dict__.update(others)


class _NoModule(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in _MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _is_used(path: Any) -> bool:
    """Whether this process has a file open or mapped, or one in the folder."""
    full = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
    used = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            used.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        used |= {line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/" in line}
    return any(one == full or one.startswith(f"{full}/") for one in used)


def _unless_used(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    def checked(*paths: Any, **settings: Any) -> Any:
        for path in paths[:number]:
            if "dir_fd" not in settings and not isinstance(path, int) and os.path.lexists(path) and _is_used(path):
                raise PermissionError(13, "The file is used by another process", os.fspath(path))
        return call(*paths, **settings)

    return checked


def _no_link(*_: Any, **__: Any) -> None:
    raise OSError(22, "A required privilege is not held by the client")


def _open(path: Any, flags: int, mode: int = 0o777, **settings: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))
    return _real_open(path, flags, mode, **settings)


for _package in _PACKAGES:
    importlib.import_module(_package)

_real_open = os.open
vars(shutil)["_use_fd_functions"] = False
for _name, _number in (("unlink", 1), ("remove", 1), ("rename", 2), ("replace", 2), ("rmdir", 1)):
    setattr(os, _name, _unless_used(getattr(os, _name), _number))
os.symlink = _no_link
sys.meta_path.insert(0, _NoModule())
for _name in _MODULES:
    sys.modules.pop(_name, None)
sys.modules["os"] = _Without(os, _OF_OS, name="nt", open=_open, symlink=_no_link)
sys.modules["signal"] = _Without(signal, _OF_SIGNAL)

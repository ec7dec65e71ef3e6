"""The limit of open files: in each process group, a process may hold a connection to every other one of it."""

import os
from contextlib import suppress

# Up to four groups of all processes: torch's own, the commits of checkpoints, a pipeline's, and the dimensions of a
# mesh together. Measured: 21 connections with ZeRO 3 on 8 processes, 34 with copies of it.
_GROUPS = 4
_OTHERS = 512  # files of data, checkpoints and libraries
_ALL_CONNECTED = 64


def needed_files(num_processes: int) -> int:
    """How many files a process opens at most, its connections included."""
    return _GROUPS * num_processes + _OTHERS


def allowed_files() -> int | None:
    """The limit up to which a process may raise its own; None: there is none, or the system has no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def allow_files(num_processes: int) -> bool:
    """Raise this process's limit to what ``num_processes`` need; False if the system allows less."""
    try:
        import resource
    except ImportError:
        return True
    needed, (soft, hard) = needed_files(num_processes), resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < needed:
        needed = hard
    if soft != resource.RLIM_INFINITY and soft < needed:
        with suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft == resource.RLIM_INFINITY or soft >= needed_files(num_processes)


def connect_when_used(num_processes: int) -> None:
    """Let gloo connect two of many processes when they first exchange, unless the environment says otherwise.

    Of 256 processes each has then 18 connections, and not 256, in each group; the first one has up to 256. Connections
    of all to all take a number of requests to the store that grows with the square of the processes: 2.7 s of its CPU
    time for 256 of them.
    """
    if num_processes > _ALL_CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")

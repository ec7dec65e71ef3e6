"""Connections to a host that is cut off fail after a minute; the system's own limit is a quarter of an hour, or none.

Torch waits for an answer of another host as long as the connection lasts. A host that is slow, or hangs, still
acknowledges at the level of TCP, so only a broken network or a host that is off ends a connection here.
"""

import contextlib
import os
import socket
import threading
from pathlib import Path

LOST_AFTER_S = 60.0
_OPEN_FILES = Path("/proc/self/fd")  # Linux only; elsewhere nothing is changed


def end_lost_connections(after_s: float = LOST_AFTER_S, *, is_over: threading.Event | None = None) -> None:
    """Let TCP connections of this process fail after ``after_s`` without a sign of the other host, now and later on.

    A thread sets the limit for new connections until ``is_over``, or the end of the process.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT") or not _OPEN_FILES.is_dir():
        return
    stop = threading.Event() if is_over is None else is_over

    def run() -> None:
        known = set[str]()
        while True:
            known = _limit(after_s, known)
            if stop.wait(2.0):
                return

    threading.Thread(target=run, name="trainwright-connections", daemon=True).start()


def _limit(after_s: float, known: set[str]) -> set[str]:
    """Set the limit for connections that are not ``known``; return those that are open."""
    found = set[str]()
    for entry in os.listdir(_OPEN_FILES):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(_OPEN_FILES / entry)
            if target.startswith("socket:"):
                found.add(target)
                if target not in known:
                    _limit_one(int(entry), after_s)
    return found


def _limit_one(descriptor: int, after_s: float) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            probes_s = max(1, round(after_s / 4))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probes_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probes_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * after_s))

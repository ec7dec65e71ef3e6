"""Connections of a process get a limit for the silence of the other host, also those that are made later."""

import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from trainwright.parallel.connections import end_lost_connections

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not Path("/proc/self/fd").is_dir(), reason="finds the sockets by /proc"
)


def limit_of(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def wait_for_limit(connection: socket.socket, milliseconds: int) -> None:
    end = time.monotonic() + 60
    while limit_of(connection) != milliseconds:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_connections_of_now_and_later_are_limited_and_still_work() -> None:
    is_over, (one, other) = threading.Event(), socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, one, other:
        with socket.create_connection(server.getsockname()) as early:
            end_lost_connections(12, is_over=is_over)
            wait_for_limit(early, 12_000)
            with socket.create_connection(server.getsockname()) as late:
                wait_for_limit(late, 12_000)
                accepted, _ = server.accept()
                with accepted:
                    early.sendall(b"text")
                    assert accepted.recv(4) == b"text"
        is_over.set()
        one.sendall(b"text")
        assert other.recv(4) == b"text"

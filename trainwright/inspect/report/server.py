"""Serve a report on this machine only, and follow runs in progress."""

import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

import xxhash

from trainwright.base.errors import ConfigError
from trainwright.inspect.report.page import content, page
from trainwright.inspect.report.run_data import RunData

_HOST = "127.0.0.1"
_MIN_AGE = 1.0  # seconds between two reads of the runs; more where a read takes long


class ReportServer(ThreadingHTTPServer):
    """Serves the page at ``/`` and what changes at ``/content.json``. ``find`` returns the runs, newly read.

    It listens on 127.0.0.1, and answers only requests for this address: a page of another site that a browser shows
    cannot read it.

    Raises:
        ConfigError: the port is in use. Port 0 is a free one.
    """

    daemon_threads = True

    def __init__(self, find: Callable[[], list[RunData]], port: int = 0) -> None:
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port: {port} cannot be used ({error}); 0 takes a free one.") from error
        self._find, self._lock = find, Lock()
        self._latest, self._tag, self._next = b"", "", 0.0

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_port}/"

    def allows(self, host: str) -> bool:
        """Whether a request names this address, and not the name of another site that leads here."""
        return host in (f"{_HOST}:{self.server_port}", f"localhost:{self.server_port}")

    def page(self) -> bytes:
        return page(self._find(), is_live=True).encode()

    def content(self) -> tuple[bytes, str]:
        """What changes, as JSON, and its tag."""
        with self._lock:
            if time.monotonic() >= self._next:
                start = time.monotonic()
                self._latest = json.dumps(content(self._find()), allow_nan=False).encode()
                self._tag = f'"{xxhash.xxh3_64_hexdigest(self._latest)}"'
                self._next = time.monotonic() + max(_MIN_AGE, 10 * (time.monotonic() - start))
            return self._latest, self._tag


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        if not self.server.allows(self.headers.get("Host", "")):
            self.send_error(403)
        elif self.path == "/":
            self._send(self.server.page(), "text/html; charset=utf-8", "")
        elif self.path == "/content.json":
            content, tag = self.server.content()
            if self.headers.get("If-None-Match") == tag:
                self.send_response(304)
                self.end_headers()
            else:
                self._send(content, "application/json", tag)
        else:
            self.send_error(404)

    def _send(self, content: bytes, kind: str, tag: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not logged."""

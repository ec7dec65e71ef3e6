"""An S3 server on loopback in a process of its own, which a killed training leaves as it is: moto, with one bucket."""

import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType

PROGRAM = """
import logging, sys, time
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the tests end
"""
BUCKET = "bucket"


class S3Server:
    """``variables``: the environment of a program that uses it, as a user would set it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        self.port = next(int(line) for line in lines if line.strip().isdigit())
        self.url = f"http://127.0.0.1:{self.port}"
        self.variables = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing-key",
            "AWS_SECRET_ACCESS_KEY": "testing-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._make_bucket()

    def _make_bucket(self) -> None:
        import urllib.request

        for _ in range(50):
            with suppress(OSError):
                request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")
                urllib.request.urlopen(request, timeout=5).close()
                return
            time.sleep(0.1)
        raise AssertionError("the S3 server does not answer")

    def __enter__(self) -> "S3Server":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()

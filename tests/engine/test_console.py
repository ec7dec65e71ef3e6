"""What a program that uses the library shows on its console."""

import os
import subprocess
import sys

_PROGRAM = """
import logging, os, warnings
from trainwright.engine.console import log_to_console
log_to_console()
log_to_console()
secret = os.environ["SOME_API_TOKEN"]
warnings.warn(f"first {secret}")
logging.getLogger("a.users").warning("second %s", secret)
logging.getLogger("trainwright.x").info("third %s", secret)
"""


def test_values_of_secret_variables_reach_the_console_by_no_way():
    environment = {**os.environ, "SOME_API_TOKEN": "plainwordsonly"}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True)
    shown = done.stdout + done.stderr
    assert "plainwordsonly" not in shown
    assert [word for word in ("first", "second", "third") if f"{word} [redacted]" in shown] == [
        "first",
        "second",
        "third",
    ]

"""A log file that a background thread writes, so that a slow disk does not slow the program."""

import logging
import os
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

from trainwright.checkpoint.files import open_regular
from trainwright.terminal import print_line

_MAX_WAITING = 10_000  # lines


class LogFile(logging.Handler):
    """Append log lines to ``path`` in a background thread, which starts with the first line and ends with ``close``.

    A line is formatted when it is logged and queued when the call returns. The queue holds 10,000 lines; while it is
    full, new lines are dropped, and the file reports how many. A forked process has no such thread and writes
    synchronously.

    Raises:
        OSError: the file cannot be opened, or is not a regular file (a pipe, for example).
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        # No file object: if the thread holds its lock during a fork, the lock is never released in the child process.
        self._descriptor: int | None = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._process = os.getpid()
        self._waiting: SimpleQueue[str | None] = SimpleQueue()  # None ends the thread
        self._num_left_out = 0
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"LogFile({str(self.path)!r})"

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:  # as in the handlers of the standard library: a logging error never stops a program
            self.handleError(record)
            return
        if os.getpid() != self._process:
            self._write(line)
        elif self._waiting.qsize() >= _MAX_WAITING:
            self._num_left_out += 1
        else:
            self._waiting.put(line)
            if self._thread is None and self._descriptor is not None:
                self._thread = threading.Thread(target=self._work, name="trainwright-log", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait until all lines are in the file, then close it."""
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._process:
            self._waiting.put(None)
            thread.join()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        super().close()

    def _work(self) -> None:
        is_over = False
        while not is_over:
            lines = [self._waiting.get()]
            while not self._waiting.empty():
                lines.append(self._waiting.get())
            is_over = None in lines
            if self._num_left_out:
                lines.append(f"({self._num_left_out} lines were dropped here: the disk was slower than the program.)\n")
                self._num_left_out = 0
            self._write("".join(line for line in lines if line is not None))

    def _write(self, text: str) -> None:
        block = text.encode(errors="backslashreplace")
        try:
            while block and self._descriptor is not None:
                block = block[os.write(self._descriptor, block) :]
        except OSError as error:
            print_line(f"{self.path} cannot be written: {error}", file=sys.stderr)

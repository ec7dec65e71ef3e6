"""Runs in processes of their own, some at a time. Signals are passed on; after SIGINT and SIGTERM a run saves."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from trainwright.base.devices import count_cpus
from trainwright.base.signal_handlers import restore_handler, set_handler

OUTPUT = "console.txt"  # in the folder of a run: what it prints
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_LOOK_S = 0.1
_IS_POSIX = os.name == "posix"


@dataclass(slots=True)
class _Running:
    process: "subprocess.Popen[bytes]"
    slot: int
    num_passed: int = 0  # signals that were passed on to it


class Processes:
    """At most ``number`` processes. The context ends those that still run, after their save.

    With several, each has its part of the CPUs, and one of the GPUs that this process sees.
    """

    def __init__(self, number: int) -> None:
        self.received: list[int] = []  # signals to this process
        self._number = number
        self._running: dict[str, _Running] = {}
        self._handled: list[int] = []
        self._devices = _visible_devices() if number > 1 else []

    def __enter__(self) -> "Processes":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    set_handler(number, self._on_signal)
                    self._handled.append(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for one in self._running.values():
            one.process.terminate()
        while self._running:
            self.wait()
        while self._handled:
            restore_handler(self._handled.pop())

    @property
    def is_full(self) -> bool:
        return len(self._running) >= self._number

    @property
    def is_idle(self) -> bool:
        return not self._running

    def start(self, name: str, command: Sequence[str], folder: Path) -> None:
        slot = min({*range(self._number)} - {one.slot for one in self._running.values()})
        folder.mkdir(parents=True, exist_ok=True)
        # In a group of its own: a terminal sends Ctrl-C to this process only, which passes it on once.
        group: dict[str, Any] = {"process_group": 0} if _IS_POSIX else {}
        with open(folder / OUTPUT, "ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment(slot)},
                **group,
            )
        self._running[name] = _Running(process, slot)

    @property
    def names(self) -> list[str]:
        """Those of the processes that run."""
        return [*self._running]

    def wait(self, look: Callable[[], None] = lambda: None) -> tuple[str, int]:
        """The name and the exit code of the first process that ends; below 0: by a signal. Calls ``look`` meanwhile."""
        while True:
            self._pass_on()
            look()
            for name, one in self._running.items():
                if (code := one.process.poll()) is not None:
                    del self._running[name]
                    return name, code
            time.sleep(_LOOK_S)

    def _environment(self, slot: int) -> Mapping[str, str]:
        found = {}
        if self._number > 1 and "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(1, count_cpus() // self._number))
        if len(self._devices) > 1:
            found["CUDA_VISIBLE_DEVICES"] = self._devices[slot % len(self._devices)]
        return found

    def _pass_on(self) -> None:
        for one in self._running.values():
            for number in self.received[one.num_passed :] if _IS_POSIX else ():
                one.process.send_signal(number)
            one.num_passed = len(self.received)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self.received:
            os.write(2, b"\nThe runs save and stop; press Ctrl-C again to end them at once.\n")  # async-signal-safe
        self.received.append(number)


def _visible_devices() -> list[str]:
    """The GPUs that this process sees, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def command_of_runs(*, is_script: bool) -> list[str]:
    """The program that trains a run: this script, or ``trainwright train``."""
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if is_script:
        return [python, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
    # -P: without the working folder, where a file could have the name of a module that Python imports at the start.
    return [python, "-P", "-u", "-m", "trainwright", "train"]

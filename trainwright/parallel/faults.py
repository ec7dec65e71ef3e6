"""Failures of one of several processes: its own traceback comes first and once, and the others end with one line.

The processes exchange reports in the store where they have met, not by collective calls: a process that fails or hangs
takes part in none. A thread of each process reads the store once a second, and looks at where its process is: a process
that stays at one place for ``timeout_s`` ends the job, after all processes have printed the stacks of their threads.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from trainwright.config.errors import UserError
from trainwright.stacks import stack_of

# In the errors of torch's backends: another process closed its connection, or did not answer in time.
_OF_CONNECTIONS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport", "Socket Timeout"),
    *("NCCL", "Timed out waiting", "Application timeout caused pair closure", "Socket closed"),
)
_ENDS_ITSELF_S = 10.0  # a process whose main thread waits for a process that has failed is ended after this time
_REPORT_S = 5.0  # to wait for the traceback or the stacks of the others

_watch: "FaultWatch | None" = None


class FaultWatch:
    """Reports the failures of this process to the others, and theirs to this one.

    Args:
        store: a ``torch.distributed`` store that all processes share.
        timeout_s: a process that stays at one place for so long hangs.

    Attributes:
        trainer: has ``iter`` while a training runs; None: no training runs.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self.trainer: Any = None
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        self._failed = ""  # where the training has failed
        self._known: dict[str, Any] = {}  # reports that were read: the store ends with the process that holds it
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainwright-faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._is_over.set()

    def announce(self, error: BaseException) -> None:
        """Report a failure of this process, unless it follows from that of another one."""
        self._failed = self._where()
        is_own = getattr(error, "raised_on_rank", self._rank) == self._rank
        if is_own and not is_of_connections(error) and isinstance(error, Exception):
            report = {"rank": self._rank, "where": self._where(), "error": _text(error)}
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self._store.compare_set("fault", "", json.dumps(report))

    def line_for(self, error: BaseException) -> str | None:
        """What to print instead of the traceback of an error that follows from the failure of another process.

        None: it is an error of this process. Empty: all processes refuse to train for the same reason, which the other
        one has printed. Waits until the other process has printed its traceback.
        """
        self.announce(error)
        is_lost = is_of_connections(error)
        fault = self._read("fault", _REPORT_S if is_lost else 0.0)
        if fault is None and is_lost:
            return (
                f"rank {self._rank}: ended{self._where()}. Another process ended without a report: it was killed, ran"
                f" out of memory, or its machine or the network failed. ({_text(error)})"
            )
        if fault is None or fault["rank"] == self._rank or not (is_lost or fault["error"] == _text(error)):
            return None
        self._read("reported", _REPORT_S)
        is_refusal = isinstance(error, UserError) and not (is_lost or self._where() or fault["where"])
        return "" if is_refusal else self._line_of(fault)

    def mark_reported(self) -> None:
        """The traceback of this process is printed."""
        with contextlib.suppress(RuntimeError):
            self._store.set("reported", "true")
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(2.0)  # this process holds the store, where the others read

    # Implementation.

    def _line_of(self, fault: dict[str, Any]) -> str:
        return (
            f"rank {self._rank}: ended{self._where()}, because rank {fault['rank']} failed{fault['where']}; see its"
            " traceback above."
        )

    def _where(self) -> str:
        iteration = getattr(self.trainer, "iter", None)
        return self._failed if iteration is None else f" in iteration {iteration + 1}"

    def _read(self, key: str, wait_s: float) -> Any:
        end = time.monotonic() + wait_s
        with contextlib.suppress(RuntimeError):
            while key not in self._known and not self._store.check([key]):
                if time.monotonic() >= end:
                    return None
                time.sleep(0.05)
            if key not in self._known:
                self._known[key] = json.loads(self._store.get(key))
        return self._known.get(key)

    def _run(self) -> None:
        place, since, fault_since = self._place(), time.monotonic(), 0.0
        moved = since
        while not self._is_over.wait(min(1.0, self._timeout_s / 10)):
            now, last = time.monotonic(), place
            place = self._place()
            since, moved = (since, moved) if place == last else (now, now)
            fault = self._read("fault", 0.0)
            if fault is not None and fault["rank"] != self._rank:
                fault_since = fault_since or now
                # Not if the program has caught the error on all ranks and goes on.
                if now - max(fault_since, moved) > _ENDS_ITSELF_S:
                    self._read("reported", _REPORT_S)
                    self._end(self._line_of(fault))
            if self.trainer is None:
                since = now
            if now - since > self._timeout_s or self._read("hang", 0.0) is not None:
                self._report_hang()

    def _place(self) -> tuple[Any, ...]:
        """Where the process is: equal at two times only if its main thread has not moved."""
        stack = stack_of(threading.main_thread().ident or 0) or [str(time.monotonic())]  # unknown: it may have moved
        return getattr(self.trainer, "iter", None), *stack

    def _report_hang(self) -> None:
        """Print the stacks of this process, and once for all which processes wait and which do not; end the process."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        waits, place = _waits_for_others(frame), _user_place(frame)
        own = {"waits": waits, "where": self._where(), "place": place}
        with contextlib.suppress(RuntimeError):
            self._store.set("hang", "true")
            self._store.set(f"hang/{self._rank}", json.dumps(own))
        rows = {rank: self._read(f"hang/{rank}", _REPORT_S) for rank in range(self._world_size)}
        for rank in range(self._rank):  # one after another
            self._read(f"stacks/{rank}", _REPORT_S if rows[rank] else 0.0)
        sys.stderr.write(f"\nrank {self._rank}: the stacks of all threads{self._where()}:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"stacks/{self._rank}", "true")
        if self._rank == min(rank for rank, row in rows.items() if row):
            for rank in range(self._world_size):
                self._read(f"stacks/{rank}", _REPORT_S if rows[rank] else 0.0)
            sys.stderr.write(f"\n{_hang_summary(rows, self._timeout_s)}\n")
            sys.stderr.flush()
            with contextlib.suppress(RuntimeError):
                self._store.set("summary", "true")
        self._read("summary", 2 * _REPORT_S)  # the launcher ends the others when the first one ends
        self._end()

    def _end(self, line: str = "") -> None:
        if line:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()
        os._exit(1)  # the main thread may never return from where it waits


def stop_watching() -> None:
    """Stop what :func:`watch_faults` started."""
    global _watch
    if _watch is not None:
        _watch.stop()
    _watch = None


def watch_faults(
    store: Any, rank: int, world_size: int, timeout_s: float, leave: Callable[[], object] = stop_watching
) -> None:
    """Report failures among the processes that share ``store`` until :func:`stop_watching`.

    ``leave``: called when an uncaught error is printed, so that the others end at once.
    """
    global _watch
    stop_watching()
    _watch = FaultWatch(store, rank, world_size, timeout_s)
    if sys.excepthook is not _print_once:
        _print_once.other, sys.excepthook = sys.excepthook, _print_once  # type: ignore[attr-defined]
    _print_once.leave = leave  # type: ignore[attr-defined]
    atexit.unregister(stop_watching)
    atexit.register(stop_watching)


def watch_training(trainer: Any) -> None:
    """Name the iteration of ``trainer`` in reports; None: no training runs."""
    if _watch is not None:
        _watch.trainer = trainer


def announce(error: BaseException) -> None:
    """Report to the other processes that this one fails."""
    if _watch is not None:
        _watch.announce(error)


def line_for(error: BaseException) -> str | None:
    """The line to print instead of the error, if it follows from the failure of another process; otherwise None."""
    return None if _watch is None else _watch.line_for(error)


def mark_reported() -> None:
    """The error of this process is printed: now the others print their lines."""
    if _watch is not None:
        _watch.mark_reported()


def leave_to_first(error: BaseException) -> None:
    """Let only the first process print an error that all of them raise before they have met."""
    if (rank := os.environ.get("RANK", "0")) == "0":
        return
    other = sys.excepthook

    def print_line(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is error:
            sys.stderr.write(f"rank {rank}: ended with the {kind.__name__} of rank 0.\n")
        else:
            other(kind, raised, trace)

    sys.excepthook = print_line


def is_of_connections(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, says that another process cannot be reached."""
    seen = set[int]()  # an error may be its own context, by way of another
    while error is not None and id(error) not in seen:
        if names_connection(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def names_connection(error: BaseException) -> bool:
    """Whether the error itself says that another process cannot be reached."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_CONNECTIONS)


def _print_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    line = line_for(error) if issubclass(kind, Exception) else None
    if line is not None:
        sys.stderr.write(line + "\n" if line else "")
        return
    _print_once.other(kind, error, trace)  # type: ignore[attr-defined]
    sys.stderr.flush()
    mark_reported()
    _print_once.leave()  # type: ignore[attr-defined]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _waits_for_others(frame: FrameType | None) -> bool:
    """Whether a thread is in a collective call: in torch.distributed, or in a backward pass, which averages."""
    while frame is not None:
        file = frame.f_code.co_filename.replace(os.sep, "/")
        if "/torch/distributed/" in file or frame.f_code.co_name == "_engine_run_backward":
            return True
        if "/torch/" not in file:
            return False
        frame = frame.f_back
    return False


def _user_place(frame: FrameType | None) -> str:
    """The innermost place outside torch: "train.py:21 in forward"."""
    stack = [] if frame is None else traceback.extract_stack(frame)
    for entry in reversed(stack):
        if "/torch/" not in entry.filename.replace(os.sep, "/"):
            return f"{os.path.basename(entry.filename)}:{entry.lineno} in {entry.name}"
    return "an unknown place"


def _hang_summary(rows: dict[int, Any], timeout_s: float) -> str:
    lines = [
        f"A process has waited at one place for {timeout_s:g} s (hang_timeout_s): the job ends. Its stacks are above."
    ]
    for rank, row in rows.items():
        if row is None:
            lines.append(f"  rank {rank}: does not answer")
        else:
            what = "waits for the others" if row["waits"] else "did not come"
            lines.append(f"  rank {rank}: {what}{row['where']}, at {row['place']}")
    if all(row and row["waits"] for row in rows.values()):
        lines.append("  All of them wait, each for another call: they have made different collective calls.")
    return "\n".join(lines)

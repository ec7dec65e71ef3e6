"""Failures of one of several processes: its own traceback comes first and once, and the others end with one line.

The processes exchange reports in the store where they have met, not by collective calls: a process that fails or hangs
takes part in none. A thread of each process reads the store once a second, and looks at where its process is: a process
that stays at one place for too long (`Limits`) ends the job, after all processes have printed the stacks of their
threads. Within a training that is any place; outside, where user code may take its time, one where it waits for others.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from trainwright.base.dist import get_local_rank, get_pipeline_parallel_size
from trainwright.base.error_file import is_reported, text_of, write_error_file
from trainwright.base.errors import ConfigError, UserError
from trainwright.base.stacks import all_stacks, stack_of
from trainwright.parallel import stack_places as places

# In the errors of torch's backends: another process closed its connection, or did not answer in time.
_OF_CONNECTIONS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport", "Socket Timeout"),
    *("NCCL", "Timed out waiting", "Application timeout caused pair closure", "Socket closed"),
)
_ENDS_ITSELF_S = 10.0  # a process whose main thread waits for a process that has failed is ended after this time
_REPORT_S = 5.0  # to wait for the traceback or the stacks of the others
_STOP_S = 5.0  # to wait for the thread to end; it reads the store, which takes milliseconds
_STAYS_S = 5.0  # a process that has not moved for this time reports where it is
_IDLE = 0.1  # of a processor: a process that waits uses less
_LOOKS = 3  # in a row that must show the same before processes that are apart are ended
_LOOKS_AT_EXCHANGES = 12  # if they may be in one exchange, of much data over a slow network

_watch: "FaultWatch | None" = None


class OtherProcessError(RuntimeError):
    """Another process has failed, and does not come to a call that all must make."""


class Training(Protocol):
    """What reports read of a training: its iteration, and its first one."""

    iter: int
    start_iter: int


class Limits(NamedTuple):
    """How long a process may stay at one place: after the first update of a training, and before or outside of one."""

    later_s: float
    first_s: float


class FaultWatch:
    """Reports the failures of this process to the others, and theirs to this one.

    Args:
        store: a ``torch.distributed`` store that all processes share.
        limits: a process that stays at one place for so long hangs.

    Attributes:
        training: the one that runs; None: none does.
    """

    def __init__(self, store: Any, rank: int, world_size: int, limits: Limits) -> None:
        self.training: Training | None = None
        self._store, self._rank, self._world_size, self._limits = store, rank, world_size, limits
        self._failed: str | None = None  # where the training has failed; None: it has not
        self._num_trainings, self._num_meetings = 0, 0  # how many have begun
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._meeting = ""  # the call in which this process waits for the others to make it, too
        self._known: dict[str, Any] = {}  # reports that were read: the store ends with the process that holds it
        self._row: dict[str, Any] = {}  # where this process stays, as reported
        self._seen: tuple[list[str], int] = [], 0  # the rows of all processes, and in how many looks they were the same
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainwright-faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the others learn that this process takes part in nothing any more."""
        self._is_over.set()
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._store.compare_set("left", "", json.dumps(self._rank))
        if threading.current_thread() is not self._thread:
            # If Python ended while it reads the store, C++ would abort the process ("terminate called without an active
            # exception").
            self._thread.join(_STOP_S)

    def begin(self, training: Training | None) -> None:
        """A training begins; None: it is over. Failures of earlier ones do not end it."""
        if training is not None:
            self._num_trainings += 1
            self._failed = None
        self.training = training

    def meet(self, call: str) -> None:
        """Return when every process has come to its call of this name."""
        self._num_meetings += 1
        key = f"meet/{self._num_meetings}/{call}"
        self._meeting, pause = call, 0.001
        try:
            if self._store.add(key, 1) == self._world_size:
                self._store.set(f"{key}/all", "true")
            while not self._store.check([f"{key}/all"]):  # a wait in the store would stop the thread that reads it
                if self._store.check(["left"]) and not self._store.check([f"{key}/all"]):
                    fault = self._fault()
                    if fault is not None and fault["rank"] != self._rank:
                        raise OtherProcessError(f"rank {fault['rank']} failed{fault['where']}: {fault['error']}")
                    raise ConfigError(_left_text(call, self._read("left", 0.0)))
                time.sleep(pause)
                pause = min(2 * pause, 0.2)
        except OtherProcessError:
            raise
        except RuntimeError:  # the store is gone: the exchange that follows shows why
            pass
        finally:
            self._meeting = ""

    def announce(self, error: BaseException, *, is_caught: bool = True) -> None:
        """Report a failure of this process, unless it follows from that of another one.

        ``is_caught``: the program may catch it; a training that begins later is another one.
        """
        self._failed = self._where()
        is_own = getattr(error, "raised_on_rank", self._rank) == self._rank
        if is_own and not is_of_connections(error) and isinstance(error, Exception):
            report = json.dumps({"rank": self._rank, "where": self._where(), "error": text_of(error)})
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self._publish(f"fault/{self._num_trainings}", report, is_first=True)
                if not is_caught:
                    self._publish("fault", report, is_first=True)
                    write_error_file(error)

    def line_for(self, error: BaseException) -> str | None:
        """What to print instead of the traceback of an error that follows from the failure of another process.

        None: it is an error of this process. Empty: another one has printed the reason, also where all processes refuse
        to train for the same one. Waits until the other process has printed its traceback.
        """
        self.announce(error, is_caught=False)
        is_lost = is_of_connections(error)
        fault, left = self._fault(), self._read("left", 0.0)
        if fault is None and is_lost and self._read("over", 0.0) is None:
            if left is not None:
                calls = places.calls_of_user(places.frames_of_traceback(error.__traceback__))
                return f"rank {self._rank}: ended{self._where()}. {_left_text(places.shown_call(calls), left)}"
            fault = self._fault(_REPORT_S)
        if is_lost and self._read("over", 0.0) is not None:
            return ""
        if fault is None and is_lost:
            return (
                f"rank {self._rank}: ended{self._where()}. Another process ended without a report: it was killed, ran"
                " out of memory, made another collective call than this process (gloo ends it, above; data ranks that"
                " use different parameters need find_unused_parameters=True), or its machine or the network failed."
                f" ({text_of(error)})"
            )
        is_of_other = is_lost or getattr(error, "raised_on_rank", self._rank) != self._rank
        if fault is None or fault["rank"] == self._rank or not (is_of_other or fault["error"] == text_of(error)):
            return None
        self._read("reported", _REPORT_S)
        is_refusal = isinstance(error, UserError) and not (is_lost or self._where() or fault["where"])
        return "" if is_refusal else self._line_of(fault)

    def mark_reported(self) -> None:
        """The traceback of this process is printed."""
        with contextlib.suppress(RuntimeError):
            self._store.set("reported", "true")
        self._keep_store()

    # Implementation.

    def _line_of(self, fault: dict[str, Any]) -> str:
        reason = f"rank {self._rank}: ended{self._where()}, because rank {fault['rank']} failed{fault['where']}"
        if self._read("reported", 0.0) is not None:
            return f"{reason}; see its traceback above."
        if self._is_store_gone():  # with the program of the first process, so that one does not run any more
            return f"{reason} ({fault['error']})."
        return (
            f"{reason} ({fault['error']}), and its program still runs: it has caught this error. No process can train"
            " without the others: let the error end the process, or raise it on all of them."
        )

    def _fault(self, wait_s: float = 0.0) -> Any:
        """The first failure in the current training of this process, or else the first uncaught one."""
        return self._read(f"fault/{self._num_trainings}", 0.0) or self._read("fault", wait_s)

    def _fault_of_others(self) -> Any:
        """The failure of another process that this one cannot continue after; None: there is none.

        One that this program has caught, too, does not count after the training.
        """
        is_caught = self.training is None and self._failed is not None
        fault = self._read("fault", 0.0) if is_caught else self._fault()
        return None if fault is None or fault["rank"] == self._rank else fault

    def _is_store_gone(self) -> bool:
        try:
            self._store.check(["fault"])
        except RuntimeError:
            return True
        return False

    def _keep_store(self) -> None:
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(2.0)  # this process holds the store, where the others read

    def _where(self) -> str:
        iteration = getattr(self.training, "iter", None)
        return self._failed or "" if iteration is None else f" in iteration {iteration + 1}"

    def _publish(self, key: str, value: str, *, is_first: bool = False) -> None:
        """Write what the threads of all processes read; ``is_first``: unless another process has.

        "news" comes first. Until it is there, they look for nothing else: one store answers all of them.
        """
        self._store.set("news", "true")
        if is_first:
            self._store.compare_set(key, "", value)
        else:
            self._store.set(key, value)

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
        place, fault_since, used = self._place(), 0.0, time.process_time()
        since = moved = busy = now = time.monotonic()
        while not self._is_over.wait(min(1.0, self._limits.later_s / 10)):
            looked, now, last, used_before = now, time.monotonic(), place, used
            place, used = self._place(), time.process_time()
            since, moved = (since, moved) if place == last else (now, now)
            busy = now if used - used_before > _IDLE * (now - looked) else busy
            has_news = self._read("news", 0.0) is not None
            if has_news and self._read("over", 0.0) is not None:
                self._end()
            if self._launcher not in (None, os.getppid()):
                self._end(f"rank {self._rank}: ended{self._where()}, because its launcher was killed.")
            fault = self._fault_of_others() if has_news else None
            if fault is not None:
                fault_since = fault_since or now
                # Not if the program has caught the error on all ranks and continues.
                if now - max(fault_since, moved) > _ENDS_ITSELF_S:
                    self._read("reported", _REPORT_S)
                    self._end(self._line_of(fault))
            if fault is not None or not (self.training is not None or self._waits(place)):
                since = now
            # After a failure, the reason why nothing moves is known.
            is_hang = has_news and fault is None and self._read("hang", 0.0) is not None
            if is_hang or now - since > self._limit_s:
                self._report_hang()
            self._report_place(place[1:] if now - moved > _STAYS_S else (), is_idle=now - busy > _STAYS_S)

    @property
    def _limit_s(self) -> float:
        """How long this process may stay at its place."""
        training = self.training
        has_updated = training is not None and training.iter > training.start_iter
        return self._limits.later_s if has_updated else self._limits.first_s

    def _waits(self, place: tuple[Any, ...]) -> bool:
        """Whether this process waits for the others: in a meeting, or in a collective call."""
        return bool(self._meeting) or places.waits_for_others(places.frames_of(place[1:]))

    def _place(self) -> tuple[Any, ...]:
        """Where the process is: equal at two times only if its main thread has not moved."""
        stack = stack_of(threading.main_thread().ident or 0) or [str(time.monotonic())]  # unknown: it may have moved
        if self._meeting:  # a loop, which moves
            stack = stack[max((n for n, line in enumerate(stack, 1) if line.endswith(" in meet")), default=0) :]
        return getattr(self.training, "iter", None), *stack

    def _report_place(self, stack: Sequence[str], *, is_idle: bool) -> None:
        """Report where this process stays; () if it moves. The first process ends the job if they are apart."""
        row: dict[str, Any] = {}
        if stack:
            row = places.row_of(
                places.frames_of(stack),
                meeting=self._meeting,
                iteration=getattr(self.training, "iter", None),
                where=self._where(),
                is_idle=is_idle,
                by_user=get_pipeline_parallel_size() > 1,
            )
        with contextlib.suppress(RuntimeError):
            if row != self._row:
                self._store.set(
                    f"place/{self._rank}", json.dumps(row | {"training": self._num_trainings} if row else row)
                )
                self._row = row
            if not row:
                return
            left = self._read("left", 0.0)
            if row["waits"] and left is not None and not self._meeting:  # a meeting raises the error itself
                fault = self._fault_of_others()
                if fault is not None:
                    self._end(self._line_of(fault))
                self._end(f"rank {self._rank}: ended{self._where()}. {_left_text(row['call'], left)}")
            if self._rank == 0:
                self._end_if_apart()

    def _end_if_apart(self) -> None:
        keys = [f"place/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            return
        texts = [text.decode() for text in self._store.multi_get(keys)]
        last, times = self._seen
        times = times + 1 if texts == last else 1
        self._seen = texts, times
        rows = [json.loads(text) for text in texts]
        if times < _LOOKS or not all(rows) or not places.are_apart(rows):
            return
        if times < _LOOKS_AT_EXCHANGES and not places.is_certain(rows):
            return
        if self._read(f"fault/{min(row['training'] for row in rows)}", 0.0) is None:  # else those who wait for it end
            self._end(places.apart_message(rows))

    def _report_hang(self) -> None:
        """Print the stacks of this process, and once for all which processes wait and which do not; end the process."""
        frames = places.frames_of(self._place()[1:])
        has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        own = {
            "waits": bool(self._meeting) or places.waits_for_others(frames),
            "where": self._where(),
            "place": self._meeting or places.inner_place(frames),
            "has_gpu": has_gpu,
            "reads_gpu": has_gpu and places.reads_gpu(frames),
        }
        with contextlib.suppress(RuntimeError):
            self._publish("hang", "true")
            self._store.set(f"hang/{self._rank}", json.dumps(own))
        end = time.monotonic() + _REPORT_S
        for rank in range(max(0, self._rank - get_local_rank()), self._rank):  # those of a host, one after another
            if self._read(f"hang/{rank}", end - time.monotonic()) is not None:
                self._read(f"stacks/{rank}", _REPORT_S)
        sys.stderr.write(f"\nrank {self._rank}: the stacks of all threads{self._where()}:\n")
        for name, stack in all_stacks():
            sys.stderr.write("\n".join([f"{name}, most recent call first:", *(f"  {line}" for line in stack), ""]))
        sys.stderr.flush()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"stacks/{self._rank}", "true")
            own_number = str(self._rank)
            if self._store.compare_set("summary_of", "", own_number).decode() == own_number:
                self._write_summary()
        self._read("summary", 3 * _REPORT_S)  # the launcher ends the others when the first one ends
        self._keep_store()  # the others read there that the summary is written
        self._end()

    def _write_summary(self) -> None:
        rows = self._rows("hang", range(self._world_size))
        self._rows("stacks", [rank for rank, row in rows.items() if row])
        sys.stderr.write(f"\n{_hang_summary(rows, self._limit_s)}\n")
        sys.stderr.flush()
        self._store.set("summary", "true")

    def _rows(self, name: str, ranks: Sequence[int]) -> dict[int, Any]:
        """What these ranks report, in one request if all of them do in time; None of those that do not."""
        keys, end = [f"{name}/{rank}" for rank in ranks], time.monotonic() + _REPORT_S
        with contextlib.suppress(RuntimeError):  # the store has gone: `_read` has what it can
            while not (is_there := self._store.check(keys)) and time.monotonic() < end:
                time.sleep(0.05)
            if is_there:
                return {rank: json.loads(text) for rank, text in zip(ranks, self._store.multi_get(keys), strict=True)}
        return {rank: self._read(key, 0.0) for rank, key in zip(ranks, keys, strict=True)}

    def _end(self, line: str = "") -> None:
        if line:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
            with contextlib.suppress(RuntimeError):
                self._publish("over", "true")  # the others end without a line
            self._keep_store()
        os._exit(1)  # the main thread may never return from where it waits


def stop_watching() -> None:
    """Stop what :func:`watch_faults` started."""
    global _watch
    if _watch is not None:
        _watch.stop()
    _watch = None


def watch_faults(
    store: Any, rank: int, world_size: int, limits: Limits, leave: Callable[[], object] = stop_watching
) -> None:
    """Report failures among the processes that share ``store`` until :func:`stop_watching`.

    ``leave``: called when an uncaught error is printed, so that the others end at once.
    """
    global _watch
    stop_watching()
    _watch = FaultWatch(store, rank, world_size, limits)
    if sys.excepthook is not _print_once:
        before = sys.excepthook  # of `error_file`, or the user's
        _print_once.other, sys.excepthook = getattr(before, "other", before), _print_once  # type: ignore[attr-defined]
    _print_once.leave = leave  # type: ignore[attr-defined]
    atexit.unregister(stop_watching)
    atexit.register(stop_watching)


def watch_training(training: Training | None) -> None:
    """Name the iteration of ``training`` in reports; None: no training runs."""
    if _watch is not None:
        _watch.begin(training)


def meet(call: str) -> None:
    """Wait until every process has come to its call of this name, which all must make together.

    It exchanges nothing with processes that are elsewhere, whose exchanges a collective call would disturb. After some
    seconds the job ends with a message that names the call and where the others are, if they cannot come any more.

    Raises:
        ConfigError: another process has left.
    """
    if _watch is not None:
        _watch.meet(call)


def announce(error: BaseException) -> None:
    """Report to the other processes that this one fails."""
    if _watch is not None:
        _watch.announce(error)


def line_for(error: BaseException) -> str | None:
    """The line to print instead of the error, if it follows from the failure of another process; otherwise None."""
    if _watch is None:  # the processes have not met
        return "" if is_reported(error) else None
    return _watch.line_for(error)


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
    return isinstance(error, OtherProcessError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_CONNECTIONS)
    )


def _print_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    line = line_for(error) if issubclass(kind, Exception) else None
    if line is not None:
        sys.stderr.write(line + "\n" if line else "")
        return
    _print_once.other(kind, error, trace)  # type: ignore[attr-defined]
    sys.stderr.flush()
    mark_reported()
    _print_once.leave()  # type: ignore[attr-defined]


def _left_text(call: str, rank: int) -> str:
    return f"{call} needs all processes, and rank {rank} has left. {places.EVERY_PROCESS}"


def _hang_summary(rows: dict[int, Any], timeout_s: float) -> str:
    lines = [
        f"A process has waited at one place for {timeout_s:g} s (hang_timeout_s): the job ends. Its stacks are above."
    ]
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank, row in rows.items():
        if row is None:
            text = "does not answer, or has ended", "do not answer, or have ended", ""
        else:
            # On a GPU, code of the user that reads a number from it may wait, too: item() is in no stack.
            if row["waits"]:
                what = "waits for the others", "wait for the others"
            elif row["reads_gpu"]:
                what = "waits for its GPU", "wait for their GPUs"
            else:
                what = ("stays", "stay") if row["has_gpu"] else ("did not come", "did not come")
            text = *what, f"{row['where']}, at {row['place']}"
        found.setdefault(text, []).append(rank)
    for (of_one, of_several, where), ranks in found.items():
        lines.append(f"  {places.shown_ranks(ranks)}: {of_one if len(ranks) == 1 else of_several}{where}")
    if all(row and row["waits"] for row in rows.values()):
        lines.append("  All of them wait, each for another call: they have made different collective calls.")
    elif any(row and row["has_gpu"] for row in rows.values()):
        lines.append(
            "  A GPU waits for the other processes in a collective call, and its process where it reads a number from"
            " the GPU, such as a logged loss. So look first at a process that is at another place."
        )
    return "\n".join(lines)

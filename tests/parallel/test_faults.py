"""Two processes report to each other in a store; here both are in one process."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainwright
from trainwright.base.errors import ConfigError
from trainwright.parallel.faults import FaultWatch, Limits, is_of_connections

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41234")

AFTER_FAULT = "rank 0: ended in iteration 20, because rank 1 failed in iteration 20; see its traceback above."


class Training:
    iter = 19
    start_iter = 0


class FirstUpdate(Training):
    iter = start_iter = 19  # resumed


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultWatch]]:
    monkeypatch.setattr("trainwright.parallel.faults._REPORT_S", 0.05)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.HashStore()
    both = [FaultWatch(store, rank, 2, Limits(1000, 1000)) for rank in range(2)]
    for watch in both:
        watch.training = Training()
    yield both
    for watch in both:
        watch.stop()


class SlowStore:
    """A store that answers late; one that has not answered when Python ends would abort the process."""

    def __init__(self) -> None:
        self.store, self.is_asked = dist.HashStore(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def check(self, keys: list[str]) -> bool:
        self.is_asked.set()
        time.sleep(0.3)
        return bool(self.store.check(keys))


def test_nothing_reads_the_store_when_a_process_has_left() -> None:
    store: Any = SlowStore()
    before = set(threading.enumerate())
    watch = FaultWatch(store, 0, 2, Limits(0.1, 0.1))
    assert store.is_asked.wait(60)
    watch.stop()
    assert set(threading.enumerate()) - before == set()


def raised_on(rank: int, error: Exception) -> Exception:
    error.raised_on_rank = rank  # type: ignore[attr-defined]
    return error


def caused_by_lost(error: Exception) -> Exception:
    error.__cause__ = LOST
    return error


BAD = ValueError("bad data")
KILLED = "rank 0: ended in iteration 20. Another process ended without a report: it was killed"
STILL_RUNS = "because rank 1 failed in iteration 20 (ValueError: bad data), and its program still runs"


@pytest.mark.parametrize(
    ("announced", "is_reported", "error", "expected"),
    [
        (None, False, BAD, None),  # of this process: printed in full
        (BAD, True, LOST, AFTER_FAULT),
        (None, False, LOST, KILLED),
        (BAD, True, caused_by_lost(ValueError("the evaluation failed")), AFTER_FAULT),
        (BAD, True, raised_on(1, RuntimeError("Evaluation failed on rank 1: ValueError: bad data")), AFTER_FAULT),
        (BAD, False, ValueError("no data"), None),  # another error is printed as well
        (BAD, False, LOST, STILL_RUNS),
    ],
)
def test_the_line_of_an_error(
    announced: Exception | None, is_reported: bool, error: Exception, expected: str | None, watches: list[FaultWatch]
) -> None:
    if announced is not None:
        watches[1].announce(announced)
    if is_reported:
        watches[1].mark_reported()
    line = watches[0].line_for(error)
    assert line == expected if expected in (None, AFTER_FAULT) else str(expected) in str(line)


def test_a_refusal_of_another_process_before_the_training_is_printed_once(watches: list[FaultWatch]) -> None:
    for watch in watches:
        watch.training = None
    watches[1].announce(ConfigError("lr: too large"), is_caught=False)
    watches[1].mark_reported()
    assert watches[0].line_for(raised_on(1, ConfigError("lr: too large"))) == ""


def test_a_store_that_is_gone_shows_that_no_program_has_caught_the_error(
    watches: list[FaultWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    watches[0].announce(ValueError("bad data"))
    assert "because rank 0 failed" in (watches[1].line_for(LOST) or "")  # read while the store was there
    with monkeypatch.context() as patch:
        patch.setattr(watches[1], "_store", Gone())
        line = watches[1].line_for(LOST)
    assert line is not None
    assert "because rank 0 failed in iteration 20 (ValueError: bad data)" in line


class Polled(FaultWatch):
    """Looks at the place of a process that ``moves``, or waits at one place; records that it would end it."""

    moves = True

    def __init__(
        self,
        store: dist.Store,
        limits: Limits = Limits(0.5, 0.5),  # noqa: B008
        *,
        rank: int = 0,
        world_size: int = 2,
    ) -> None:
        self.num_looks, self.has_ended, self.lines = 0, threading.Event(), list[str]()
        super().__init__(store, rank, world_size, limits)

    def _place(self) -> tuple[int, ...]:
        self.num_looks += 1
        return (self.num_looks if self.moves else 0,)

    def _end(self, line: str = "") -> None:
        self.lines.append(line)
        self.has_ended.set()
        self._is_over.set()


def test_the_failure_of_another_process_is_the_reason_and_not_a_hang(
    watches: list[FaultWatch], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU no connection is lost: the others stay where they read a number, longer than ``hang_timeout_s``."""
    monkeypatch.setattr("trainwright.parallel.faults._ENDS_ITSELF_S", 1.0)
    store = dist.HashStore()
    watches[1]._store = store
    watches[1].announce(ValueError("bad data"))
    watches[1].mark_reported()
    watch = Polled(store)  # a hang is reported after 0.5 s
    watch.moves = False
    watch.training = Training()
    assert watch.has_ended.wait(60)
    assert watch.lines == [AFTER_FAULT]
    assert "stacks" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("training", "waits", "limits", "hangs"),
    [
        (Training, False, Limits(0.5, 1000), True),
        (FirstUpdate, False, Limits(0.5, 1000), False),
        (FirstUpdate, False, Limits(1000, 0.5), True),
        (None, True, Limits(1000, 0.5), True),  # before train(): the others never come
        (None, True, Limits(0.5, 1000), False),
        (None, False, Limits(0.5, 0.5), False),  # in code of the user, which may take its time
    ],
)
def test_how_long_a_process_may_stay_at_one_place(
    monkeypatch: pytest.MonkeyPatch, training: Any, waits: bool, limits: Limits, hangs: bool
) -> None:
    monkeypatch.setattr("trainwright.parallel.faults._REPORT_S", 0.05)
    file = f"{Path(torch.__file__).parent}/distributed/distributed_c10d.py" if waits else "/project/train.py"

    class Waits(Polled):
        def _place(self) -> Any:
            self.num_looks += 1
            return None, f'File "{file}", line 2 in barrier'

    watch = Waits(dist.HashStore(), limits)
    watch.begin(training and training())
    assert watch.has_ended.wait(60 if hangs else 1.5) == hangs
    watch.stop()


def test_a_process_that_waits_for_one_that_failed_and_has_left_is_told_of_the_failure(
    watches: list[FaultWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no connection is lost, as in a collective call of NCCL."""
    monkeypatch.setattr("trainwright.parallel.faults._STAYS_S", 0.2)
    store = dist.HashStore()
    watches[1]._store = store
    watches[1].begin(Training())
    watches[1].announce(ValueError("bad data"))
    watches[1].mark_reported()

    class InBackward(Polled):
        def _place(self) -> Any:
            frame = f'File "{Path(torch.__file__).parent}/autograd/graph.py", line 800 in _engine_run_backward'
            return 19, frame, 'File "/project/train.py", line 21 in train'

    store.set("left", "1")
    watch = InBackward(store)
    watch.begin(Training())
    assert watch.has_ended.wait(60)
    assert watch.lines[0] == AFTER_FAULT


@pytest.mark.parametrize("has_gpu", [False, True])
def test_where_each_process_hangs(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainwright.parallel.faults._REPORT_S", 0.2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    store = dist.HashStore()

    class Logging(Polled):
        moves = False

        def _place(self) -> Any:
            logged = Path(trainwright.__file__).parent / "events" / "scalars.py"
            return 5, f'File "{logged}", line 56 in to_numbers', 'File "/project/train.py", line 21 in train'

    watch = Logging(store)
    watch.training = Training()
    assert watch.has_ended.wait(60)
    _, _, summary = capsys.readouterr().err.partition("A process has waited at one place for 0.5 s")
    what = "waits for its GPU" if has_gpu else "did not come"
    assert f"rank 0: {what} in iteration 20, at scalars.py:56 in to_numbers" in summary
    assert "rank 1: does not answer, or has ended" in summary
    assert ("look first at a process that is at another place" in summary) is has_gpu


class CountingStore:
    """Counts the requests to a store, which one process answers for all others."""

    def __init__(self) -> None:
        self.store, self.calls = dist.HashStore(), list[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.store, name)


def test_a_process_asks_the_store_once_in_a_look() -> None:
    store: Any = CountingStore()
    watch = Polled(store)
    watch.training = Training()
    while watch.num_looks < 10:
        time.sleep(0.01)
    watch.stop()
    assert set(store.calls[:-1]) == {"check"}
    assert len(store.calls) <= watch.num_looks + 1


def test_the_report_of_a_hang_takes_equally_many_requests_for_any_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")  # two processes on each host
    row = (
        '{"waits": true, "where": " in iteration 20", "place": "train.py:9 in f", "has_gpu": false, "reads_gpu": false}'
    )

    class OfMany(Polled):
        moves = False

        def _place(self) -> Any:
            return 5, 'File "/project/train.py", line 21 in train'

    calls = {}
    for num_processes in (8, 512):
        store: Any = CountingStore()
        for rank in range(num_processes - 1):
            store.set(f"hang/{rank}", row)
            store.set(f"stacks/{rank}", "true")
        store.calls.clear()
        watch = OfMany(store, world_size=num_processes, rank=num_processes - 1)
        watch.training = Training()
        assert watch.has_ended.wait(60)
        calls[num_processes] = [name for name in store.calls if name != "check"], len(store.calls)
        text = f"  ranks 0 to {num_processes - 2}: wait for the others in iteration 20, at train.py:9 in f\n"
        assert text in capsys.readouterr().err
    assert calls[8][0] == calls[512][0]
    assert calls[512][1] < 40


def test_a_process_with_a_gpu_may_wait_at_any_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainwright.parallel.faults._REPORT_S", 0.2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    class Reading(Polled):
        def _place(self) -> Any:
            return 5, 'File "/project/train.py", line 21 in train'

    watch = Reading(dist.HashStore())
    watch.training = Training()
    assert watch.has_ended.wait(60)
    assert "rank 0: stays in iteration 20, at train.py:21 in train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LOST, True),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
    ids=["closed", "timeout", "shapes", "another-type"],
)
def test_errors_of_connections(error: Exception, expected: bool) -> None:
    assert is_of_connections(error) is expected


def test_an_error_that_no_training_raises_counts_in_all(watches: list[FaultWatch]) -> None:
    assert watches[1].line_for(ValueError("bad data")) is None
    watches[0].begin(Training())
    watches[1].mark_reported()
    assert "because rank 1 failed in iteration 20; see its" in (watches[0].line_for(LOST) or "")

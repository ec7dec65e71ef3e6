"""Two processes report to each other in a store; here both are in one process."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from trainwright.parallel.faults import FaultWatch, is_of_connections

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41234")


class Training:
    iter = 19


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultWatch]]:
    monkeypatch.setattr("trainwright.parallel.faults._REPORT_S", 0.05)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.HashStore()
    both = [FaultWatch(store, rank, 2, timeout_s=1000) for rank in range(2)]
    for watch in both:
        watch.trainer = Training()
    yield both
    for watch in both:
        watch.stop()


def test_an_error_of_this_process_is_printed_in_full(watches: list[FaultWatch]) -> None:
    assert watches[1].line_for(ValueError("bad data")) is None


def test_a_lost_connection_names_the_process_that_failed(watches: list[FaultWatch]) -> None:
    watches[1].announce(ValueError("bad data"))
    watches[1].mark_reported()
    line = watches[0].line_for(LOST)
    assert line == "rank 0: ended in iteration 20, because rank 1 failed in iteration 20; see its traceback above."


def test_a_lost_connection_without_a_report(watches: list[FaultWatch]) -> None:
    line = watches[0].line_for(LOST)
    assert line is not None
    assert line.startswith("rank 0: ended in iteration 20. Another process ended without a report: it was killed")


def test_an_error_raised_from_a_lost_connection(watches: list[FaultWatch]) -> None:
    error = ValueError("the evaluation failed")
    error.__cause__ = LOST
    watches[1].announce(KeyError("x"))
    assert "because rank 1 failed" in (watches[0].line_for(error) or "")


def test_another_error_is_printed_as_well(watches: list[FaultWatch]) -> None:
    watches[1].announce(ValueError("bad data"))
    assert watches[0].line_for(ValueError("no data")) is None


def test_the_same_error_on_all_ranks_is_printed_once(watches: list[FaultWatch]) -> None:
    assert watches[1].line_for(ValueError("batch_size")) is None
    assert "because rank 1 failed" in (watches[0].line_for(ValueError("batch_size")) or "")


def test_a_slow_traceback_is_waited_for(watches: list[FaultWatch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.parallel.faults._REPORT_S", 0.3)
    watches[1].announce(ValueError("bad data"))
    start = time.monotonic()
    watches[0].line_for(LOST)
    assert time.monotonic() - start > 0.25


class Polled(FaultWatch):
    """Looks at the place of a process that ``moves``, or waits at one place; records that it would end it."""

    moves = True

    def __init__(self, store: dist.Store) -> None:
        self.num_looks, self.has_ended = 0, threading.Event()
        super().__init__(store, 0, 2, timeout_s=1.0)

    def _place(self) -> tuple[int, ...]:
        self.num_looks += 1
        return (self.num_looks if self.moves else 0,)

    def _end(self, line: str = "") -> None:
        self.has_ended.set()
        self._is_over.set()


def test_a_process_ends_only_where_it_waits_for_one_that_failed(
    watches: list[FaultWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.parallel.faults._ENDS_ITSELF_S", 0.0)
    store = dist.HashStore()
    watches[1]._store = store
    watch = Polled(store)
    watches[1].announce(ValueError("bad data"))  # the program has caught it and goes on
    while watch.num_looks < 6 and not watch.has_ended.is_set():
        time.sleep(0.01)
    assert not watch.has_ended.is_set()
    watch.moves = False
    assert watch.has_ended.wait(60)


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

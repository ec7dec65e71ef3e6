"""Worker processes: the signals they outlive, their end, and what is heard of their death."""

import gc
import multiprocessing
import os
import signal
import subprocess
import textwrap
import threading
import time
import traceback
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from tests.fork_server import python
from trainwright.base.errors import ConfigTypeError
from trainwright.data import ColumnDataset, CyclicSampler, DataError, SingleRoundSampler, build_image_train_loader
from trainwright.data.batch_loader import BatchLoader, make_loader, opened
from trainwright.data.batches import Batches, Repeated
from trainwright.data.streaming import StreamLoader, eval_stream_loader
from trainwright.engine.loaders import batches_of_rank


class Slow(Dataset):
    """Samples ``(index, process, seconds that it has to live)``, each read in a few milliseconds."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.tensor([index, os.getpid(), signal.getitimer(signal.ITIMER_REAL)[0]], dtype=torch.float64)


def loader(num_workers=2):
    return build_image_train_loader(Slow(), 4, num_workers=num_workers, seed=1)[0]


def skip(batches, count=8):
    """Past what was prefetched before now."""
    return [next(batches) for _ in range(count)][-1]


def processes(batches):
    return {int(pid) for _ in range(2) for pid in next(batches)[:, 1]}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_the_signals_that_a_terminal_or_scheduler_sends_to_all(number):
    batches = iter(loader())
    pids = processes(batches)
    assert len(pids - {os.getpid()}) == 2
    for pid in pids:
        os.kill(pid, number)
    assert 1 not in skip(batches).shape
    assert processes(batches) == pids


def test_sigterm_is_for_the_process_that_trains():
    batches = iter(loader(1))
    (pid,) = processes(batches)
    assert next(batches)[0, 2] == 0
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
        skip(batches)
    assert processes(batches) == {pid}


@pytest.fixture
def handler_of_torch():
    next(iter(loader(1)))  # sets it, once in a process
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    gc.collect()
    end = time.monotonic() + 5
    while multiprocessing.active_children() and time.monotonic() < end:  # torch's handler would raise in pytest's code
        time.sleep(0.02)
    signal.signal(signal.SIGCHLD, handler)


def death(batches, killed=None):
    """What is raised, with its cause, after the process ``killed`` is.

    Who keeps the error keeps the frames that it came through, and so the workers. Torch raises it wherever this process
    is when the signal of a worker's end arrives, so here.
    """
    try:
        if killed is not None:
            os.kill(killed, signal.SIGKILL)
        while True:
            next(batches)
    except (RuntimeError, DataError) as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise it again, wherever this process is
        return f"{error} {error.__cause__}"


@pytest.mark.usefixtures("forked_workers")
def test_a_killed_worker_is_heard_of_at_once(handler_of_torch):
    batches = iter(loader())
    pid = processes(batches).pop()
    start = time.perf_counter()
    text = death(batches, pid)  # of torch, if it is raised outside of the loader
    assert "a worker of the loader ended (exit code -9" in text or f"(pid {pid}) is killed by signal: Killed" in text
    del batches
    assert time.perf_counter() - start < 4


@pytest.mark.slow
def test_after_an_error_workers_end_with_their_loader():
    class Breaks(Slow):
        def __getitem__(self, index):
            raise ValueError("broken")

    def run():
        with pytest.raises(ValueError, match="broken"):
            next(iter(build_image_train_loader(Breaks(), 4, num_workers=2)[0]))

    start = time.perf_counter()
    run()
    gc.collect()
    assert time.perf_counter() - start < 4
    assert not multiprocessing.active_children()


@pytest.mark.exhaustive
def test_a_worker_that_is_busy_for_long_is_killed_in_the_end():
    class Stuck(Slow):
        def __getitem__(self, index):
            time.sleep(0 if index < 4 else 60)
            return torch.tensor([index, os.getpid()])

    ours = build_image_train_loader(Stuck(), 4, num_workers=1, sampler=CyclicSampler(range(1000), 4))[0]
    batches = iter(ours)
    pid = int(next(batches)[0, 1])
    start = time.perf_counter()
    del ours, batches
    assert time.perf_counter() - start < 8  # torch waits 5 s for it
    assert pid not in {process.pid for process in multiprocessing.active_children()}


PROGRAM = """
import os, signal, sys, time
import multiprocessing
import torch
from trainwright.data import CyclicSampler, build_image_train_loader

class Data:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return torch.tensor([index, os.getpid()])

def run():
    global loader, batches
    loader = build_image_train_loader(Data(), 4, num_workers=2, pin_memory=False)[0]
    batches = iter(loader)
    pids = {int(next(batches)[0, 1]) for _ in range(2)}
    print(*pids, flush=True)
"""


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().split(")")[1].split()[0] != "Z"


def start_program(ending):
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(ending)
    pipe = subprocess.PIPE
    return subprocess.Popen([python(), "-c", program], stdout=pipe, stderr=pipe, text=True)


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks processes up in /proc")
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("run()", 0),
        ("run(); sys.exit(3)", 3),
        ("run(); raise KeyError('mine')", 1),
        ("p = multiprocessing.get_context('fork').Process(target=run); p.start(); p.join(); sys.exit(p.exitcode)", 0),
    ],
    ids=["end", "exit", "error", "inside a process"],
)
def test_a_process_ends_at_once_with_its_workers(ending, code):
    program = start_program(f"start = time.time()\n{ending.replace('; ', chr(10))}")
    pids = [int(pid) for pid in program.stdout.readline().split()]
    start = time.perf_counter()
    _, errors = program.communicate(timeout=20)
    assert time.perf_counter() - start < 4
    assert program.returncode == code
    assert len(pids) == 2
    assert not [pid for pid in pids if is_alive(pid)]
    assert ("KeyError: 'mine'" in errors) == (code == 1)
    assert "killed" not in errors
    assert "Exception ignored" not in errors


def all_end(pids):
    """Whether these processes end in the time in which torch's workers look twice for their parent, every 5 s."""
    deadline = time.monotonic() + 12
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks processes up in /proc")
@pytest.mark.exhaustive
def test_workers_end_when_the_process_that_trains_is_killed():
    program = start_program("run()\ntime.sleep(60)")
    pids = [int(pid) for pid in program.stdout.readline().split()]
    program.kill()
    program.communicate()
    assert all_end(pids)


SLOW_START = """
def slow(worker_id):
    print(os.getpid(), flush=True)
    time.sleep(1)

next(iter(build_image_train_loader(Data(), 4, num_workers=1, pin_memory=False, worker_init_fn=slow)[0]))
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks processes up in /proc")
def test_a_worker_ends_whose_trainer_is_killed_while_it_begins():
    with start_program(SLOW_START) as program:
        pid = int(program.stdout.readline())
        program.kill()
    assert all_end([pid])


def loader_of(data: Any, method: str) -> BatchLoader:
    options = {"multiprocessing_context": method}
    return make_loader(
        data, SingleRoundSampler(data, 3), seed=0, num_workers=1, collate_fn=None, loader_options=options
    )


NUMBERS = torch.arange(6.0)
COLUMNS = {
    "spawn": Subset(TensorDataset(NUMBERS.repeat(2)), range(6, 12)),
    "forkserver": ColumnDataset(x=NUMBERS),
    "fork": TensorDataset(NUMBERS),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", COLUMNS)
def test_workers_of_any_start_method_read_columns(method: str) -> None:
    batches = [batch["x"] if isinstance(batch, dict) else batch[0] for batch in loader_of(COLUMNS[method], method)]
    assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize("is_ours", [True, False])
def test_what_workers_cannot_receive_is_named(is_ours: bool) -> None:
    data = Slow()
    data.transform = lambda sample: sample
    torchs = DataLoader(data, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(ConfigTypeError, match=r"Slow.transform: workers cannot receive .*lambda.*num_workers=0"):
        next(iter(loader_of(data, "spawn")) if is_ours else Batches(torchs))


class Signalled(Dataset):
    """Each worker gets what a terminal or a scheduler sends to all processes."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        for number in (signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        return index


@pytest.mark.slow
@pytest.mark.parametrize("is_ours", [True, False])
def test_workers_that_are_not_forked_ignore_what_is_sent_to_all_processes(is_ours: bool) -> None:
    torchs = DataLoader(Signalled(), 3, num_workers=1, multiprocessing_context="spawn")
    (batch,) = loader_of(Signalled(), "spawn") if is_ours else islice(Batches(torchs), 1)
    assert batch.tolist() == [0, 1, 2]


class Broken(Dataset):
    """Sample 7 is what ``make`` returns or raises."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.make() if index == 7 else {"x": torch.ones(2), "other": None}


class TwoArguments(Exception):  # noqa: N818
    message = "of the class"

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def local_class():
    class Inner(Exception):  # noqa: N818
        pass

    raise Inner("what happened")


def group():
    raise ExceptionGroup("what happened", [ValueError("the first of it")])


def two_arguments():
    raise TwoArguments("what", "happened")


def unsendable():
    return {"x": torch.ones(2), "other": threading.Lock()}


FAULTS = [
    (local_class, ("Inner: what happened", "sample 7 of Broken")),
    (group, ("what happened", "the first of it", "sample 7 of Broken")),
    (two_arguments, ("what and happened", "sample 7 of Broken")),
    (unsendable, (r"batch['other'][3]", "samples 4, 5, 6, 7 of Broken", "is a lock, which no worker can send")),
]


def as_lists(samples):
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def failure(loader):
    """The text of the error of a loader. Its workers have ended then: torch raises that one was killed anywhere."""
    try:
        list(loader)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if isinstance(loader, BatchLoader):
        loader.close()
    gc.collect()
    return text


@pytest.mark.parametrize(("make", "facts"), FAULTS, ids=lambda fault: getattr(fault, "__name__", ""))
def test_what_a_worker_cannot_send_is_an_error_that_names_the_sample(make, facts, handler_of_torch):
    data = Broken(make)
    ours = make_loader(
        data, SingleRoundSampler(data, 4), seed=0, num_workers=1, collate_fn=as_lists, loader_options={"timeout": 60}
    )
    text = failure(ours)
    for fact in facts:
        assert fact in text
    assert "timed out" not in text


class BrokenStream(IterableDataset):
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        yield torch.ones(2)
        yield self.make()


@pytest.mark.parametrize("make", [local_class, group, threading.Lock])
def test_what_a_worker_of_a_stream_cannot_send_is_an_error(make, handler_of_torch):
    ours = StreamLoader(BrokenStream(make), 2, num_workers=1, collate_fn=list, timeout=60)
    text = failure(ours)
    assert "happened" in text or "no worker can send" in text
    assert "timed out" not in text


def of_torch(data, **options):
    return DataLoader(data, 4, num_workers=1, collate_fn=as_lists, timeout=60, **options)


@pytest.mark.parametrize(
    ("make", "facts", "options", "place"),
    [
        (local_class, "Inner: what happened", {}, "batch 2 (the samples 4 to 7) of Broken, read by worker 0"),
        (unsendable, "['other'][3]", {"persistent_workers": True, "worker_init_fn": print}, "batch 2 (the samples 4"),
        (unsendable, "['other'][3]", {"sampler": [0, 1, 2, 3, 4, 5, 6, 7]}, "batch 2 of Broken"),
        (local_class, "Inner: what happened", {"multiprocessing_context": "spawn"}, "batch 2 (the samples 4 to 7)"),
    ],
)
def test_what_a_worker_of_torchs_loader_cannot_send_is_an_error_that_names_the_batch(make, facts, options, place):
    loader = of_torch(Broken(make), **options)
    for read in (Batches, opened):
        with pytest.raises(DataError) as raised:
            list(islice(read(loader), 4))
        assert facts in str(raised.value)
        assert place in str(raised.value)
    assert loader.worker_init_fn is options.get("worker_init_fn")


class Generator(DataLoader):
    """Starts its workers with the first batch, as loaders of accelerate do."""

    def __iter__(self):
        yield from super().__iter__()


class OfAccelerate(DataLoader):
    def __init__(self, base):
        super().__init__(base.dataset)
        self.base_dataloader = base

    def __iter__(self):
        yield from self.base_dataloader


@pytest.mark.parametrize(("kind", "wrap"), [(Generator, OfAccelerate), (DataLoader, lambda base: Repeated(base, 9))])
def test_the_workers_of_a_loader_that_another_one_iterates_report_what_they_cannot_send(kind, wrap):
    base = kind(Broken(unsendable), 4, num_workers=1, collate_fn=as_lists, timeout=60)
    with pytest.raises(DataError, match="no worker can send"):
        list(islice(Batches(wrap(base)), 4))


@pytest.mark.parametrize("make", [local_class, threading.Lock])
def test_what_a_worker_of_an_evaluated_stream_cannot_send_is_an_error(make):
    loader = eval_stream_loader(BrokenStream(make), 2, 1, list)
    loader.timeout = 60
    with pytest.raises(DataError, match=r"batch 1 \(the samples 0 to 1\) of BrokenStream, read by worker 0"):
        list(batches_of_rank(loader))


@pytest.mark.usefixtures("forked_workers")
def test_a_loader_of_the_users_own_is_read_as_before():
    loader = of_torch(Broken(lambda: {"x": torch.ones(2), "other": 1}))
    assert [batch["other"] for batch in opened(loader)] == [batch["other"] for batch in loader]
    assert [batch["other"][3] for batch in opened(loader)] == [None, 1, None, None]


class Ending(IterableDataset):
    """Its last sample cannot be sent."""

    def __iter__(self):
        yield torch.ones(2)
        yield threading.Lock()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_stream_does_not_end_before_what_could_not_be_sent(num_workers):
    for read in (lambda loader: list(opened(loader)), lambda loader: list(Batches(loader))):
        loader = DataLoader(Ending(), 1, num_workers=num_workers, collate_fn=list, timeout=60)
        with pytest.raises(DataError, match=r"batch\[0\] of batch \d.* of Ending, .* is a lock"):
            read(loader)

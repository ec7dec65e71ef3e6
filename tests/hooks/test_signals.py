"""Real signals, sent by the process to itself in the middle of a step."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.data.batch_loader import BatchLoader, loader_settings
from trainwright.engine.loop import TrainerBase
from trainwright.hooks import CallbackHook, HookBase, Interruptions, signals


class Saver:
    """Notes what it is asked for; its save in the background has failed with ``failure``."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.waited = 0

    def has_failed(self) -> bool:
        return self.failure is not None

    def wait(self) -> None:
        self.waited += 1
        if self.failure is not None:
            raise self.failure


class Trainer(TrainerBase):
    """``signals``: which come in the middle of which iteration; ``hooks`` are called first."""

    def __init__(
        self, signals: dict[int, list[signal.Signals]] | None = None, *hooks: HookBase, saver: Saver | None = None
    ) -> None:
        super().__init__()
        self.signals = signals or {}
        self.saver = saver or Saver()
        self.done: list[int] = []
        self.saved: list[int] = []
        save = lambda: self.saved.append(self.iterations_done - 1)  # noqa: E731
        self.register_hooks([*hooks, Interruptions(self.saver, save)])

    def run_step(self) -> None:
        for number in self.signals.get(self.iter, []):
            os.kill(os.getpid(), number)
        self.done.append(self.iter)


@pytest.fixture(autouse=True)
def handlers() -> Any:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before, "a training leaves handlers as they were"


def test_sigterm_finishes_the_iteration_saves_and_ends_with_143(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer({3: [signal.SIGTERM]})
    with caplog.at_level(logging.INFO, "trainwright"), pytest.raises(SystemExit) as stopped:
        trainer.train(0, 8)
    assert stopped.value.code == 143
    assert (trainer.done, trainer.saved) == ([0, 1, 2, 3], [3])
    assert trainer.saver.waited == 2  # the save is on disk before the process ends
    (line,) = [record.message for record in caplog.records if "SIG" in record.message]
    assert all(fact in line for fact in ("SIGTERM", "iteration 4"))


def test_sigint_ends_as_ctrl_c_does() -> None:
    trainer = Trainer({3: [signal.SIGINT]})
    with pytest.raises(KeyboardInterrupt, match=r"saved after iteration 4; .* resume continues"):
        trainer.train(0, 8)
    assert (trainer.done, trainer.saved) == ([0, 1, 2, 3], [3])


@pytest.mark.parametrize(("is_kernel", "handler"), [(False, signal.SIG_DFL), (True, signal.default_int_handler)])
def test_the_second_sigint_ends_the_process_or_the_cell_of_a_notebook_at_once(
    is_kernel: bool, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "runs_cells", lambda: is_kernel)
    handlers = []
    look = CallbackHook(after_step=lambda t: handlers.append(signal.getsignal(signal.SIGINT)))
    with nullcontext() if is_kernel else pytest.raises(KeyboardInterrupt):
        Trainer({3: [signal.SIGINT]}, look).train(0, 8)
    assert handlers[-1] is handler
    assert signal.SIG_DFL not in handlers[:-1]


def test_in_a_notebook_train_returns_after_the_save(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(signals, "runs_cells", lambda: True)
    trainer = Trainer({3: [signal.SIGINT]})
    with caplog.at_level(logging.INFO, "trainwright"):
        trainer.train(0, 8)
    assert (trainer.done, trainer.saved, trainer.stop_reason) == ([0, 1, 2, 3], [3], "SIGINT")
    assert any("so that the next cell runs" in record.message for record in caplog.records)
    with pytest.raises(SystemExit):  # not after SIGTERM
        Trainer({3: [signal.SIGTERM]}).train(0, 8)


PROGRAM = """
import atexit, os, signal, sys
import torch
from torch import nn
from trainwright import Trainer, TrainingConfig
from trainwright.hooks import CallbackHook

atexit.register(lambda: compile("1", "text", "eval"))  # as torch's own, after which Python forgets the signal
atexit.register(print, "atexit")
config = TrainingConfig(output_dir="output", num_epochs=4, batch_size=8, device_str="cpu")
data = torch.utils.data.TensorDataset(torch.ones(32, 2), torch.ones(32, dtype=torch.long))
trainer = Trainer(nn.Linear(2, 2), config, data)
trainer.register_hooks([CallbackHook(after_step=lambda _: os.kill(os.getpid(), signal.SIGINT))])
try:
    trainer.train()
except KeyboardInterrupt:
    print("saved", os.path.isdir("output/checkpoints"))
    if sys.argv[1:] != ["caught"]:
        raise
"""


@pytest.mark.parametrize(("arguments", "code"), [([], -signal.SIGINT), (["caught"], 0)])
def test_an_uncaught_ctrl_c_ends_a_program_by_the_signal_and_without_a_traceback(
    arguments: list[str], code: int, run_python: Any, tmp_path: Path
) -> None:
    done = run_python("-c", PROGRAM, *arguments, cwd=tmp_path, code=code, fresh=not arguments)
    assert done.stdout.endswith("saved True\natexit\n")
    assert "Traceback" not in done.stderr


def test_sigusr1_saves_and_goes_on_every_time() -> None:
    trainer = Trainer({2: [signal.SIGUSR1], 5: [signal.SIGUSR1, signal.SIGUSR1]})
    trainer.train(0, 8)
    assert (trainer.done, trainer.saved) == (list(range(8)), [2, 5])


def test_sigterm_wins_over_the_others() -> None:
    trainer = Trainer({3: [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM]})
    with pytest.raises(SystemExit):
        trainer.train(0, 8)
    assert trainer.saved == [3]


def test_nothing_is_saved_where_nothing_was_trained() -> None:
    trainer = Trainer()
    trainer.register_hooks([CallbackHook(before_train=lambda t: os.kill(os.getpid(), signal.SIGTERM))])
    with pytest.raises(SystemExit):
        trainer.train(5, 8)
    assert (trainer.done, trainer.saved) == ([], [])


def test_a_signal_in_the_last_iteration_lets_the_run_end_as_a_whole_one() -> None:
    trainer = Trainer({7: [signal.SIGTERM]})
    trainer.train(0, 8)
    assert trainer.iter == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_final_save_and_evaluation_are_finished(number: signal.Signals) -> None:
    finished = []

    class Evaluation(HookBase):
        def after_train(self) -> None:
            os.kill(os.getpid(), number)
            finished.append(self.trainer.iter)

    Trainer(None, Evaluation()).train(0, 3)
    assert finished == [3]


def test_a_save_that_failed_in_the_background_is_made_once_more(caplog: pytest.LogCaptureFixture) -> None:
    class Recovering(Saver):
        def wait(self) -> None:
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure

    trainer = Trainer(saver=Recovering())

    def fail(t: Any) -> None:
        if t.iter == 4:
            trainer.saver.failure = OSError(5, "Input/output error")

    trainer.register_hooks([CallbackHook(after_step=fail)])
    trainer.train(0, 8)
    assert (trainer.done, trainer.saved) == (list(range(8)), [4])
    assert "Input/output error. Retrying" in caplog.text


def test_a_save_that_fails_twice_ends_the_training_at_the_next_step() -> None:
    trainer = Trainer()

    def fail(t: Any) -> None:
        if t.iter == 4:
            trainer.saver.failure = OSError(28, "No space left on device")

    trainer.register_hooks([CallbackHook(after_step=fail)])
    with pytest.raises(OSError, match="No space left"):
        trainer.train(0, 8)
    assert trainer.done == [0, 1, 2, 3, 4]


def test_what_the_program_was_started_to_ignore_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = Trainer({3: [signal.SIGINT]})
        trainer.train(0, 8)
        assert trainer.saved == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_training_in_another_thread_leaves_signals_alone() -> None:
    trainer = Trainer()
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    trainer.register_hooks([CallbackHook(after_step=lambda t: seen.append(signal.getsignal(signal.SIGTERM)))])
    thread = threading.Thread(target=trainer.train, args=(0, 3))
    thread.start()
    thread.join()
    assert trainer.done == [0, 1, 2]
    assert set(seen) == {before}


def forked(run: Callable[[], object]) -> int:
    """A forked process of a user's code, which runs ``run`` and exits with 3."""
    if pid := os.fork():
        return pid
    try:
        run()
    except KeyboardInterrupt:
        os._exit(4)
    os._exit(3)


def how_it_ended(pid: int, seconds: float = 5) -> int:
    """Its exit code, or the negative number of the signal that ended it: SIGKILL if it did not end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_signals_end_a_process_that_a_callback_forks() -> None:
    ended: dict[str, list[int]] = {"SIGTERM": [], "SIGUSR1": [], "SIGINT": []}

    def fork_and_signal(t: Any) -> None:
        for name, codes in ended.items():
            for _ in range(10):
                runs, begins = os.pipe()
                pid = forked(lambda begins=begins: (os.write(begins, b"1"), time.sleep(60)))  # type: ignore[misc]
                if name == "SIGINT":  # Python forgets one that comes before the process runs; not the others
                    os.read(runs, 1)
                os.close(runs)
                os.close(begins)
                os.kill(pid, signal.Signals[name])
                codes.append(how_it_ended(pid))

    trainer = Trainer()
    trainer.register_hooks([CallbackHook(after_step=lambda t: fork_and_signal(t) if t.iter == 1 else None)])
    trainer.train(0, 3)
    assert trainer.saved == [], "the training itself has received nothing"
    assert {name: set(codes) for name, codes in ended.items()} == {
        "SIGTERM": {-signal.SIGTERM},
        "SIGUSR1": {-signal.SIGUSR1},
        "SIGINT": {4},  # Python's own handler raises KeyboardInterrupt
    }


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_in_a_training_within_a_training_handles_signals_as_before_both() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    codes = []

    def compare() -> None:
        assert signal.getsignal(signal.SIGTERM) == before[0]
        signal.raise_signal(signal.SIGINT)  # to Python's own handler

    inner = Trainer()
    inner.register_hooks([CallbackHook(after_step=lambda t: codes.append(how_it_ended(forked(compare))))])
    outer = Trainer()
    outer.register_hooks([CallbackHook(after_step=lambda t: inner.train(0, 1))])
    outer.train(0, 1)
    assert codes == [4]


class ForkingData(torch.utils.data.Dataset[Any]):
    """Sample 0: how a process ended that the worker forked and terminated. Sample 1: the worker after signals."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index == 0:
            pid = forked(lambda: time.sleep(60))
            os.kill(pid, signal.SIGTERM)
            return how_it_ended(pid)
        for number in (signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        return 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.usefixtures("forked_workers")
def test_workers_of_a_loader_ignore_what_a_terminal_sends_to_all_and_their_children_do_not(is_own: bool) -> None:
    read: list[int] = []
    kind = BatchLoader if is_own else torch.utils.data.DataLoader
    loader: Any = kind(
        ForkingData(), batch_sampler=[[0], [1]], num_workers=1, **(loader_settings(0, 1, 0, {}) if is_own else {})
    )
    trainer = Trainer()
    trainer.register_hooks([CallbackHook(after_step=lambda t: read.extend(int(batch) for batch in loader))])
    trainer.train(0, 1)
    assert read == [-signal.SIGTERM if is_own else 0, 1]  # 0: torch's handler in a worker exits

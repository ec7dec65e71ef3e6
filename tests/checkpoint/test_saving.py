"""Asynchronous saves: they hold the state at the time of the call, and their errors are raised."""

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import Training
from tests.fork_server import python
from trainwright.base import files
from trainwright.checkpoint import Checkpointer, CheckpointTypeError, keep_newest, saving, verify


def loaded(path):
    training = Training(seed=1)
    training.checkpointer(path.parent).load(path)
    return training.state()


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


class SlowDisk:
    """Blocks every commit of a checkpoint until it is released."""

    def __init__(self, monkeypatch):
        self.may_go_on = threading.Event()
        self.commit = saving.commit_folder
        monkeypatch.setattr(saving, "commit_folder", self._wait_and_commit)

    def _wait_and_commit(self, *arguments):
        assert self.may_go_on.wait(30)
        self.commit(*arguments)


@pytest.fixture
def slow_disk(monkeypatch):
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.may_go_on.set()


class WrappedAdam(torch.optim.Adam):
    """A step around torch's."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    state["exp_avg"].mul_(0.5)
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9), WrappedAdam])
def test_a_save_holds_what_was_when_it_was_called(tmp_path, slow_disk, optimizer):
    training = Training(optimizer)
    training.step()
    checkpointer = training.checkpointer(tmp_path)
    for iteration in range(3):
        before = training.state()
        slow_disk.may_go_on.clear()
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
        for _ in range(3):
            training.step()  # while the save is being written
        assert not (tmp_path / f"model_{iteration:07d}").exists()
        slow_disk.may_go_on.set()
        checkpointer.wait()
        saved = tmp_path / f"model_{iteration:07d}"
        other = Training(optimizer, seed=1)
        other.checkpointer(tmp_path).load(saved)
        assert equal(other.state(), before)
        assert not equal(training.state(), before)


def test_a_state_that_cannot_be_saved_is_found_before_hours_have_passed(tmp_path):
    class Odd:
        def state_dict(self):
            return {"seen": object()}

        def load_state_dict(self, state): ...

    with pytest.raises(CheckpointTypeError, match=r"odd.seen"):
        Checkpointer(nn.Linear(1, 1), tmp_path, odd=Odd()).prepare()
    for model in (None, {}, torch.nn.Linear):
        with pytest.raises(CheckpointTypeError, match=r"Checkpointer.model: got .*; it must be a torch.nn.Module"):
            Checkpointer(model, tmp_path)


def test_what_is_called_after_a_commit_may_ask_the_checkpointer(tmp_path):
    checkpointer = Training().checkpointer(tmp_path)
    seen = []

    def ask():
        checkpointer.wait()
        seen.append(checkpointer.get_checkpoint_file())

    checkpointer.save("model_0000009", iteration=9, on_commit=ask)
    checkpointer.wait()
    assert seen == [str(tmp_path / "model_0000009")]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_call_after_saves_comes_when_all_of_them_are_on_the_disk(tmp_path, asynchronous):
    checkpointer = Checkpointer(torch.nn.Linear(2, 2), tmp_path, asynchronous=asynchronous)
    seen = []
    for name in ("model_0000009", "model_best"):
        checkpointer.save(name, iteration=9)
    checkpointer.after_saves(lambda: seen.append(verify(tmp_path / "model_best").iteration))
    checkpointer.save("model_0000010", iteration=10)
    checkpointer.wait()
    assert seen == [9]


def test_a_forked_process_saves_on_its_own(tmp_path, slow_disk):
    training = Training()
    checkpointer = training.checkpointer(tmp_path)
    checkpointer.save("model_0000009", iteration=9)
    child = os.fork()
    if child == 0:  # without its parent's thread, in the middle of its parent's save
        code = 1
        try:
            torch.set_num_threads(1)  # OpenMP's threads are not here either: torch would wait for them forever
            saving.commit_folder = slow_disk.commit  # the event's lock may be held by a thread that is not here
            checkpointer.save("model_0000019", iteration=19)
            checkpointer.wait()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    slow_disk.may_go_on.set()
    checkpointer.wait()
    assert os.waitpid(child, 0)[1] == 0
    assert verify(tmp_path / "model_0000009").iteration == 9
    assert verify(tmp_path / "model_0000019").iteration == 19


def test_what_a_process_leaves_that_ends_later_goes_with_the_next_save(tmp_path):
    writer = Checkpointer(nn.Linear(2, 2), tmp_path, asynchronous=False)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        left = tmp_path / f".tmp-model-{other.pid}-{files._host()}-{files._start_time(other.pid)}-0"
        left.write_text("x")
        writer.save("model_1")
        assert left.exists()
        other.kill()
    writer.save("model_2")
    assert not left.exists()


def test_a_second_name_of_the_same_iteration_does_not_wait(tmp_path, slow_disk):
    training = Training()
    training.step()
    before = training.state()
    checkpointer = training.checkpointer(tmp_path)
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.save("model_best", iteration=9, accuracy=0.5)  # would wait forever for the first
    training.step()
    slow_disk.may_go_on.set()
    checkpointer.wait()
    assert equal(loaded(tmp_path / "model_0000009"), before)
    assert equal(loaded(tmp_path / "model_best"), before)
    one, other = (tmp_path / name / "model.safetensors" for name in ("model_0000009", "model_best"))
    assert one.samefile(other)


def test_what_has_changed_since_is_another_save(tmp_path, slow_disk):
    """Also where the change leaves no trace in torch's version counters."""
    training = Training()
    training.step()
    checkpointer = training.checkpointer(tmp_path)
    first = training.state()
    checkpointer.save("model_0000009", iteration=9)
    training.model[0].weight.data[0, 0] += 1
    second = training.state()
    threading.Timer(0.2, slow_disk.may_go_on.set).start()
    checkpointer.save("again", iteration=9)
    checkpointer.wait()
    assert equal(loaded(tmp_path / "model_0000009"), first)
    assert equal(loaded(tmp_path / "again"), second)


@pytest.mark.parametrize("ask", ["save", "wait", "load", "tag_last_checkpoint", "resume_or_load"])
def test_a_failed_save_is_raised_once_and_by_whatever_comes_next(tmp_path, monkeypatch, ask):
    training = Training()
    checkpointer = training.checkpointer(tmp_path)
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.wait()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "commit_folder", fail)
    monkeypatch.setattr(saving, "_PAUSE_S", 0)
    called = []
    checkpointer.save("model_0000019", iteration=19, on_commit=lambda: called.append(True))
    checkpointer.after_saves(lambda: called.append(True))
    questions = {
        "save": lambda: checkpointer.save("model_0000029", iteration=29),
        "load": lambda: checkpointer.load(tmp_path / "model_0000009"),
        "tag_last_checkpoint": lambda: checkpointer.tag_last_checkpoint("model_0000009"),
        "resume_or_load": lambda: checkpointer.resume_or_load(""),
        "wait": checkpointer.wait,
    }
    with pytest.raises(OSError, match=r"No space left on device.*model_0000019") as raised:
        questions[ask]()
    assert "earlier checkpoints are unchanged" in "".join(raised.value.__notes__)
    assert not called
    assert not checkpointer.has_failed()
    monkeypatch.undo()
    checkpointer.save("model_0000039", iteration=39)
    checkpointer.wait()
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", "model_0000009", "model_0000039"]
    verify(tmp_path / "model_0000039")


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("fails", ["commit", "on_commit"])
def test_a_save_that_fails_once_is_made_again(tmp_path, monkeypatch, caplog, asynchronous, fails):
    errors = [OSError(28, "No space left on device")]
    commit = saving.commit_folder

    def fail_once(*arguments):
        if errors:
            raise errors.pop()
        return commit(*arguments) if arguments else None

    if fails == "commit":
        monkeypatch.setattr(saving, "commit_folder", fail_once)
    monkeypatch.setattr(saving, "_PAUSE_S", 0)
    training = Training()
    checkpointer = training.checkpointer(tmp_path, asynchronous=asynchronous)
    checkpointer.save("model_final", iteration=9, on_commit=fail_once if fails == "on_commit" else None)
    checkpointer.wait()
    assert equal(loaded(tmp_path / "model_final"), training.state())
    assert "No space left on device" in caplog.text
    assert not errors


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_without_symbolic_links_a_name_is_a_folder_of_its_own(tmp_path, monkeypatch, has_hard_links):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "symlink", refuse)
    if not has_hard_links:
        monkeypatch.setattr(os, "link", refuse)
    training = Training()
    checkpointer = training.checkpointer(tmp_path)
    states = {}
    for iteration in (9, 19):
        training.step()
        states[iteration] = training.state()
        for name in (f"model_{iteration:07d}", "model_best", "model_final"):
            checkpointer.save(name, iteration=iteration)
    checkpointer.wait()
    files.point_at(tmp_path / "epoch_1", tmp_path / "model_0000009")
    files.point_at(tmp_path / "epoch_1", tmp_path / "model_0000019")
    names = {"model_0000009": 9, **dict.fromkeys(("model_0000019", "model_best", "model_final", "epoch_1"), 19)}
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "last_checkpoint"])
    for name, iteration in names.items():
        assert equal(loaded(tmp_path / name), states[iteration])
    assert keep_newest(tmp_path, "model", 1, links=[tmp_path / "epoch_1"]) == ["model_0000009"]
    assert (tmp_path / "epoch_1").exists()


def test_older_ones_are_deleted_when_the_new_one_is_there(tmp_path, slow_disk):
    training = Training()
    checkpointer = training.checkpointer(tmp_path)
    slow_disk.may_go_on.set()
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.wait()
    slow_disk.may_go_on.clear()
    checkpointer.save("model_0000019", iteration=19, on_commit=partial(keep_newest, tmp_path, "model", 1))
    assert (tmp_path / "model_0000009").exists()
    slow_disk.may_go_on.set()
    checkpointer.wait()
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", "model_0000019"]


def ends(tmp_path, script):
    """What a program writes to stderr that saves model_0000009 as ``save()``."""
    common = """
import sys, threading, time, torch
from trainwright.checkpoint import Checkpointer, saving
commit = saving.commit_folder
def save():
    Checkpointer(torch.nn.Linear(2, 2), sys.argv[1]).save("model_0000009", iteration=9)
"""
    program = [python(), "-c", common + script, str(tmp_path)]
    return subprocess.run(program, capture_output=True, text=True, timeout=60).stderr


LATE = """
def late(*arguments):
    time.sleep(0.5)
    commit(*arguments)
saving.commit_folder = late
save()
"""
THREAD = """
def train():
    time.sleep(0.3)
    save()
threading.Thread(target=train).start()
"""
FAILS = """
def fail(*_):
    raise OSError(28, "No space left on device")
saving.commit_folder = fail
save()
"""


@pytest.mark.parametrize("script", [LATE, THREAD], ids=["a slow disk", "a thread that outlives the program"])
def test_python_does_not_end_before_a_save_is_done(tmp_path, script):
    assert ends(tmp_path, script) == ""
    assert verify(tmp_path / "model_0000009").iteration == 9


def test_a_save_that_fails_when_nobody_asks_any_more_is_said_at_the_end(tmp_path):
    said = ends(tmp_path, FAILS)
    assert "No space left on device" in said
    assert "model_0000009" in said
    assert "Traceback" not in said


def test_links_lead_to_their_neighbours_also_where_the_folder_is_reached_over_a_link(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "a" / "b" / "out"
    folder.symlink_to(tmp_path / "elsewhere")
    checkpointer = Training().checkpointer(folder)
    checkpointer.save("model_0000029", iteration=29)
    checkpointer.save("model_final", iteration=29)
    checkpointer.wait()
    assert os.readlink(folder / "model_final") == "model_0000029"
    assert verify(folder / "model_final").iteration == 29


def test_what_fails_after_a_commit_says_that_it_is_saved(tmp_path):
    checkpointer = Training().checkpointer(tmp_path)
    checkpointer.save("model_0000009", iteration=9, on_commit=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        checkpointer.wait()
    assert "model_0000009 is saved; on_commit, which is called after that, failed" in "".join(raised.value.__notes__)
    verify(tmp_path / "model_0000009")


@pytest.mark.slow
def test_a_checkpointer_that_is_gone_leaves_no_thread_and_loses_no_save(tmp_path):
    before = set(threading.enumerate())  # not their number: one of an earlier test may end meanwhile
    for number in range(8):
        training = Training()
        training.step()
        checkpointer = training.checkpointer(tmp_path / str(number))
        writer = weakref.ref(checkpointer._writer.background)
        checkpointer.save("a", iteration=0)
        del checkpointer, training  # with the save in flight
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()
    gc.collect()
    assert writer() is None
    for number in range(8):
        verify(tmp_path / str(number) / "a")


def test_a_closed_checkpointer_has_no_copy_and_can_save_again(tmp_path):
    training = Training()
    threads = threading.active_count()
    checkpointer = training.checkpointer(tmp_path)
    checkpointer.save("a", iteration=0)
    checkpointer.close()
    assert threading.active_count() == threads
    verify(tmp_path / "a")
    copies = [weakref.ref(block.memory) for block in checkpointer._writer._staging._blocks.values()]
    assert copies == []
    training.step()
    checkpointer.save("b", iteration=1)
    checkpointer.wait()
    assert equal(loaded(tmp_path / "b"), training.state())


@pytest.mark.slow
def test_the_failure_of_a_checkpointer_that_is_gone_is_logged(tmp_path, caplog):
    checkpointer = Training().checkpointer(tmp_path)

    def fail():
        raise RuntimeError("no room elsewhere")

    checkpointer.save("a", on_commit=fail)
    checkpointer.close()
    del checkpointer
    gc.collect()
    assert "no room elsewhere" in caplog.text


# Tensors are copied to memory of their own before a save returns, which the next save uses again.


def test_memory_is_taken_once(tmp_path):
    training = Training()
    training.step()
    checkpointer = training.checkpointer(tmp_path)
    before = set(threading.enumerate())
    for iteration in range(20):
        checkpointer.prepare()
        training.step()
        checkpointer.save("model_0000009", iteration=iteration)
    checkpointer.wait()
    assert len(set(threading.enumerate()) - before) == 1


def test_shapes_types_and_strides_of_all_kinds_are_staged_as_they_are(tmp_path):
    class Odd(nn.Module):
        def __init__(self, seed):
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            random = torch.randn(4, 6, 8, 8, generator=generator)
            self.register_buffer("channels_last", random.to(memory_format=torch.channels_last))
            self.register_buffer("transposed", random[0, 0].t())
            self.register_buffer("scalar", random[0, 0, 0, 0].clone())
            self.register_buffer("empty", torch.empty(0, 3))
            self.register_buffer("flags", random[0, 0] > 0)
            self.register_buffer("brain", random[1].to(torch.bfloat16))
            self.register_buffer("two_parts", torch.view_as_complex(random[..., :2].contiguous()).conj())
            self.register_buffer("wide", random[2].double())
            self.register_buffer("small", random[3].to(torch.float8_e4m3fn))

    saved, other = Odd(0), Odd(1)
    checkpointer = Checkpointer(saved, tmp_path)
    checkpointer.save("one", iteration=1)
    Checkpointer(other, tmp_path).load(tmp_path / "one")
    for name, value in saved.state_dict().items():
        assert torch.equal(other.state_dict()[name].to(torch.complex128), value.to(torch.complex128)), name

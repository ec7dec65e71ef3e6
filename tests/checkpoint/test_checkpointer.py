import os
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import put as put_file
from tests.fork_server import python
from trainwright import checkpoint
from trainwright.base.errors import MissingFileError
from trainwright.checkpoint import CheckpointError, CheckpointTypeError, keep_newest, verify
from trainwright.checkpoint import folder as folder_of_checkpoints
from trainwright.cli.main import main

# A save is on disk when it returns.
Checkpointer = partial(checkpoint.Checkpointer, asynchronous=False)


class Memory:
    """Something with a state."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def train(model, optimizer, lr_scheduler, steps):
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        lr_scheduler.step()


def names(folder):
    return sorted(os.listdir(folder))


def visible(folder):
    return [name for name in names(folder) if not name.startswith(".")]


def test_the_folder_holds_what_the_page_says(tmp_path):
    model, optimizer, lr_scheduler = training()
    train(model, optimizer, lr_scheduler, range(1))
    Checkpointer(model, tmp_path, optimizer=optimizer, lr_scheduler=lr_scheduler).save("model_0000000", iteration=0)
    assert names(tmp_path) == ["last_checkpoint", "model_0000000"]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000000"
    states = ["extra.json", "lr_scheduler.json", "optimizer.json", "optimizer.safetensors"]
    assert names(tmp_path / "model_0000000") == sorted(["manifest.json", "model.safetensors", *states])


def test_extras_come_back_with_their_types_and_the_iteration_is_never_read_from_the_name(tmp_path):
    Checkpointer(nn.Linear(1, 1), tmp_path).save("model_0000007", iteration=3)
    Checkpointer(nn.Linear(1, 1), tmp_path).save("model_0000008")
    assert Checkpointer(nn.Linear(1, 1)).load(tmp_path / "model_0000007") == {"iteration": 3}
    assert Checkpointer(nn.Linear(1, 1)).load(tmp_path / "model_0000008") == {}
    extra = {"iteration": 4, "best": float("-inf"), "shape": (1, 2), "counts": {1: "a"}}
    Checkpointer(nn.Linear(1, 1), tmp_path).save("a", **extra)
    assert Checkpointer(nn.Linear(1, 1)).load(tmp_path / "a") == extra


@pytest.mark.parametrize("iteration", [-1, 1.0, "3", True])
def test_an_iteration_that_is_no_count_is_refused(tmp_path, iteration):
    with pytest.raises(CheckpointError, match="iteration: got"):
        Checkpointer(nn.Linear(1, 1), tmp_path).save("a", iteration=iteration)


def test_a_name_that_belongs_to_something_else_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("1")
    (tmp_path / "log.txt").write_text("1")
    for name in ("data", "log.txt"):
        with pytest.raises(CheckpointError, match=f"{name}: exists and is not a checkpoint"):
            Checkpointer(nn.Linear(1, 1), tmp_path).save(name)
    assert (tmp_path / "data" / "train.csv").read_text() == "1"
    assert names(tmp_path) == ["data", "log.txt"]


def test_saving_without_a_folder_is_an_error():
    checkpointer = Checkpointer(nn.Linear(1, 1))
    assert not checkpointer.has_checkpoint()
    assert checkpointer.get_checkpoint_file() == ""
    assert checkpointer.load("") == {}
    with pytest.raises(CheckpointError, match="save_dir is empty"):
        checkpointer.save("a")
    # An object without state is refused at once.
    with pytest.raises(CheckpointTypeError, match=r"Checkpointer\.data: .*'list'.*state_dict"):
        Checkpointer(nn.Linear(1, 1), data=[])
    with pytest.raises(CheckpointError, match="'extra' is taken"):
        Checkpointer(nn.Linear(1, 1), extra=Memory())
    assert Checkpointer(nn.Linear(1, 1), lr_scheduler=None).checkpointables == {}


def test_who_does_not_save_to_disk_collects_the_state_and_writes_nothing(tmp_path):
    calls = []
    memory = Memory()
    memory.state_dict = lambda: calls.append(1) or {}
    Checkpointer(nn.Linear(1, 1), tmp_path / "run", save_to_disk=False, memory=memory).save("a")
    assert calls == [1]
    assert names(tmp_path) == []


def test_state_of_another_type_is_refused_with_its_place_and_nothing_is_written(tmp_path):
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, hooks=Memory([1, object()]))
    with pytest.raises(CheckpointTypeError, match=r"hooks\.value\.1: got <class 'object'>"):
        checkpointer.save("a", iteration=1)
    with pytest.raises(CheckpointTypeError, match=r"extra\.note: got"):
        Checkpointer(nn.Linear(1, 1), tmp_path).save("a", note=object())
    assert names(tmp_path) == []


def test_a_state_that_the_checkpoint_lacks_is_an_error_and_not_a_fresh_start(tmp_path):
    Checkpointer(nn.Linear(1, 1), tmp_path, optimizer=Memory(1)).save("a")
    model = nn.Linear(1, 1)
    before = model.weight.clone()
    checkpointer = Checkpointer(model, tmp_path, optimizer=Memory(), scaler=Memory())
    for load in (lambda: checkpointer.load(tmp_path / "a"), lambda: checkpointer.resume_or_load("")):
        with pytest.raises(CheckpointError, match="has no state of scaler; it holds optimizer"):
            load()
    assert torch.equal(model.weight, before)


def test_a_state_that_nothing_takes_is_said(tmp_path, caplog):
    Checkpointer(nn.Linear(1, 1), tmp_path, optimizer=Memory(1), scaler=Memory(2)).save("a")
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, optimizer=Memory())
    checkpointer.load(tmp_path / "a")
    assert not caplog.records  # it may be added
    checkpointer.check_newest()
    checkpointer.save("b")
    assert len(caplog.records) == 1
    assert "holds state that no checkpointable of this run loads: scaler" in caplog.text


def test_a_checkpointable_that_is_added_after_a_resume_is_loaded_too(tmp_path, caplog):
    Checkpointer(nn.Linear(1, 1), tmp_path, optimizer=Memory(1), queue=Memory(2)).save("a")
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, optimizer=Memory())
    checkpointer.resume_or_load("")
    queue, fresh = Memory(), Memory(5)
    checkpointer.add_checkpointable("queue", queue)
    assert queue.value == 2
    checkpointer.check_newest()
    assert not caplog.records
    checkpointer.add_checkpointable("fresh", fresh)
    assert fresh.value == 5
    assert "has no state of fresh, which starts fresh" in caplog.text
    checkpointer.save("b")
    later = Memory(7)
    checkpointer.add_checkpointable("later", later)
    assert later.value == 7


def test_some_of_the_checkpointables_can_be_loaded(tmp_path, caplog):
    Checkpointer(nn.Linear(1, 1), tmp_path, a=Memory(1), b=Memory(2)).save("x")
    a, b = Memory(), Memory()
    checkpointer = Checkpointer(nn.Linear(1, 1), a=a, b=b)
    checkpointer.load(tmp_path / "x", checkpointables=["b"])
    assert (a.value, b.value) == (None, 2)
    assert not caplog.records
    with pytest.raises(CheckpointError, match=r"no checkpointable 'c'\. Allowed: a, b\."):
        checkpointer.load(tmp_path / "x", checkpointables=["c"])


def test_weights_only_touches_no_checkpointable(tmp_path):
    model = nn.Linear(1, 1)
    Checkpointer(model, tmp_path, memory=Memory(1)).save("a", iteration=5)
    other, memory = nn.Linear(1, 1), Memory(9)
    checkpointer = Checkpointer(other, tmp_path / "new", memory=memory, more=Memory())
    assert checkpointer.resume_or_load(tmp_path / "a", resume=True) == {}  # nothing to resume: a new run
    assert torch.equal(model.weight, other.weight)
    assert memory.value == 9


def test_an_error_of_a_checkpointable_says_which(tmp_path):
    Checkpointer(nn.Linear(1, 1), tmp_path, memory=Memory(1)).save("a")
    memory = Memory()
    memory.load_state_dict = lambda state: state["absent"]
    with pytest.raises(KeyError) as raised:
        Checkpointer(nn.Linear(1, 1), memory=memory).load(tmp_path / "a")
    assert "While loading 'memory'" in raised.value.__notes__[0]


def test_a_repeated_name_is_a_relative_link_and_leaves_no_old_folder(tmp_path):
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(model, tmp_path)
    for iteration in (3, 7):
        with torch.no_grad():
            model.weight.fill_(iteration)
        checkpointer.save("model_best", tag_last=False, iteration=iteration)
    assert names(tmp_path) == [".model_best-0000007", "model_best"]
    assert os.readlink(tmp_path / "model_best") == ".model_best-0000007"
    os.rename(tmp_path, tmp_path.with_name("moved"))
    assert checkpointer.load(tmp_path.with_name("moved") / "model_best") == {"iteration": 7}


def test_what_is_on_disk_already_is_not_written_again(tmp_path):
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path, memory=Memory(torch.ones(3)))
    checkpointer.save("model_0000009", iteration=9)
    manifest = (tmp_path / "model_0000009" / "manifest.json").stat()
    checkpointer.save("model_0000009", iteration=9)
    assert (tmp_path / "model_0000009" / "manifest.json").stat() == manifest
    checkpointer.save("model_final", iteration=9)
    assert os.readlink(tmp_path / "model_final") == "model_0000009"
    checkpointer.save("model_best", tag_last=False, iteration=9, accuracy=0.5)  # other extras: a folder of its own
    checkpointer.save("epoch_1", iteration=9)
    for name in ("model_best", "epoch_1"):
        assert verify(tmp_path / name).iteration == 9
        assert os.path.samefile(tmp_path / name / "model.safetensors", tmp_path / "model_0000009" / "model.safetensors")
    assert checkpointer.load(tmp_path / "model_best") == {"iteration": 9, "accuracy": 0.5}
    assert checkpointer.load(tmp_path / "model_0000009") == {"iteration": 9}


def test_a_step_that_is_run_again_is_replaced_whole_and_its_links_keep_the_old(tmp_path):
    model = nn.Linear(1, 1)
    first = Checkpointer(model, tmp_path)
    first.save("model_0000009", iteration=9)
    first.save("model_best", iteration=9)
    assert os.readlink(tmp_path / "model_best") == "model_0000009"
    old = model.weight.clone()
    with torch.no_grad():
        model.weight.fill_(3)
    again = Checkpointer(model, tmp_path)
    again.save("model_0000009", iteration=9)
    assert not (tmp_path / "model_0000009").is_symlink()
    assert visible(tmp_path) == ["last_checkpoint", "model_0000009", "model_best"]
    again.load(tmp_path / "model_best")
    assert torch.equal(model.weight, old)
    again.load(tmp_path / "model_0000009")
    assert model.weight.item() == 3
    again.save("model_best", iteration=19)
    assert names(tmp_path) == [".model_best-0000019", "last_checkpoint", "model_0000009", "model_best"]


def test_a_damaged_step_is_replaced_when_it_is_run_again(tmp_path):
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path)
    checkpointer.save("model_0000009", iteration=9)
    for name in ("manifest.json", "extra.json"):
        (tmp_path / "model_0000009" / name).unlink()
    Checkpointer(nn.Linear(1, 1), tmp_path).save("model_0000009", iteration=9)
    verify(tmp_path / "model_0000009")
    assert names(tmp_path) == ["last_checkpoint", "model_0000009"]


def test_the_last_checkpoint_can_be_chosen(tmp_path):
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path)
    for iteration in (9, 19):
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
    checkpointer.tag_last_checkpoint("model_0000009")
    assert checkpointer.resume_or_load("") == {"iteration": 9}
    with pytest.raises(MissingFileError, match="model_0000029"):
        checkpointer.tag_last_checkpoint("model_0000029")
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000009"


SAVES_AGAIN = """
import itertools, os, sys, torch
from trainwright.checkpoint import Checkpointer

model = torch.nn.Linear(64, 64)
class Memory:
    def state_dict(self): return {"value": value}
    def load_state_dict(self, state): pass
checkpointer = Checkpointer(model, sys.argv[1], asynchronous=False, memory=Memory())
for value in itertools.takewhile(lambda _: not os.path.exists(sys.argv[3]), itertools.count()):
    with torch.no_grad():
        model.weight.fill_(value)
        model.bias.fill_(value)
    checkpointer.save(sys.argv[2], tag_last=False, iteration=value)
"""


@pytest.mark.parametrize("name", ["model_best", "epoch"])  # a link, and a folder that is exchanged
@pytest.mark.exhaustive(every=2)
def test_a_reader_of_a_name_that_is_saved_again_reads_one_checkpoint(tmp_path, name):
    end = tmp_path / "end"
    writer = subprocess.Popen([python(), "-c", SAVES_AGAIN, tmp_path, name, end])
    try:
        memory, model = Memory(), nn.Linear(64, 64)
        checkpointer = Checkpointer(model, memory=memory)
        while not (tmp_path / name).exists():
            assert writer.poll() is None
            time.sleep(0.01)
        values = 0
        while values <= 2:
            assert writer.poll() is None
            before = memory.value
            extras = checkpointer.load(tmp_path / name)
            assert set(model.weight.flatten().tolist() + model.bias.tolist()) == {memory.value}
            assert extras["iteration"] == memory.value
            verify(tmp_path / name)
            values += memory.value != before
        end.touch()
        assert writer.wait(60) == 0
    finally:
        writer.kill()


NO_STATES = ["null", "{}", "[]", "5", "not JSON"]


@pytest.mark.parametrize(
    ("name", "content"),
    [  # a schedule's state may hold anything
        *(("optimizer", content) for content in (*NO_STATES, '{"state": {}}')),
        *(("lr_scheduler", content) for content in NO_STATES),
    ],
)
def test_a_state_that_is_none_is_damage_and_gives_way_to_the_one_before(tmp_path, caplog, name, content):
    model, optimizer, lr_scheduler = training()
    checkpointer = Checkpointer(model, tmp_path, optimizer=optimizer, lr_scheduler=lr_scheduler)
    for iteration in (9, 19):
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
    put_file(tmp_path / "model_0000019", f"{name}.json", content.encode(), signed=True)
    assert checkpointer.resume_or_load("") == {"iteration": 9}
    assert f"{name}.json" in caplog.text
    with pytest.raises(CheckpointError, match=rf"{name}.json: (is damaged|not a state)"):
        checkpointer.load(tmp_path / "model_0000019")


def put_pipe(path):
    os.mkfifo(path)


def put_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def put_loop(path):
    path.symlink_to(path.name)


KINDS = [put_pipe, put_socket, put_loop, os.mkdir]


@pytest.mark.parametrize("put", KINDS)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.json", "manifest.json", "extra.json"])
def test_what_is_no_file_is_never_waited_for(put, name):
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        run = Path(folder)
        model, optimizer, _ = training()
        checkpointer = Checkpointer(model, run, optimizer=optimizer)
        for iteration in (9, 19):
            checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
        (run / "model_0000019" / name).unlink()
        put(run / "model_0000019" / name)
        for command in (["list"], ["list", "--verify"], ["verify"]):
            assert main(["checkpoint", *command, str(run)]) == 1
        assert main(["checkpoint", "show", str(run / "model_0000019")]) in (1, 2)
        with pytest.raises((CheckpointError, OSError)):
            checkpointer.load(run / "model_0000019")
        assert checkpointer.resume_or_load("") == {"iteration": 9}
        checkpointer.save("model_0000029", iteration=29)
        assert checkpointer.resume_or_load("") == {"iteration": 29}


@pytest.mark.parametrize("put", KINDS)
def test_a_pointer_that_is_no_file_is_never_waited_for(put):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        checkpointer = Checkpointer(nn.Linear(1, 1), run)
        checkpointer.save("model_0000009", iteration=9)
        (run / "last_checkpoint").unlink()
        put(run / "last_checkpoint")
        assert main(["checkpoint", "list", str(run)]) == 1
        assert checkpointer.resume_or_load("") == {"iteration": 9}


@pytest.mark.parametrize("put", KINDS[:2])
@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_weights_that_are_no_file_are_never_waited_for(put, name):
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder, name))
        with pytest.raises(CheckpointError, match=r"a (pipe|socket)"):
            Checkpointer(nn.Linear(1, 1)).load(Path(folder, name), checkpointables=[])


def test_links_in_a_loop_and_folders_that_may_not_be_read_stop_nothing(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        run = Path(folder, "run")
        (run / "lost+found").mkdir(parents=True)
        (run / "loop").symlink_to("loop")
        (run / "one").symlink_to("two")
        (run / "two").symlink_to("one")
        model = nn.Linear(1, 1)
        for iteration in (9, 19, 29):
            Checkpointer(model, run).save(f"model_{iteration:07d}", iteration=iteration)
        keep_newest(run, "model", 3)
        for path in (run, *run.glob("model_*"), *run.glob("model_*/*")):
            path.chmod(0o777)
        (run / "model_0000029" / "loop").symlink_to("loop")
        (run / "lost+found").chmod(0)
        (run / "model_0000009").chmod(0)
        with without_rights():
            checkpointer = Checkpointer(model, run)
            assert checkpointer.resume_or_load("") == {"iteration": 29}
            checkpointer.save("model_0000039", iteration=39)
            keep_newest(run, "model", 2)
            assert main(["checkpoint", "list", str(run)]) in (0, 1)
        (run / "model_0000039").chmod(0)
        monkeypatch.setattr(folder_of_checkpoints, "_PAUSE_S", 0)
        with without_rights(), pytest.raises(PermissionError, match=r"model_0000039.*not known to be damaged"):
            checkpointer.resume_or_load("")
        for path in run.iterdir():
            if path.is_dir():
                path.chmod(0o777)


@contextmanager
def without_rights():
    """As a user, whom the rights of folders concern."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)

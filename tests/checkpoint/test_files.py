import os
import signal
import socket
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from tests.fork_server import python
from trainwright.base import files


def names(folder):
    return sorted(os.listdir(folder))


def temporary_name_of(pid, *, host=None, start=1):
    host = sha256((host or socket.gethostname()).encode()).hexdigest()[:8]
    return f".tmp-model_0000009-{pid}-{host}-{start}-0"


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_is_synced_file_by_file_before_it_gets_its_name(tmp_path, monkeypatch):
    temporary, final, calls = tmp_path / "t", tmp_path / "final", []
    (temporary / "sub").mkdir(parents=True)
    (temporary / "a").write_text("a")
    (temporary / "sub" / "b").write_text("b")
    real_fsync, real_rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), real_fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append("rename"), real_rename(a, b)))
    files.commit_folder(temporary, final)
    before, after = calls[: calls.index("rename")], calls[calls.index("rename") + 1 :]
    assert sorted(before) == sorted(str(temporary / part) for part in (".", "a", "sub", "sub/b"))
    assert after == [str(tmp_path)]
    assert (final / "sub" / "b").read_text() == "b"


def test_files_that_their_writers_have_synced_are_not_synced_again(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync_file", lambda path: synced.append(path.name))
    (tmp_path / "new" / "inner").mkdir(parents=True)
    for name in ("of-rank-1", "manifest", "inner/of-rank-2", "inner/of-rank-0"):
        (tmp_path / "new" / name).touch()
    files.commit_folder(tmp_path / "new", tmp_path / "final", ["of-rank-1", "inner/of-rank-2"])
    assert sorted(synced) == ["manifest", "of-rank-0"]


@pytest.mark.parametrize("content", [b"new", lambda file: file.write(b"new")], ids=["bytes", "writer"])
def test_a_file_is_complete_and_synced_before_it_gets_its_name(tmp_path, monkeypatch, content):
    final, calls = tmp_path / "final", []
    final.write_bytes(b"old")
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(("fsync", path, None if os.path.isdir(path) else Path(path).read_bytes()))
        real_fsync(descriptor)

    def replace(source, target):
        calls.append(("replace", str(source), str(target)))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    files.atomic_write(final, content)
    (_, temporary, synced), replaced, folder = calls
    assert synced == b"new"
    assert replaced == ("replace", temporary, str(final))
    assert folder == ("fsync", str(tmp_path), None)  # a rename is on the disk when its folder is
    assert final.read_bytes() == b"new"


def test_only_entries_of_dead_processes_of_this_machine_are_stale(tmp_path):
    dead = dead_pid()
    stale_folder = tmp_path / temporary_name_of(dead)
    stale_folder.mkdir()
    (stale_folder / "half").write_text("x")
    own_number_of_an_earlier_process = tmp_path / temporary_name_of(os.getpid())
    own_number_of_an_earlier_process.write_text("x")
    mine = files.temporary_sibling(tmp_path / "state")
    mine.write_text("being written")
    elsewhere = tmp_path / temporary_name_of(dead, host="another machine")
    elsewhere.write_text("x")
    user_file = tmp_path / ".tmp-mine"
    user_file.write_text("x")

    removed = files.remove_stale(tmp_path)

    assert set(removed) == {stale_folder, own_number_of_an_earlier_process}
    assert names(tmp_path) == sorted(path.name for path in (mine, elsewhere, user_file))


KILLED = """
import os, signal, socket, sys, time
socket.gethostname = lambda: "a container"
from trainwright.checkpoint import Checkpointer, saving
import torch

class Stops:
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

def measure(writer, file=None, measure=saving.measure):
    print(os.getpid(), flush=True)
    sys.stdin.read()

saving.measure = measure
Checkpointer(torch.nn.Linear(1, 1), sys.argv[1], asynchronous=False).save("model_0000009", iteration=9)
"""


FORKS = """
    worker = os.fork()
    if not worker:
        time.sleep(60)
        os._exit(0)
    print(os.getpid(), worker, flush=True)
"""


def test_what_a_killed_run_of_another_container_was_writing_goes_and_that_of_a_live_one_stays(tmp_path):
    command = [python(), "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        process = int(writer.stdout.readline())
        try:
            entries = sorted(tmp_path.glob(".tmp-*"))
            assert len(entries) == 2  # the folder, and a lock
            assert files.remove_stale(tmp_path) == []
        finally:
            os.kill(process, signal.SIGKILL)
    assert files.remove_stale(tmp_path) == entries
    assert names(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_worker_that_outlives_its_killed_trainer_does_not_hold_its_lock(tmp_path):
    program = KILLED.replace("    print(os.getpid(), flush=True)", FORKS)
    command = [python(), "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        process, worker = map(int, writer.stdout.readline().split())
        entries = sorted(tmp_path.glob(".tmp-*"))
        try:
            assert files.remove_stale(tmp_path) == []
            os.kill(process, signal.SIGKILL)
            writer.wait()
            os.kill(worker, 0)  # it is still there
            assert files.remove_stale(tmp_path) == entries
        finally:
            writer.kill()
            os.kill(worker, signal.SIGKILL)


def test_an_entry_of_another_machine_that_has_not_changed_for_a_day_goes(tmp_path):
    old, new = (tmp_path / temporary_name_of(number, host="another machine") for number in (1, 2))
    for path in (old, new):
        path.mkdir()
    os.utime(old, (1, 1))
    assert files.remove_stale(tmp_path) == [old]


def test_an_entry_that_cannot_be_deleted_keeps_no_other(tmp_path, monkeypatch):
    first, second = (tmp_path / temporary_name_of(dead_pid()) for _ in range(2))
    for path in (first, second):
        path.write_text("x")
    remove = type(first).unlink

    def unlink(path, **options):
        if path == min(first, second):
            raise PermissionError(13, "Permission denied", str(path))
        remove(path, **options)

    monkeypatch.setattr(type(first), "unlink", unlink)
    with pytest.raises(PermissionError):
        files.remove_stale(tmp_path)
    assert names(tmp_path) == [min(first, second).name]


def test_what_a_killed_writer_has_left_goes_before_the_next_long_write(tmp_path):
    left = tmp_path / temporary_name_of(dead_pid())
    (left / "half").mkdir(parents=True)
    assert not files.clean_sibling(tmp_path / "model").exists()
    assert [*tmp_path.iterdir()] == []


def test_a_folder_whose_deletion_cannot_be_synced_keeps_its_name_and_can_be_deleted_later(tmp_path, monkeypatch):
    path = tmp_path / "model_0000009"
    path.mkdir()
    (path / "weights").write_text("x")

    def refuse(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space left"):
            files.remove_folder(path)
    assert (path / "weights").read_text() == "x"
    assert names(tmp_path) == [path.name]  # no hidden entry, which only the next process would delete
    files.remove_folder(path)
    assert names(tmp_path) == []

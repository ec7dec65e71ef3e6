"""The n-th file operation fails, for n = 1, 2, 3 ... until a save passes without meeting it."""

import builtins
import errno
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainwright.base import files
from trainwright.checkpoint import Checkpointer, saving, verify

OPERATIONS = ("mkdir", "rename", "replace", "symlink", "link", "fsync")


CODES = {
    errno.ENOSPC: "No space left on device",
    errno.EIO: "Input/output error",
    errno.EACCES: "Permission denied",
    errno.EDQUOT: "Disk quota exceeded",
}


class DiskThatFails:
    """Counts file operations, and raises an error of the system at one of them."""

    def __init__(self, monkeypatch, code):
        self.code = code
        self.count, self.fail_at = 0, 0
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        monkeypatch.setattr(files, "open", self._open, raising=False)
        monkeypatch.setattr(saving, "open", self._open, raising=False)
        monkeypatch.setattr(files, "_exchange", self._counted(files._exchange))
        sleep = lambda _: self.arm(self.fail_at)  # noqa: E731 - the second try fails, too
        monkeypatch.setattr(saving, "time", SimpleNamespace(sleep=sleep))

    def arm(self, fail_at):
        self.count, self.fail_at = 0, fail_at

    def operate(self):
        self.count += 1
        if self.count == self.fail_at:
            raise OSError(self.code, CODES[self.code])

    def _counted(self, function):
        def call(*arguments, **options):
            self.operate()
            return function(*arguments, **options)

        return call

    def _open(self, path, mode):
        self.operate()
        file = builtins.open(path, mode)  # noqa: SIM115 - the caller closes it
        return FileThatFails(file, self.operate) if "x" in mode else file


class FileThatFails:
    def __init__(self, file, operate):
        self._file, self._operate = file, operate

    def write(self, data):
        self._file.write(bytes(data)[: len(data) // 2])  # a full disk takes a part
        self._operate()
        return self._file.write(bytes(data)[len(data) // 2 :])

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


SAVES = {
    "a new step": ["model_0000019"],
    "a step run again": ["model_0000009"],
    "a new link": ["model_best"],
    "a link again": ["model_final"],
    "a second name of the same iteration": ["model_0000019", "epoch_2"],
    "a link onto the same iteration": ["model_0000019", "model_final"],
}


@pytest.mark.exhaustive(every=16)
@pytest.mark.parametrize("saves", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize(("code", "can_exchange"), [(code, True) for code in CODES] + [(errno.ENOSPC, False)], ids=str)
@pytest.mark.slow
def test_a_disk_error_at_any_operation_leaves_what_was_there(
    tmp_path, monkeypatch, saves, code, can_exchange, asynchronous
):
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    disk = DiskThatFails(monkeypatch, code)
    *before, name = saves
    failures = 0
    for fail_at in range(1, 100):
        run = tmp_path / str(fail_at)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        checkpointer = Checkpointer(model, run, asynchronous=asynchronous, optimizer=optimizer)
        disk.arm(0)
        checkpointer.save("model_0000009", iteration=9)
        checkpointer.save("model_final", iteration=8)
        for earlier in before:
            checkpointer.save(earlier, iteration=19)
        checkpointer.tag_last_checkpoint("model_0000009")
        weight = model.weight.item()
        checkpointer.wait()
        disk.arm(fail_at)
        error = None
        try:
            checkpointer.save(name, iteration=19)
            with torch.no_grad():
                model.weight += 1  # training continues
            checkpointer.wait()
        except OSError as raised:
            error = raised
        met = disk.count >= fail_at
        disk.arm(0)
        if met and error is None:  # deleting the old one failed, which is no reason to fail: the next save deletes it
            checkpointer.save(name, iteration=19)
            checkpointer.wait()
        hidden = [entry for entry in os.listdir(run) if entry.startswith(".")]
        assert not [entry for entry in hidden if entry.startswith(".tmp-")], fail_at
        assert set(hidden) <= {path.resolve().name for path in run.iterdir() if path.is_symlink()}
        for entry in run.iterdir():
            if entry.is_dir():
                verify(entry)  # complete, with any content
        if error is not None:
            failures += 1
            assert error.errno == code
            assert str(run / name) in str(error)
            assert (run / "last_checkpoint").read_text() in ("model_0000009", name)
            resumed = nn.Linear(1, 1)
            other = Checkpointer(resumed, run, optimizer=torch.optim.SGD(resumed.parameters(), 0.1))
            assert other.resume_or_load("")["iteration"] in (9, 19)
            assert resumed.weight.item() == weight
            checkpointer.save(name, iteration=19)  # there is space again
            checkpointer.wait()
        assert checkpointer.load(run / name) == {"iteration": 19}
        if not met:
            break
    assert not met, "the save never passed"
    assert failures >= 3


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path / "file" / "run")
    checkpointer.save("model_0000009")
    with pytest.raises(NotADirectoryError, match=r"file/run/model_0000009"):
        checkpointer.wait()

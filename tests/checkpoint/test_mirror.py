"""The mirror of a folder of checkpoints: what is there is complete, and a failure never ends a training."""

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.base.errors import ConfigError
from trainwright.checkpoint import CheckpointError, keep_newest
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.mirror import Mirror
from trainwright.checkpoint.mirror_index import read_index
from trainwright.checkpoint.mirror_store import Store, StoreError, shown_url

KEEP_TWO = partial(keep_newest, prefix="model", max_to_keep=2)


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3"))
    return f"file://{tmp_path}/mirror" if request.param == "file" else f"memory://{tmp_path}/mirror"


def checkpointer(folder: Path, url: str, seed: int = 0) -> Checkpointer:
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Checkpointer(model, folder, optimizer=optimizer, mirror=url)


def step(of: Checkpointer) -> None:
    optimizer: Any = of.checkpointables["optimizer"]
    optimizer.zero_grad()
    of.model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def copied(of: Checkpointer) -> None:
    """Wait for the copies in flight."""
    assert of.mirror is not None
    of.wait()
    of.mirror._background.wait()


def save(of: Checkpointer, iteration: int, **settings: Any) -> None:
    step(of)
    of.save(f"model_{iteration:07d}", iteration=iteration, prune=KEEP_TWO, **settings)
    copied(of)


def names(url: str) -> list[str]:
    """The complete checkpoints in a mirror."""
    index, _ = read_index(Store(url))
    return [] if index is None else [one.name for one in index.checkpoints]


def tensors(of: Checkpointer) -> list[torch.Tensor]:
    return [value.clone() for value in of.model.state_dict().values()]


def is_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def no_copy(self: Store, source: str, target: str) -> None:
    raise StoreError("not supported")


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str, tuple[Any, ...]], bool]) -> None:
    real = Store._do

    def do(self: Store, operation: str, *arguments: Any, **options: Any) -> Any:
        if fails(operation, arguments):
            raise StoreError("ClientError: AccessDenied")
        return real(self, operation, *arguments, **options)

    monkeypatch.setattr(Store, "_do", do)


def test_the_newest_and_the_best_are_in_the_mirror_and_come_back(tmp_path: Path, url: str) -> None:
    first = checkpointer(tmp_path / "here", url)
    for iteration in range(4):
        save(first, iteration)
        if iteration == 1:
            best = tensors(first)
            first.save("model_best", tag_last=False, iteration=iteration, accuracy=0.9)
    first.save("model_final", iteration=3)
    first.close()
    assert names(url) == [".model_best-0000001", "model_0000002", "model_0000003"]
    assert not list((tmp_path / "here").glob(".tmp-*"))

    second = checkpointer(tmp_path / "there", url, seed=1)
    assert second.resume_or_load("", resume=True) == {"iteration": 3}
    assert is_equal(tensors(second), tensors(first))
    state, expected = (one.checkpointables["optimizer"].state_dict() for one in (second, first))
    assert torch.equal(state["state"][0]["momentum_buffer"], expected["state"][0]["momentum_buffer"])
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [
        ".model_best-0000001", "last_checkpoint", "model_0000003", "model_best", "model_final",
    ]  # fmt: skip
    assert os.readlink(tmp_path / "there" / "model_final") == "model_0000003"
    second.load(tmp_path / "there" / "model_best", checkpointables=[])
    assert is_equal(tensors(second), best)

    save(second, 4)
    second.close()
    assert names(url) == [".model_best-0000001", "model_0000003", "model_0000004"]
    there = Store(url).sizes("")
    assert {name.split("/")[0].partition(".")[0] for name in there if not name.startswith("index")} == {
        "model_best-0000001", "model_0000003", "model_0000004",
    }  # fmt: skip
    assert len([name for name in there if name.startswith("index")]) == 2


@pytest.mark.parametrize("inside", ["", "mirror"])
def test_a_mirror_in_the_folder_of_the_run_is_refused(inside: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is in the folder of the run, .*, and would be lost with it"):
        checkpointer(tmp_path / "run", f"file://{tmp_path / 'run' / inside}")
    checkpointer(tmp_path / "run", f"file://{tmp_path / 'runs'}")


def test_a_newer_checkpoint_of_the_folder_is_used(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checkpointer(tmp_path / "here", url)
    save(first, 0)
    shutil.copytree(tmp_path / "here", tmp_path / "older")
    save(first, 1)
    with monkeypatch.context() as broken:
        failing(broken, lambda operation, _: operation == "put_file")
        save(first, 2)
        first.close()
    assert names(url) == ["model_0000000", "model_0000001"]
    again = checkpointer(tmp_path / "here", url, seed=1)
    assert again.resume_or_load("", resume=True) == {"iteration": 2}
    # The mirror is newer than this folder, which another machine has continued.
    older = checkpointer(tmp_path / "older", url, seed=1)
    assert older.resume_or_load("", resume=True) == {"iteration": 1}


def test_an_interrupted_copy_is_not_read_and_is_deleted_by_the_next_run(tmp_path: Path, url: str) -> None:
    first = checkpointer(tmp_path / "here", url)
    save(first, 0)
    first.close()
    store = Store(url)
    store.write("model_0000009.0123abcd/model.safetensors", b"a part")
    store.write("index-00000002.json", b'{"format": 1, "number"')  # a local folder may keep a part of a file
    again = checkpointer(tmp_path / "there", url, seed=1)
    assert again.resume_or_load("", resume=True) == {"iteration": 0}
    assert is_equal(tensors(again), tensors(first))
    save(again, 1)
    again.close()
    assert names(url) == ["model_0000000", "model_0000001"]
    assert "model_0000009.0123abcd" not in store.entries()


def test_a_name_that_is_saved_again_never_mixes_two_checkpoints(tmp_path: Path, url: str) -> None:
    first = checkpointer(tmp_path / "here", url)
    save(first, 0)
    place = read_index(Store(url))[0].checkpoints[0].place  # type: ignore[union-attr]
    save(first, 0)
    first.close()
    (one,) = read_index(Store(url))[0].checkpoints  # type: ignore[union-attr]
    assert one.place != place
    assert place not in Store(url).entries()
    again = checkpointer(tmp_path / "there", url, seed=1)
    again.resume_or_load("", resume=True)
    assert is_equal(tensors(again), tensors(first))


def test_damage_in_the_mirror_means_the_previous_checkpoint_or_an_error(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = checkpointer(tmp_path / "here", url)
    save(first, 0)
    before = tensors(first)
    save(first, 1)
    first.close()
    store, index = Store(url), read_index(Store(url))[0]
    assert index is not None
    older, newest = (f"{one.place}/model.safetensors" for one in index.checkpoints)
    content = store.read(newest)
    store.write(newest, content[:-1] + bytes([content[-1] ^ 1]))
    again = checkpointer(tmp_path / "there", url, seed=1)
    assert again.resume_or_load("", resume=True) == {"iteration": 0}
    assert is_equal(tensors(again), before)
    assert "model.safetensors has checksum" in caplog.text
    store.write(older, b"short")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints is valid(.|\n)*has 5 bytes"):
        checkpointer(tmp_path / "other", url).resume_or_load("", resume=True)
    assert not list((tmp_path / "other").iterdir())


def test_a_lost_connection_is_no_damage(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checkpointer(tmp_path / "here", url)
    save(first, 0)
    save(first, 1)
    first.close()
    again = checkpointer(tmp_path / "there", url)
    failing(monkeypatch, lambda operation, _: operation == "get_file")
    with pytest.raises(StoreError, match="AccessDenied"):
        again.resume_or_load("", resume=True)
    assert not list((tmp_path / "there").iterdir())


def test_a_failing_mirror_is_a_warning_and_the_next_save_tries_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = checkpointer(tmp_path / "here", url)
    with monkeypatch.context() as broken:
        failing(broken, lambda operation, _: operation in ("put_file", "pipe_file"))
        save(first, 0)
        save(first, 1)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert re.search(r"model_0000000 could not be copied to .*AccessDenied.*next save tries again", warnings[0])
    assert names(url) == []
    save(first, 2)
    assert names(url) == ["model_0000002"]
    first.close()
    assert not [record for record in caplog.records if record.levelno == logging.ERROR]


def test_the_end_of_a_run_tries_once_more_and_says_what_is_not_in_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/mirror"
    first = checkpointer(tmp_path / "here", url)
    with monkeypatch.context() as broken:
        failing(broken, lambda operation, _: operation == "put_file")
        save(first, 0)
    first.close()
    assert names(url) == ["model_0000000"]
    with monkeypatch.context() as broken:
        failing(broken, lambda operation, _: operation == "put_file")
        save(first, 1)
        first.close()
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert re.search("newest checkpoint, model_0000001, is NOT in the mirror .*AccessDenied.*here/model_0000001", error)


def test_a_slow_mirror_skips_to_the_newest_and_keeps_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, goes_on, real = f"file://{tmp_path}/mirror", threading.Event(), Store.upload

    def slow(self: Store, path: Path, name: str) -> None:
        assert goes_on.wait(60)
        real(self, path, name)

    monkeypatch.setattr(Store, "upload", slow)
    caplog.set_level(logging.INFO)
    first = checkpointer(tmp_path / "here", url)
    prune = partial(keep_newest, prefix="model", max_to_keep=1)
    for iteration in range(5):
        step(first)
        first.save(f"model_{iteration:07d}", iteration=iteration, prune=prune)
        if iteration == 2:
            first.save("model_best", tag_last=False, iteration=iteration, accuracy=1.0)
        first.wait()  # training does not wait for the mirror
    assert (tmp_path / "here" / "model_0000004").is_dir()
    assert not (tmp_path / "here" / "model_0000000").exists()  # it is copied all the same

    def release() -> None:
        while "waiting until" not in caplog.text:
            time.sleep(0.01)
        goes_on.set()

    threading.Thread(target=release, daemon=True).start()
    first.close()
    assert names(url) == [".model_best-0000002", "model_0000004"]
    assert caplog.text.count("is slower than the saves") == 1
    assert re.search(r"waiting until model_0000000, .*model_0000004 \(.* MB\) is copied to file://", caplog.text)
    assert not list((tmp_path / "here").glob(".tmp-*"))


def test_equal_files_are_copied_within_the_store(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads, real = list[str](), Store.upload

    def upload(self: Store, path: Path, name: str) -> None:
        uploads.append(name.split("/")[-1])
        real(self, path, name)

    monkeypatch.setattr(Store, "upload", upload)
    first = checkpointer(tmp_path / "here", url)
    save(first, 0)
    uploads.clear()
    first.save("model_best", tag_last=False, iteration=0, accuracy=1.0)
    first.close()
    assert uploads == ["extra.json"]
    again = checkpointer(tmp_path / "there", url, seed=1)
    again.resume_or_load("", resume=True)
    again.load(tmp_path / "there" / "model_best", checkpointables=[])
    assert is_equal(tensors(again), tensors(first))
    monkeypatch.setattr(Store, "copy", no_copy)
    save(first, 1)
    first.save("model_best", tag_last=False, iteration=1, accuracy=2.0)
    first.close()
    assert names(url) == ["model_0000000", "model_0000001", ".model_best-0000001"]


def test_a_damaged_local_checkpoint_is_not_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"file://{tmp_path}/mirror"
    first = checkpointer(tmp_path / "here", url)

    def damage() -> None:
        path = tmp_path / "here" / "model_0000000" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")

    step(first)
    first.save("model_0000000", iteration=0, on_commit=damage)
    first.close()
    assert names(url) == []
    assert "model.safetensors has checksum" in caplog.text


def test_a_mirror_that_cannot_be_used_is_refused_at_the_start(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(url: str) -> str:
        with pytest.raises(ConfigError) as error:
            Mirror(url, "output", setting="train.checkpointer.mirror").check()
        assert str(error.value).startswith("train.checkpointer.mirror: ")
        return str(error.value)

    assert "The specified bucket does not exist" in refused("s3://no-such-bucket/run")
    assert "'sftpp' is no kind of store that fsspec knows. Did you mean 'sftp'?" in refused("sftpp://host/run")
    assert "pip install gcsfs" in refused("gs://bucket/run")
    assert "fsspec" in refused("sftp://user:pass-word@127.0.0.1:1/run")
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *_, **__: (_ for _ in ()).throw(ImportError("Install s3fs")))
    assert "pip install s3fs" in refused(s3)


def test_no_secret_of_a_url_is_in_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://me:pass-word@127.0.0.1:1/{tmp_path}?sig=abcdefg"
    with pytest.raises(ConfigError) as error:
        checkpointer(tmp_path / "here", url)
    shown = f"{error.value}{caplog.text}{error.value.__cause__}"
    assert "pass-word" not in shown
    assert "abcdefg" not in shown
    for text in ("s3://key:a/b@bucket/run", "s3://token@bucket/run?x=1"):
        assert shown_url(text) == "s3://bucket/run"


def test_without_a_mirror_no_package_for_stores_is_imported(run_python: Any, tmp_path: Path) -> None:
    program = "import sys, trainwright, trainwright.checkpoint.mirror; print({'s3fs', 'aiobotocore'} & {*sys.modules})"
    assert run_python("-c", program, cwd=tmp_path).stdout.strip() == "set()"


def test_another_process_in_the_same_mirror_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"file://{tmp_path}/mirror"
    one, other = checkpointer(tmp_path / "one", url), checkpointer(tmp_path / "other", url)
    save(one, 0)
    save(other, 5)
    assert "another process" not in caplog.text
    save(one, 1)
    assert caplog.text.count("another process writes checkpoints to file://") == 1
    assert "model_0000001" in names(url)

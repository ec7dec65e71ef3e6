import logging
import os
from datetime import UTC, datetime
from functools import partial

import pytest
import torch
from torch import nn

from trainwright import checkpoint
from trainwright.base import files
from trainwright.checkpoint import CheckpointError, keep_newest, saving, verify

# A save is on disk when it returns.
Checkpointer = partial(checkpoint.Checkpointer, asynchronous=False)


@pytest.fixture
def run(tmp_path):
    """Three checkpoints of a model whose weight is the iteration."""
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(model, tmp_path)
    for iteration in (9, 19, 29):
        with torch.no_grad():
            model.weight.fill_(iteration)
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
    return tmp_path


def resume(run):
    model = nn.Linear(1, 1)
    extras = Checkpointer(model, run).resume_or_load("")
    assert model.weight.item() == extras["iteration"]
    return extras["iteration"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap(path):
    path.write_bytes((path.parent.parent / "model_0000009" / path.name).read_bytes())


DAMAGES = [truncate, flip, swap, lambda path: path.unlink(), lambda path: path.write_bytes(b"")]


def test_without_any_checkpoint_a_run_starts_again(tmp_path):
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path / "run")
    assert not checkpointer.has_checkpoint()
    assert checkpointer.get_checkpoint_file() == ""
    assert checkpointer.resume_or_load("") == {}
    # A pointer alone is an error and not a fresh start.
    (tmp_path / "last_checkpoint").write_text("model_0000009")
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path)
    assert checkpointer.has_checkpoint()
    with pytest.raises(CheckpointError, match=r"model_0000009.*does not exist"):
        checkpointer.resume_or_load("")


def test_who_does_not_resume_starts_again_beside_checkpoints(run):
    model = nn.Linear(1, 1)
    before = model.weight.clone()
    assert Checkpointer(model, run).resume_or_load("", resume=False) == {}
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "extra.json", "manifest.json"])
def test_a_damaged_last_falls_back_to_the_one_before_with_one_warning(run, caplog, damage, name):
    damage(run / "model_0000029" / name)
    assert resume(run) == 19
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "model_0000029" in record.message
    # A complete manifest of another checkpoint: the faults name the files that do not match it.
    assert ("model.safetensors" if damage is swap and name == "manifest.json" else name) in record.message
    assert f"Resuming from {run / 'model_0000019'} instead." in record.message


def test_two_damaged_ones_are_said_in_one_warning(run, caplog):
    truncate(run / "model_0000029" / "model.safetensors")
    flip(run / "model_0000019" / "model.safetensors")
    assert resume(run) == 9
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "model_0000029" in record.message
    assert "model_0000019" in record.message


def test_a_pointer_to_a_folder_that_is_gone_falls_back(run, caplog):
    (run / "model_0000029").rename(run.with_name("elsewhere"))
    checkpointer = Checkpointer(nn.Linear(1, 1), run)
    assert checkpointer.get_checkpoint_file() == str(run / "model_0000019")
    assert resume(run) == 19
    assert "last_checkpoint names it, but it does not exist" in caplog.text


def save_all(folder, iterations, **options):
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(model, folder)
    for iteration in iterations:
        with torch.no_grad():
            model.weight.fill_(iteration)
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration, **options)
    return checkpointer


def test_a_clock_that_jumps_back_changes_no_order_and_does_not_delete_the_newest(tmp_path, monkeypatch):
    for year, iterations in ((2030, [9, 19]), (2020, [29, 39])):

        class Clock:
            @staticmethod
            def now(_):
                return datetime(year, 1, 1, tzinfo=UTC)  # noqa: B023 - used before the next year begins

        monkeypatch.setattr(saving, "datetime", Clock)
        save_all(tmp_path, iterations)
    keep_newest(tmp_path, "model", 2)
    assert visible(tmp_path) == ["last_checkpoint", "model_0000029", "model_0000039"]
    flip(tmp_path / "model_0000039" / "model.safetensors")
    assert resume(tmp_path) == 29


def point(run, content):
    (run / "last_checkpoint").write_bytes(content)


def not_to_resume_from(run):
    save_all(run, [39], tag_last=False)
    Checkpointer(nn.Linear(1, 1), run).save("model_best", iteration=49)


def a_kill_before_a_link(run):
    save_all(run, [29]).save("model_final", iteration=39)
    (run / "model_final").unlink()
    point(run, b"model_0000029")


def a_return_to_an_older_one(run):
    save_all(run, [14]).save("model_best", iteration=14)  # as a run that was resumed from 9
    (run / "last_checkpoint").unlink()


def a_return_and_damage(run):
    a_return_to_an_older_one(run)
    flip(run / "model_0000014" / "extra.json")


def a_chosen_one_is_damaged(run):
    Checkpointer(nn.Linear(1, 1), run).tag_last_checkpoint("model_0000019")
    flip(run / "model_0000019" / "extra.json")


def the_manifest_of_the_last_is_damaged(run):
    save_all(run, [39])
    point(run, b"model_0000019")
    truncate(run / "model_0000019" / "manifest.json")


def only_the_best_is_good(run):
    checkpointer = save_all(run, [])
    nn.init.constant_(checkpointer.model.weight, 5)
    checkpointer.save("model_best", iteration=5)
    for iteration in (9, 19, 29):
        truncate(run / f"model_{iteration:07d}" / "model.safetensors")


NO_NAMES = (b"", b"../outside", b"\xff\xfe", b"\0", b"x" * 5000, b"\x80\x04K\x01.")


@pytest.mark.parametrize(
    ("act", "iteration"),
    [
        (lambda run: None, 29),
        (
            lambda run: (run / "last_checkpoint").unlink(),
            29,
        ),  # as after a kill between the first commit and its pointer
        (lambda run: point(run, b"model_0000019"), 29),  # as after a kill before 29 was named
        (lambda run: point(run, b"model_0000009\n"), 9),  # as a user writes it
        (not_to_resume_from, 29),
        (a_kill_before_a_link, 29),
        (a_return_to_an_older_one, 14),
        (a_return_and_damage, 9),
        (a_chosen_one_is_damaged, 9),
        (the_manifest_of_the_last_is_damaged, 9),
        (only_the_best_is_good, 5),
        *(
            (lambda run, c=c: point(run, c), 29)
            for c in (b"", b"../outside", b"\xff\xfe", b"\0", b"x" * 5000, b"\x80\x04K.")
        ),
    ],
)
def test_which_checkpoint_is_resumed(run, act, iteration):
    act(run)
    assert resume(run) == iteration


def test_checkpoints_that_do_not_count_saves_are_ordered_by_iteration(run):
    for year, iteration in ((2022, 9), (2021, 19), (2020, 29)):
        as_before = checkpoint.verify(run / f"model_{iteration:07d}")
        manifest = type(as_before)(as_before.files, iteration, 1, f"{year}-01-01T00:00:00+00:00")
        (run / f"model_{iteration:07d}" / "manifest.json").write_bytes(manifest.to_bytes())
    truncate(run / "model_0000029" / "model.safetensors")
    assert resume(run) == 19
    os.unlink(run / "last_checkpoint")
    assert resume(run) == 19


def visible(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def test_the_oldest_beyond_the_limit_go(tmp_path):
    save_all(tmp_path, range(5))
    assert sorted(keep_newest(tmp_path, "model", 2)) == ["model_0000000", "model_0000001", "model_0000002"]
    assert visible(tmp_path) == ["last_checkpoint", "model_0000003", "model_0000004"]
    assert keep_newest(tmp_path, "model", 2) == []
    assert len(os.listdir(tmp_path)) == 3
    for max_to_keep in (0, -1, 1.5, True):
        with pytest.raises(CheckpointError, match="max_to_keep: got"):
            keep_newest(tmp_path, "model", max_to_keep)


@pytest.mark.parametrize(
    ("earlier", "later", "deleted"),
    [([0, 1], [2], ["model_0000000"]), ([90, 99], [0, 1], ["model_0000090", "model_0000099"])],
)
def test_the_newest_of_two_runs_stay(tmp_path, earlier, later, deleted):
    save_all(tmp_path, earlier)
    save_all(tmp_path, later)
    assert sorted(keep_newest(tmp_path, "model", 2)) == deleted


def test_the_best_the_last_and_other_names_stay(tmp_path):
    checkpointer = save_all(tmp_path, [0])
    checkpointer.save("model_best", iteration=0)  # a link onto model_0000000
    assert os.readlink(tmp_path / "model_best") == "model_0000000"
    for iteration in (1, 2, 3):
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
    checkpointer.save("other_0000000", iteration=4)
    checkpointer.save("model_v2", iteration=5)
    checkpointer.tag_last_checkpoint("model_0000001")
    assert keep_newest(tmp_path, "model", 1) == ["model_0000002"]
    verify(tmp_path / "model_best")
    assert {"model_0000001", "other_0000000", "model_v2"} < set(visible(tmp_path))


def test_folders_that_are_no_whole_checkpoints_or_have_a_link_are_left_alone(tmp_path):
    save_all(tmp_path, [1, 2])
    (tmp_path / "model_0000000").mkdir()
    (tmp_path / "model_0000000" / "mine.txt").write_text("x")
    (tmp_path / "model_0000001" / "manifest.json").unlink()
    assert keep_newest(tmp_path, "model", 1) == []
    assert (tmp_path / "model_0000000" / "mine.txt").exists()
    save_all(tmp_path / "checkpoints", [0, 1])
    files.replace_link(tmp_path / "epoch_1", tmp_path / "checkpoints" / "model_0000000")  # a link beside the folder
    assert keep_newest(tmp_path / "checkpoints", "model", 1) == []


def test_a_name_goes_before_its_content(tmp_path, monkeypatch):
    save_all(tmp_path, [0, 1])

    def stop(path, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        keep_newest(tmp_path, "model", 1)
    assert visible(tmp_path) == ["last_checkpoint", "model_0000001"]


def test_what_a_return_to_an_older_one_has_superseded_goes_first(tmp_path):
    save_all(tmp_path, [10, 20, 30]).tag_last_checkpoint("model_0000010")
    save_all(tmp_path, [15])  # by the run that was resumed from 10
    assert keep_newest(tmp_path, "model", 2) == ["model_0000030", "model_0000020"]

import os
from datetime import UTC, datetime
from functools import partial

import pytest
from torch import nn

from trainwright import checkpoint
from trainwright.checkpoint import CheckpointError, files, keep_newest, saving, verify

# A save is on disk when it returns.
Checkpointer = partial(checkpoint.Checkpointer, asynchronous=False)


def save_steps(folder, iterations, prefix="model"):
    checkpointer = Checkpointer(nn.Linear(1, 1), folder)
    for iteration in iterations:
        checkpointer.save(f"{prefix}_{iteration:07d}", iteration=iteration)
    return checkpointer


def visible(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def test_the_oldest_beyond_the_limit_go(tmp_path):
    save_steps(tmp_path, range(5))
    assert sorted(keep_newest(tmp_path, "model", 2)) == ["model_0000000", "model_0000001", "model_0000002"]
    assert visible(tmp_path) == ["last_checkpoint", "model_0000003", "model_0000004"]
    assert keep_newest(tmp_path, "model", 2) == []
    assert len(os.listdir(tmp_path)) == 3


def test_a_later_run_counts_what_an_earlier_one_left(tmp_path):
    save_steps(tmp_path, [0, 1])
    save_steps(tmp_path, [2])
    assert keep_newest(tmp_path, "model", 2) == ["model_0000000"]


def test_a_new_run_in_an_old_folder_does_not_lose_its_own(tmp_path):
    save_steps(tmp_path, [90, 99])
    save_steps(tmp_path, [0, 1])
    assert sorted(keep_newest(tmp_path, "model", 2)) == ["model_0000090", "model_0000099"]


def test_the_best_the_last_and_other_names_stay(tmp_path):
    checkpointer = save_steps(tmp_path, [0])
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


def test_a_link_beside_the_folder_protects_too(tmp_path):
    save_steps(tmp_path / "checkpoints", [0, 1], prefix="step")
    files.replace_link(tmp_path / "epoch_1", tmp_path / "checkpoints" / "step_0000000")
    assert keep_newest(tmp_path / "checkpoints", "step", 1) == []


def test_folders_that_are_no_whole_checkpoints_are_left_alone(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "model_0000000").mkdir()
    (tmp_path / "model_0000000" / "mine.txt").write_text("x")
    (tmp_path / "model_0000001" / "manifest.json").unlink()
    assert keep_newest(tmp_path, "model", 1) == []
    assert (tmp_path / "model_0000000" / "mine.txt").exists()


def test_a_name_goes_before_its_content(tmp_path, monkeypatch):
    save_steps(tmp_path, [0, 1])

    def stop(path, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        keep_newest(tmp_path, "model", 1)
    assert visible(tmp_path) == ["last_checkpoint", "model_0000001"]


@pytest.mark.parametrize("max_to_keep", [0, -1, 1.5, True])
def test_a_limit_that_is_no_count_is_refused(tmp_path, max_to_keep):
    with pytest.raises(CheckpointError, match="max_to_keep: got"):
        keep_newest(tmp_path, "model", max_to_keep)


def test_a_clock_that_jumps_back_does_not_delete_the_newest(tmp_path, monkeypatch):
    save_steps(tmp_path, [0, 1])

    class Clock:
        @staticmethod
        def now(_):
            return datetime(2001, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(saving, "datetime", Clock)
    save_steps(tmp_path, [2, 3, 4])
    keep_newest(tmp_path, "model", 3)
    assert visible(tmp_path) == ["last_checkpoint", "model_0000002", "model_0000003", "model_0000004"]


def test_what_a_return_to_an_older_one_has_superseded_goes_first(tmp_path):
    save_steps(tmp_path, [10, 20, 30]).tag_last_checkpoint("model_0000010")
    save_steps(tmp_path, [15])  # by the run that was resumed from 10
    assert keep_newest(tmp_path, "model", 2) == ["model_0000030", "model_0000020"]

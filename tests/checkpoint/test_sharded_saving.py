"""Saves of a sharded model on several processes: errors, kills, links, and folders that are not shared."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint import sharded_runs as runs
from tests.distributed.layouts import Net
from tests.ranks import on_ranks
from tests.toys import llama
from trainwright.checkpoint import Checkpointer, CheckpointError, verify
from trainwright.checkpoint.manifest import read_manifest
from trainwright.cli.main import main
from trainwright.models.folder import init_weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What both ranks of one group have returned, by the name of the function, and "folder"."""
    base = tmp_path_factory.mktemp("runs")
    found = on_ranks(runs.all_of_them, str(base), timeout=200)
    return {"folder": base, **{name: [rank[name] for rank in found] for name in found[0]}}


def test_one_ranks_full_disk_is_an_error_on_all_and_the_next_save_commits(results: dict[str, Any]) -> None:
    folder = results["folder"] / "full_disk"
    for rank, seen in enumerate(results["full_disk"]):
        name, code, path, notes = seen["error"]
        assert (name, code, path, seen["has_failed"]) == ("OSError", errno.ENOSPC, str(folder / "model_2"), True), rank
        assert notes[0].startswith("Rank 1 on ")
        assert "could not write its share" in notes[0]
        assert notes[-1] == "Saving 'model_2' failed; earlier checkpoints are unchanged."
        assert seen["names"] == ["last_checkpoint", "model_1"]
        assert seen["resumed"] == str(folder / "model_1")
        assert seen["then"] == ["last_checkpoint", "model_1", "model_3"]
    assert verify(folder / "model_3").iteration == 3


def test_links_hard_links_and_retention(results: dict[str, Any]) -> None:
    folder = results["folder"] / "links"
    hidden = ".model_best-0000002"
    kept = ["model_0000001", "model_0000002", "model_best", "model_final"]
    names = [name for name in results["links"][0]["names"] if not name.startswith(".model_final")]
    assert names == sorted([hidden, "last_checkpoint", *kept])
    tensors = "model-00001-of-00002.safetensors"
    assert os.path.samefile(folder / "model_best" / tensors, folder / "model_0000002" / tensors)
    assert os.path.samefile(folder / "model_final" / tensors, folder / "model_0000002" / tensors)
    manifest = read_manifest(folder / "model_final")
    assert (manifest.layout, manifest.world_size) == ({"pp": 1, "replicate": 1, "shard": 2, "tp": 1}, 2)
    assert '"more"' in (folder / "model_final" / "extra.json").read_text()


def test_a_folder_that_not_all_ranks_see_is_refused(results: dict[str, Any]) -> None:
    first, second = results["apart"]
    assert first == second
    assert first.startswith("after 0 steps: ")
    assert "rank 1 on " in first
    assert "does not see the files of rank 0" in first
    assert "use a folder that all hosts share" in first
    assert os.listdir(results["folder"] / "apart" / "0") == []


def test_a_dtensor_outside_of_model_and_optimizer_is_refused_on_all_ranks(results: dict[str, Any]) -> None:
    first, second = results["states"]
    assert first == second
    assert [text.partition(";")[0] for text in first] == [
        "CheckpointTypeError: own.weight: got a DTensor, which does not store its data as a plain tensor",
        "CheckpointTypeError: model.embedding.weight: got a DTensor, which does not store its data as a plain tensor",
    ]
    assert "pass mesh= to the Checkpointer" in first[1]


@pytest.fixture
def sharded(results: dict[str, Any], tmp_path: Path) -> Path:
    shutil.copytree(results["folder"] / "full_disk", tmp_path / "run")
    return tmp_path / "run" / "model_3"


def damage(folder: Path, kind: str) -> None:
    first, second = (folder / f"model-0000{rank}-of-00002.safetensors" for rank in (0, 1))
    if kind == "missing":
        second.unlink()
    elif kind == "cut":
        os.truncate(second, second.stat().st_size - 100)
    else:
        second.rename(folder / "aside")
        first.rename(second)
        (folder / "aside").rename(first)


FAULTS = {"missing": "is missing", "cut": "an interrupted copy", "swapped": "model-00000-of-00002.safetensors has"}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_missing_cut_or_swapped_shard_is_found(sharded: Path, kind: str, capsys: Any) -> None:
    damage(sharded, kind)
    with pytest.raises(CheckpointError, match=FAULTS[kind]):
        verify(sharded)
    assert main(["checkpoint", "verify", str(sharded)]) == 1
    assert FAULTS[kind] in capsys.readouterr().out
    assert main(["checkpoint", "list", "--verify", str(sharded.parent)]) == 1
    out = capsys.readouterr().out
    assert next(line for line in out.splitlines() if "a resume uses" in line).split()[0] == "model_1"


def test_show_and_verify_deep_read_shards(results: dict[str, Any], capsys: Any) -> None:
    folder = results["folder"] / "links" / "model_final"
    assert main(["checkpoint", "show", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "by 2 processes (shard 2)" in out
    assert "model-00001-of-00002.safetensors" in out
    assert re.search(r"blocks.0.up.weight +40 x 10 +F32", out)
    assert main(["checkpoint", "verify", "--deep", str(folder)]) == 0


def test_a_checkpoint_is_exported_as_one_file(results: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    run, weights = results["folder"] / "links", results["links"][0]["weights"]
    assert main(["checkpoint", "export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert f"{len(weights)} tensors" in capsys.readouterr().out
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], value) for name, value in weights.items())
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == sorted(
        ["config.json", "model.safetensors", "preprocessor", "words.txt"]
    )
    assert main(["checkpoint", "export", str(run), "--output", str(tmp_path / "out")]) == 2
    assert "export to a new folder" in capsys.readouterr().err


def test_one_process_loads_the_weights_alone(results: dict[str, Any]) -> None:
    best, weights = results["folder"] / "links" / "model_best", results["links"][0]["weights"]
    first, second = Net(), Net()
    Checkpointer(first).load(best, checkpointables=[], strict=True)
    assert init_weights(second, best) == []
    for model in (first, second):
        assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    with pytest.raises(CheckpointError, match="one process had; give the checkpoint"):
        init_weights(first, best / "model-00001-of-00002.safetensors")


@pytest.mark.exhaustive
def test_an_exported_model_of_transformers_is_loaded_by_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    on_ranks(runs.save_llama, str(tmp_path), timeout=200)
    for is_tied in (True, False):
        out = tmp_path / f"out-{is_tied}"
        assert main(["checkpoint", "export", str(tmp_path / str(is_tied)), "--output", str(out)]) == 0
        loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in llama(is_tied=is_tied).state_dict().items())


@pytest.mark.parametrize("every", [30, pytest.param(1 if "TORTURE" in os.environ else 9, marks=pytest.mark.exhaustive)])
def test_a_run_continues_bitwise_after_a_kill_at_any_file_operation(tmp_path: Path, every: int) -> None:
    assert on_ranks(runs.kill_each, str(tmp_path), every, world_size=1, timeout=300) == [[]]

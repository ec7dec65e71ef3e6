"""An update of a run is run again with the same bits, in both APIs, and nothing is written."""

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from tests.ranks import on_ranks
from tests.toys import Classifier, file_config
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.inspect.replay import nearest_checkpoint
from trainwright.parallel.data_parallel import unwrap_model

GENERATOR = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.randn(48, 6, generator=GENERATOR), torch.arange(48) % 3
READ: list[int] = []  # the samples of a run, in the order of reading


class Numbered(Dataset):
    def __init__(self, named: bool = False) -> None:
        self.named = named

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> Any:
        READ.append(int(index))
        if self.named:
            return {"inputs": INPUTS[index], "labels": LABELS[index]}
        return INPUTS[index], LABELS[index]


def by_objects(folder: Path, **layout: Any) -> Trainer:
    torch.manual_seed(3)
    config = TrainingConfig(
        output_dir=str(folder), batch_size=4, gradient_accumulation_steps=2, learning_rate=0.05,
        max_grad_norm=1.0, tensorboard=None, progress_bar=False, seed=1, **{"num_epochs": 4, **layout},
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    return Trainer(model, config, Numbered(), TensorDataset(INPUTS[:8], LABELS[:8]))


def by_files(folder: Path) -> DefaultTrainer:
    settings = {"train_iter": 24, "log_period": 5, "train_micro_batch_size": 4, "num_accumulation_steps": 2}
    model, data = lambda: Classifier((6, 8, 3), dropout=0.3, seed=3), lambda: Numbered(named=True)
    cfg = file_config(folder, model, data, **settings)
    cfg.optim = LazyCall(torch.optim.AdamW)(lr=0.05)
    cfg.train.checkpointer.period = 7
    return DefaultTrainer(cfg)


BUILD = {"objects": by_objects, "files": by_files}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int]]]:
    """For each API the folder of a run, and the samples that it has read."""
    found = {}
    for name, build in BUILD.items():
        folder = tmp_path_factory.mktemp("replay") / name
        trainer = build(folder)
        READ.clear()
        trainer.train()
        found[name] = (folder, list(READ))
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("api", BUILD)
@pytest.mark.parametrize("step", [1, 3, 13, 24])
def test_an_update_has_the_same_bits_and_nothing_is_written(
    api: str, step: int, runs: dict[str, tuple[Path, list[int]]]
) -> None:
    folder, read = runs[api]
    before = content(folder)
    found = BUILD[api](folder).replay(step)
    assert found.is_equal is True
    assert bool(found.checkpoint) == (step > 6)
    assert content(folder) == before
    # The samples are those that the run has read in this update.
    first = (step - 1) * 8
    assert found.samples == [read[first : first + 4], read[first + 4 : first + 8]]
    losses = [value for values in found.facts.sample_losses for value in values or ()]
    assert len(losses) == 8
    assert sum(losses) / 8 == pytest.approx(found.loss, rel=1e-5)
    assert found.facts.non_finite is None
    assert len(found.facts.gradient_norms) == 4
    assert all(norm > 0 for norm in found.facts.gradient_norms.values())


def test_another_loss_is_seen(runs: dict[str, tuple[Path, list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = runs["objects"]
    monkeypatch.setitem(globals(), "INPUTS", INPUTS + 1e-3)
    found = by_objects(folder).replay(14)
    assert found.is_equal is False
    assert found.loss == pytest.approx(found.recorded_loss, rel=0.2)


def test_a_loss_that_differs_lists_what_has_changed(
    runs: dict[str, tuple[Path, list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["files"][0], folder)
    record = json.loads((folder / "run.json").read_text())
    record["starts"][-1]["versions"]["torch"] = "1.9.0"
    (folder / "run.json").write_text(json.dumps(record))
    assert by_files(folder).replay(3).changes == {}  # the loss is equal
    monkeypatch.setattr(Numbered, "__len__", lambda self: 32)
    changes = by_files(folder).replay(3).changes
    assert changes["Versions: torch"] == ("1.9.0", metadata.version("torch"))
    assert changes["Data: train samples"] == (48, 32)


def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    runs: dict[str, tuple[Path, list[int]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["files"][0], folder, symlinks=True)
    damaged = nearest_checkpoint(folder, 24)
    assert damaged is not None
    (damaged / "model.safetensors").write_bytes(b"half")
    found = by_files(folder).replay(24)
    assert found.is_equal
    assert found.checkpoint not in ("", damaged.name)
    assert f"checkpoint {damaged.name}: model.safetensors has 4 bytes" in caplog.text


def test_the_error_of_a_step_is_part_of_the_result(
    runs: dict[str, tuple[Path, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = by_objects(runs["objects"][0])

    def fail(model: Any, inputs: Any, output: Any) -> None:
        if trainer.iter == 13:
            raise ValueError("on purpose")

    trainer.model.register_forward_hook(fail)
    found = trainer.replay(14)
    assert found.error == "ValueError: on purpose"
    assert found.loss is None
    assert found.is_equal is None


def test_what_cannot_be_replayed_is_refused(runs: dict[str, tuple[Path, list[int]]], tmp_path: Path) -> None:
    folder, _ = runs["objects"]
    trainer = by_objects(folder)
    for step in (0, 25):
        with pytest.raises(ConfigError, match=f"got step {step}; the run has the updates 1 to 24"):
            trainer.replay(step)
    for step in (14, 20):  # of a run that was longer than these settings
        with pytest.raises(ConfigError, match=f"got step {step}; the run has the updates 1 to 12"):
            by_objects(folder, num_epochs=2).replay(step)
    trainer.replay(2)
    with pytest.raises(ConfigError, match="has trained already"):
        trainer.replay(2)
    (tmp_path / "run.json").write_text('{"starts": [{"processes": 4}]}')
    with pytest.raises(ConfigError, match="had 4 processes, this one has 1"):
        by_objects(tmp_path).replay(2)


def replay_on_this_rank(folder: Path, builds: dict[str, int]) -> dict[str, Any]:
    """Train and replay, on one of two ranks; returns what the replays have found and what this rank has read."""
    found: dict[str, Any] = {}
    for name, updates in builds.items():
        READ.clear()
        build = BUILD[name]
        build(folder / name).train()
        size = 4 * 2
        trained = READ[-updates * size :]  # before that, the ranks' data are compared
        found[name] = {"read": trained[8 * size : 9 * size]}
        trainer = build(folder / name)
        averaged: dict[str, float] = {}

        def record(*_: Any, model: nn.Module = trainer.model, averaged: dict[str, float] = averaged) -> None:
            averaged.update({n: float(p.grad.norm()) for n, p in unwrap_model(model).named_parameters()})

        trainer.optimizer.register_step_pre_hook(record)
        found[name].update(replay=trainer.replay(9), averaged=averaged)
        with pytest.raises(ConfigError, match="the terminal of one process"):
            build(folder / name).replay(9, stops=True)
    found["divided"] = by_objects(folder / "divided", zero_stage=2).replay(1).loss
    return found


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_ranks_replay_with_the_same_bits_and_the_samples_of_both(tmp_path: Path) -> None:
    """The norms are those of the gradients with which the optimizer steps."""
    ranks = on_ranks(replay_on_this_rank, tmp_path, {"objects": 12, "files": 24}, world_size=2)
    assert ranks[0]["divided"] == ranks[1]["divided"] > 0
    for name in BUILD:
        first, second = (rank[name]["replay"] for rank in ranks)
        assert first.is_equal
        assert first.loss == second.loss
        assert first.samples == second.samples
        assert first.facts.gradient_norms == second.facts.gradient_norms
        assert first.facts.gradient_norms == pytest.approx(ranks[0][name]["averaged"], rel=1e-5)
        read = [index for rank in ranks for index in rank[name]["read"]]
        assert [index for batch in first.samples for index in batch] == read
        assert [len(losses) for losses in first.facts.sample_losses] == [4] * 4
        assert first.loss == pytest.approx(sum(map(sum, first.facts.sample_losses)) / 16, rel=1e-5)

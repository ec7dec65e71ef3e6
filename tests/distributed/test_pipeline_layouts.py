"""Pipelines through both APIs, alone and with data and tensor parallel: the losses and norms of one process."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from tests.distributed.layout_runs import (
    LENGTH,
    Record,
    Texts,
    assert_equal_runs,
    build_language,
    settings,
    train,
    train_on_ranks,
)
from tests.ranks import on_ranks
from trainwright import Trainer
from trainwright.cli.main import main
from trainwright.models import Model

Run = tuple[str, dict[str, Any]]
STAGES = {"pipeline_parallel_size": 2}


def runs_of(updates: int, **layouts: dict[str, Any]) -> list[Run]:
    """With accumulation, clipping and tied weights; the APIs in turn."""
    found: list[Run] = []
    for number, layout in enumerate(layouts.values()):
        own: dict[str, Any] = {"accumulation": 3, "updates": updates, "recompute": number == 0}
        found.append((("objects", "files")[number % 2], {**own, "layout": {**STAGES, **layout}}))
    return found


def assert_as_one_process(tmp_path: Path, runs: list[Run], world_size: int) -> None:
    ranks = train_on_ranks(tmp_path, runs, world_size=world_size, timeout=300)
    for number, (api, own) in enumerate(runs):
        expected = train(api, tmp_path / f"alone{number}", **{k: v for k, v in own.items() if k != "layout"})
        for rank in ranks:
            assert_equal_runs(rank[number], expected)


@pytest.mark.exhaustive
def test_every_schedule_for_twenty_updates(tmp_path: Path) -> None:
    schedules = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    assert_as_one_process(tmp_path, runs_of(20, **{name: {"pipeline_schedule": name} for name in schedules}), 2)


@pytest.mark.exhaustive
def test_four_processes_for_twenty_updates(tmp_path: Path) -> None:
    runs = runs_of(
        20, copies={}, zero2={"zero_stage": 2}, zero3={"zero_stage": 3}, four={"pipeline_parallel_size": 4},
        tensor={"tensor_parallel_size": 2},
    )  # fmt: skip
    assert_as_one_process(tmp_path, runs, 4)


@pytest.mark.exhaustive
def test_stages_data_ranks_and_tensor_ranks_for_twenty_updates(tmp_path: Path) -> None:
    tensor = {"tensor_parallel_size": 2}
    runs = runs_of(
        20, zero3={**tensor, "zero_stage": 3}, copies=tensor, hybrid={"zero_stage": 2, "replicate_size": 2},
    )  # fmt: skip
    assert_as_one_process(tmp_path, runs, 8)


def cropped(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch whose length depends on its first token; those of a rank and those of an update differ."""
    length = LENGTH - int(samples[0]["token_ids"][0]) % 3
    return {name: torch.stack([sample[name][:length] for sample in samples]) for name in samples[0]}


def train_cropped(folder: Path, layouts: list[dict[str, Any]]) -> list[list[float]]:
    """The losses of four updates over 30 samples, whose last batches are smaller, on two data ranks."""
    found = []
    for number, layout in enumerate(layouts):
        config = settings(
            folder / str(number), num_epochs=2, batch_size=4, gradient_accumulation_steps=2, save_enabled=False,
            dataloader_drop_last=False, log_steps=1000, max_grad_norm=1.0, **layout,
        )  # fmt: skip
        record = Record()
        trainer = Trainer(build_language(plain=True), config, train_dataset=Texts(30), data_collator=cropped)
        trainer.register_hooks([record])
        trainer.train()
        found.append(record.losses)
    return found


@pytest.mark.exhaustive
def test_batches_of_different_lengths_on_several_data_ranks(tmp_path: Path) -> None:
    layouts = [{**STAGES, "zero_stage": stage} for stage in (2, 3)]
    (expected, *_) = on_ranks(train_cropped, tmp_path / "whole", [{}], world_size=2)
    for rank in on_ranks(train_cropped, tmp_path / "cut", layouts, world_size=4):
        for losses in rank:
            assert losses == pytest.approx(expected[0], abs=1e-5)


def train_watched(folder: Path) -> dict[str, Any]:
    """Which blocks are moved to the device, the number of parameters here, the log, and the times of a run."""
    model, moved = build_language(plain=True), []

    def watch(module: nn.Module, name: str) -> None:
        apply = module._apply
        module._apply = lambda *a, **k: (moved.append(name), apply(*a, **k))[1]  # type: ignore[method-assign]

    for name, block in [*model.blocks.named_children()]:  # type: ignore[union-attr, operator]
        watch(block, name)
    config = settings(folder, batch_size=6, gradient_accumulation_steps=4, save_enabled=False, **STAGES)
    trainer = Trainer(model, config, train_dataset=Texts(72))
    trainer.train()
    log = folder / ("log.txt" if torch.distributed.get_rank() == 0 else "log.txt.rank1")
    number = sum(parameter.numel() for parameter in model.parameters())
    return {"moved": {*moved}, "number": number, "log": log.read_text(), "phases": trainer.phases}


def test_a_stage_moves_only_its_part_and_reports_its_size_and_times(tmp_path: Path) -> None:
    ranks = on_ranks(train_watched, tmp_path, world_size=2)
    assert [rank["moved"] for rank in ranks] == [{"0", "1"}, {"2", "3"}]
    whole = sum(parameter.numel() for parameter in build_language(plain=True).parameters())
    assert re.search(r"Layout +2 processes: 1 data x 2 pipeline\n", ranks[0]["log"])
    for number, rank in enumerate(ranks):
        assert f"GPTTextGeneration: {whole:,} parameters (" in rank["log"]
        stage = f"pipeline stage {number} of stages 0 to 1 (layers {2 * number} to {2 * number + 1})"
        assert f"{stage}: {rank['number']:,} parameters" in rank["log"]
        phases = rank["phases"]
        assert min(phases.forward, phases.backward, phases.waiting, phases.optimizer) > 0
        assert phases.forward + phases.backward + phases.waiting <= phases.step


def train_saved(folder: Path) -> None:
    config = settings(folder / "run", batch_size=6, gradient_accumulation_steps=4, **STAGES)
    Trainer(build_language(plain=True), config, train_dataset=Texts(24)).train()


@pytest.mark.exhaustive
def test_a_weight_that_two_stages_hold_is_exported_once(tmp_path: Path) -> None:
    on_ranks(train_saved, tmp_path, world_size=2)
    assert main(["checkpoint", "export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = {*file.keys()}
    model = build_language(plain=True)
    assert names == {name for name, _ in model.named_parameters()}  # without head.weight, which is tied
    loaded = Model.load(tmp_path / "out")
    assert loaded.get_parameter("head.weight") is loaded.get_parameter("token_embedding.weight")
    for name, value in Model.load(tmp_path / "run" / "final_epoch").state_dict().items():  # of the stages
        assert torch.equal(value, loaded.state_dict()[name]), name

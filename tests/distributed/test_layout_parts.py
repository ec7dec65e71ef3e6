"""Config files whose optimizers have a part of the model: under each layout as in one process, also after a resume."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.layout_runs import GLOBAL_BATCH, Record, Texts, build_language, file_config
from tests.ranks import on_ranks
from trainwright import DefaultTrainer
from trainwright.config import LazyCall
from trainwright.parallel.layout import Layout

UPDATES = 3
STAGES = {"pipeline_parallel_size": 2}


def language(trained: str) -> nn.Module:
    """A model of which only the parameters whose names contain ``trained`` are trained."""
    model = build_language(tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return model


class PartRecord(Record):
    """Has no norm: each of several optimizers has its own."""

    def after_step(self) -> None:
        self.trainer.storage.reduce()
        self.losses.append(float(self.trainer.storage.latest()["total_loss"][0]))


def optimizer(kind: Any = torch.optim.AdamW, **params: Any) -> Any:
    return LazyCall(kind)(lr=0.01, params={"clip_grad_max_norm": 0.5, **params})


OPTIMIZERS: dict[str, tuple[str, Any]] = {
    "frozen": ("head", {}),
    "frozen first": ("token_embedding", {}),
    "parts": ("", {"body": {"part": "blocks", "layer_decay": 0.5}, "head": {"part": "head"}}),
    "parts of one stage": ("", {"head": {"part": "head", "overrides": {"weight": {"weight_decay": 0.0}}}}),
}


def optim_of(settings: dict[str, Any]) -> Any:
    several = {name: optimizer(**params) for name, params in settings.items()}
    return several or optimizer()


def train(folder: Path, layout: dict[str, Any], name: str, *, is_resume: bool = False) -> list[float]:
    trained, settings = OPTIMIZERS[name]
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    data, record = Layout.of(layout, world).data, PartRecord()
    texts, updates = Texts(GLOBAL_BATCH * 2 * UPDATES), UPDATES * (1 + is_resume)
    cfg = file_config(folder, layout, texts, GLOBAL_BATCH // data, data, clip=0.5, tied=False, updates=updates)
    cfg.model, cfg.optim, cfg.train.resume = LazyCall(language)(trained=trained), optim_of(settings), is_resume
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([record])
    with contextlib.redirect_stdout(None):
        trainer.train()
    return record.losses


def train_all(folder: Path, layout: dict[str, Any], is_resume: bool = False) -> dict[str, list[float]]:
    return {name: train(folder / name, layout, name, is_resume=is_resume) for name in OPTIMIZERS}


@pytest.mark.exhaustive
def test_runs_pass_from_stages_to_one_process_and_back(tmp_path: Path) -> None:
    first = train_all(tmp_path / "alone", {})
    on_stages = on_ranks(train_all, tmp_path / "stages", STAGES, timeout=120)
    expected = train_all(tmp_path / "stages", {}, True)  # from the stages to one process
    found = on_ranks(train_all, tmp_path / "alone", STAGES, True, timeout=120)
    for name in OPTIMIZERS:
        for losses in on_stages:
            assert losses[name] == pytest.approx(first[name], abs=1e-5), name
        for losses in found:
            assert losses[name] == pytest.approx(expected[name], abs=1e-5), name

"""Tensor parallel of latent attention and of parameters of heads by a trainer, with checkpoints, ZeRO and recompute."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.expert_runs import Record, trainer_of
from tests.distributed.layout_runs import GLOBAL_BATCH
from tests.engine.test_sharded_resume import forget, full
from tests.parallel.test_tensor import by_heads
from tests.ranks import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed")

KIND = "HYV4"  # has latent attention, sinks of heads, and experts
TENSOR = {"tensor_parallel_size": 2}


def trained(folder: Path, own: dict[str, Any]) -> dict[str, Any]:
    usual = {"optimizer": {"name_": "AdamW", "eps": 1e-3}, "ema": {"decay": 0.5}, "num_epochs": 2}
    usual |= {
        "learning_rate": 1e-2,
        "save_enabled": True,
        "save_steps": 2,
        "resume_from_checkpoint": True,
        "log_steps": 1,
    }
    data = (torch.distributed.get_world_size() // 2) if torch.distributed.is_initialized() else 1
    trainer = trainer_of(folder, by_heads(KIND), 2, **{**usual, "batch_size": GLOBAL_BATCH // data, **own})
    record = Record()
    trainer.register_hooks([record])
    trainer.train()
    weights = {name: full(value) for name, value in trainer.model.state_dict().items()}
    trainer.checkpointer.close()
    return {"weights": weights, "losses": record.losses, "norms": record.norms}


def saved_and_resumed(folder: Path, own: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run of two epochs, and its second one resumed from the first."""
    unbroken = trained(folder, own)
    forget(folder, "4")
    return unbroken, trained(folder, own)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0, msg=name)


OF_FOUR = {**TENSOR, "zero_stage": 3, "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("world_size", "own"),
    [(2, TENSOR), pytest.param(4, OF_FOUR, marks=pytest.mark.exhaustive(every=2))],
    ids=["2", "4"],
)
def test_a_run_has_the_numbers_of_one_process_and_resumes_in_any_layout(
    tmp_path: Path, world_size: int, own: dict[str, Any]
) -> None:
    alone = trained(tmp_path / "alone", {})
    unbroken, resumed = on_ranks(saved_and_resumed, tmp_path / "ranks", own, world_size=world_size, timeout=150)[0]
    for name in ("losses", "norms"):
        assert unbroken[name] == pytest.approx(alone[name], abs=1e-5)
    assert_close(unbroken["weights"], alone["weights"])
    assert all(torch.equal(resumed["weights"][name], value) for name, value in unbroken["weights"].items())
    shutil.copytree(tmp_path / "ranks", tmp_path / "copied", symlinks=True)
    forget(tmp_path / "copied", "4")
    assert_close(trained(tmp_path / "copied", {})["weights"], unbroken["weights"])

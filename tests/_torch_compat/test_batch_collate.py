"""If torch's private collate functions change, batches are made by the public ones."""

import pytest
import torch

from tests._torch_compat.conftest import CHANGES, Trained, change_torch
from trainwright._torch_compat import (
    batch_collate,
)


@pytest.mark.parametrize("change", CHANGES)
def test_batches_of_plain_values(change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    change_torch(
        monkeypatch,
        batch_collate,
        "utils.data._utils.collate.collate",
        change,
        lambda values, collate_fn_map: torch.zeros(2),
    )
    (line,) = lines_of_training()
    assert "using the public API for batches of plain values" in line


@pytest.mark.parametrize("change", CHANGES)
def test_pinned_memory(change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Pinned:
        def pin_memory(self) -> str:
            return "pinned"

    caplog.set_level("INFO", logger="trainwright")
    change_torch(monkeypatch, batch_collate, "utils.data._utils.pin_memory.pin_memory", change, lambda batch: None)
    pin = batch_collate.pin_memory()
    assert pin({"a": Pinned(), "b": [Pinned(), 1], "c": (Pinned(),)}) == {
        "a": "pinned",
        "b": ["pinned", 1],
        "c": ("pinned",),
    }
    assert len(caplog.records) == 1

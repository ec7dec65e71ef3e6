"""Vision transformers of timm."""

import sys
from pathlib import Path

import pytest
import torch

from trainwright.base.errors import ConfigImportError
from trainwright.checkpoint import CheckpointError
from trainwright.models import vit

TINY = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}


def test_settings_reach_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vit.create_model(**TINY, device="cpu")
    assert type(model).__name__ == "VisionTransformer"
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    # Without timm it says how to get it.
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigImportError, match=r"timm: pip install timm"):
        vit.create_model()


def test_weights_of_a_file_are_loaded_and_must_fit(tmp_path: Path) -> None:
    model = vit.create_model(**TINY)
    torch.save(model.state_dict(), tmp_path / "vit.pt")
    loaded = vit.create_model(**TINY, checkpoint_path=tmp_path / "vit.pt")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"head.weight: shape \(3, 16\) there, \(4, 16\) in the model"):
        vit.create_model(**{**TINY, "num_classes": 4}, checkpoint_path=tmp_path / "vit.pt")

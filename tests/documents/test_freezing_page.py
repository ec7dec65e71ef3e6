"""The page about Towhee's trainer: its examples of freezing, and what it prints below them."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# A vision transformer with the layers of the page's, as a module of the user's own.
VIT = """
import torch
from torch import nn


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.patch_embed = nn.Conv2d(3, 8, 16, 16)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10)


def create_model():
    return VisionTransformer()
"""


def shown(block: str, names: dict[str, Any]) -> object:
    """What a notebook shows below a cell: the value of its last line."""
    *statements, last = ast.parse(block).body
    exec(compile(ast.Module(statements, []), "page", "exec"), names)
    return eval(compile(ast.Expression(last.value), "page", "eval"), names)


def test_the_layers_that_are_frozen_by_name_are_shown(
    page_text: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page_models").mkdir()
    (tmp_path / "page_models" / "vit.py").write_text(VIT)
    monkeypatch.syspath_prepend(tmp_path)
    first = page_text(
        "freezing/freezer",
        imports={
            "from towhee.trainer.utils.layer_freezer import LayerFreezer": "from trainwright.optim import LayerFreezer",
            "from towhee.models import vit": "from page_models import vit",
        },
    )
    names: dict[str, Any] = {}
    assert shown(first, names) == []
    assert shown(page_text("freezing/by_names"), names) == ["head"]
    trainable = {name for name, parameter in names["my_model"].named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in names["my_model"].named_parameters()} - {"head.weight", "head.bias"}

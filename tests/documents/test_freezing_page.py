"""The page about Towhee's trainer: its examples of freezing, and what it prints below them."""

import ast
from collections.abc import Callable
from typing import Any


def shown(block: str, names: dict[str, Any]) -> object:
    """What a notebook shows below a cell: the value of its last line."""
    *statements, last = ast.parse(block).body
    exec(compile(ast.Module(statements, []), "page", "exec"), names)
    return eval(compile(ast.Expression(last.value), "page", "eval"), names)


def test_the_layers_that_are_frozen_by_name_are_shown(page_text: Callable[..., str]) -> None:
    first = page_text(
        "freezing/freezer",
        imports={
            "from towhee.trainer.utils.layer_freezer import LayerFreezer": "from trainwright.optim import LayerFreezer",
            "from towhee.models import vit": "from trainwright.models import vit",
        },
    )
    names: dict[str, Any] = {}
    assert shown(first, names) == []
    assert shown(page_text("freezing/by_names"), names) == ["head"]
    trainable = {name for name, parameter in names["my_model"].named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in names["my_model"].named_parameters()} - {"head.weight", "head.bias"}

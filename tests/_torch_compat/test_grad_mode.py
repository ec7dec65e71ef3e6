"""If torch's private switch of gradients changes, the training completes with the public one."""

import pytest

from tests._torch_compat.conftest import CHANGES, Trained, change_torch
from trainwright._torch_compat import (
    grad_mode,
)


@pytest.mark.parametrize("change", CHANGES)
def test_the_gradient_mode(change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    change_torch(monkeypatch, grad_mode, "_C._set_grad_enabled", change, lambda mode: None)
    (line,) = lines_of_training()
    assert "using the public API for the gradient mode" in line

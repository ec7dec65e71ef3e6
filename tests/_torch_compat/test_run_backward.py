"""If torch's private backward call changes, the training completes with the public one and the same weights."""

from typing import Any

import pytest
import torch

from tests._torch_compat.conftest import CHANGES, Trained, change_torch
from trainwright._torch_compat import (
    run_backward,
)


@pytest.mark.parametrize("change", CHANGES)
def test_the_backward_call(change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    def half(tensors: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        return original(tensors, [0.5 * gradient for gradient in gradients], *args, **kwargs)

    original: Any = torch.autograd.graph._engine_run_backward
    change_torch(monkeypatch, run_backward, "autograd.graph._engine_run_backward", change, half)
    (line,) = lines_of_training()
    assert "using the public API for the backward pass" in line

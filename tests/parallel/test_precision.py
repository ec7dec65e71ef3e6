"""Mixed precision is applied to a model once and holds for every call."""

import torch
from torch import nn

from trainwright.parallel.precision import apply_autocast


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_matrix_products_run_in_bfloat16_and_weights_stay_float32() -> None:
    model = Probe()
    scaler = apply_autocast(model, torch.device("cpu"))
    assert scaler is None  # bfloat16 needs none
    assert model(torch.randn(2, 4)).dtype is torch.bfloat16
    assert model.linear.weight.dtype is torch.float32
    assert list(model.state_dict()) == ["linear.weight", "linear.bias"]


def test_the_result_is_that_of_torchs_autocast() -> None:
    model, x = Probe(), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    apply_autocast(model, torch.device("cpu"))
    assert torch.equal(model(x), expected)

import random

import numpy as np
import pytest
import torch
from torch import nn

from trainwright.evaluation.preserve_rng import evaluation_mode, kept_randomness


def test_each_submodule_gets_its_own_mode_back_after_an_exception():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    model[1][1].eval()  # frozen statistics in a model that trains
    before = [module.training for module in model.modules()]

    def evaluate() -> None:
        with evaluation_mode(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        evaluate()
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_a_tensor_that_a_model_keeps_from_evaluation_can_be_trained_with():
    class Positions(nn.Linear):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(2.0).expand(2, 2).clone()
            return super().forward(x) * self.table

    model = Positions(2, 2)
    with evaluation_mode(model):
        model(torch.ones(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    assert model.weight.grad is not None


def test_draws_inside_change_nothing_after():
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(1).item()]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)

    def draw_and_fail() -> None:
        with kept_randomness(torch.device("cpu")):
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert draw() == expected

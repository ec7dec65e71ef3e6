"""Evaluation mode is left with the mode that each part of the model had before."""

import pytest
import torch

from trainwright.models import Model


def test_predict_leaves_modes_and_gradients_as_they_were(tiny: Model) -> None:
    tiny.train()
    tiny.norm.eval()
    before = tiny.norm.running_mean.clone()
    assert tiny.predict(["a"]) == tiny.predict(["a"])  # no dropout
    assert [m.training for m in (tiny, tiny.linear, tiny.dropout, tiny.norm)] == [True, True, True, False]
    assert torch.equal(tiny.norm.running_mean, before)
    assert not tiny.predict(["a"], post_process=False)["logits"].requires_grad
    assert torch.is_grad_enabled()


def test_predict_restores_the_mode_after_an_error(tiny: Model) -> None:
    tiny.train()
    with pytest.raises(RuntimeError):
        tiny.predict({"lengths": torch.ones(1, 7)})
    assert tiny.training
    assert tiny.dropout.training

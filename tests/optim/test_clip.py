import math

import pytest
import torch
from torch import nn

from trainwright.optim import get_default_optimizer_params, gradient_clipper
from trainwright.optim.clip import gradient_norm


def with_gradients(*gradients: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(len(gradient))) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters


def group(parameter: nn.Parameter, max_norm: float, norm_type: float = 2.0, **settings: float) -> dict:
    return {"params": [parameter], "clip_grad_max_norm": max_norm, "clip_grad_norm_type": norm_type, **settings}


def test_groups_without_limits_and_small_gradients_stay():
    (parameter,) = with_gradients([3.0])
    assert gradient_clipper(torch.optim.SGD([parameter], lr=0.1)) is None
    assert gradient_clipper(torch.optim.SGD([{"params": [parameter], "clip_grad_max_norm": 1.0}], lr=0.1)) is None

    (parameter,) = with_gradients([0.3, -0.4])
    gradient_clipper(torch.optim.SGD([group(parameter, 1.0)], lr=0.1))()
    assert torch.equal(parameter.grad, torch.tensor([0.3, -0.4]))

    first, second = with_gradients([math.nan], [1.0])
    second.grad = None
    optimizer = torch.optim.SGD([group(first, 1.0), group(second, 1.0)], lr=0.1)
    assert math.isnan(gradient_clipper(optimizer)().item())


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0)])
def test_all_groups_are_clipped_by_their_common_norm(norm_type, norm):
    first, second = with_gradients([3.0], [0.0, 4.0])
    optimizer = torch.optim.SGD(
        [group(first, 1.0, norm_type, weight_decay=0.1), group(second, 1.0, norm_type, weight_decay=0.2)], lr=0.1
    )
    assert gradient_clipper(optimizer)().item() == pytest.approx(norm)
    # torch divides by norm + 1e-6.
    assert first.grad.tolist() == pytest.approx([3.0 / norm], rel=1e-5)
    assert second.grad.tolist() == pytest.approx([0.0, 4.0 / norm], rel=1e-5)


def test_settings_that_differ_are_clipped_apart_and_report_the_norm_of_all():
    first, second, free = with_gradients([3.0], [4.0], [12.0])
    optimizer = torch.optim.SGD([group(first, 1.0), group(second, 2.0), {"params": [free]}], lr=0.1)
    assert gradient_clipper(optimizer)().item() == pytest.approx(5.0)
    assert [p.grad.item() for p in (first, second, free)] == pytest.approx([1.0, 2.0, 12.0], rel=1e-5)


def test_the_default_groups_clip_a_real_model_like_torch_does():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    groups = get_default_optimizer_params(model, weight_decay_norm=0.0, clip_grad_max_norm=0.1, clip_grad_norm_type=2.0)
    clip = gradient_clipper(torch.optim.AdamW(groups, lr=0.1))
    model(torch.randn(16, 4)).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    total = torch.cat([gradient.flatten() for gradient in expected]).norm()
    clip()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * (0.1 / (total + 1e-6)))


@pytest.mark.parametrize("groups", ["clipped", "partly", "not"])
def test_the_norm_of_all_gradients_shows_what_any_of_them_holds(groups):
    first, second = with_gradients([3.0], [4.0])
    plain = {"clipped": [], "partly": [{"params": [second]}], "not": [{"params": [first, second]}]}[groups]
    asking = {"clipped": [group(first, 1.0), group(second, 1.0)], "partly": [group(first, 1.0)], "not": []}[groups]
    norm_of_all = gradient_norm(torch.optim.SGD([*asking, *plain], lr=0.1))
    assert norm_of_all().item() == pytest.approx(5.0)  # before clipping
    expected = {"clipped": [0.6, 0.8], "partly": [1.0, 4.0], "not": [3.0, 4.0]}[groups]
    assert [first.grad.item(), second.grad.item()] == pytest.approx(expected, rel=1e-5)
    second.grad.fill_(math.inf)
    assert not math.isfinite(norm_of_all().item())

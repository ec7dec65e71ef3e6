"""A probe shows what happens in a step, and changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainwright.inspect.step_probe import probed_step

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def unknown(place: int) -> int:
    return 0


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))


def test_weights_gradients_and_random_numbers_are_the_same_by_bits() -> None:
    found = []
    for is_probed in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        if is_probed:
            with probed_step(model, unknown) as facts:
                loss = F.cross_entropy(model(INPUTS), torch.arange(8) % 3)
                loss.backward()
                optimizer.step()
        else:
            loss = F.cross_entropy(model(INPUTS), torch.arange(8) % 3)
            loss.backward()
            optimizer.step()
        found.append([loss.detach(), torch.rand(3), *model.state_dict().values()])
        gradients = {name: float(torch.linalg.vector_norm(p.grad)) for name, p in model.named_parameters()}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert facts.gradient_norms == gradients
    assert facts.non_finite is None
    (losses,) = facts.sample_losses
    assert losses is not None
    assert sum(losses) / 8 == pytest.approx(loss.item(), rel=1e-5)


def test_a_loss_that_is_no_mean_over_samples_has_none() -> None:
    model = nn.Linear(6, 3)
    with probed_step(model, lambda place: 5) as facts:
        F.mse_loss(model(INPUTS), torch.ones(8, 3)).backward()
        model(INPUTS).sum().backward()
    assert facts.sample_losses == [None]


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x * self.scale - 1)


def test_the_first_operation_that_is_not_finite() -> None:
    model = nn.Sequential(nn.Identity(), Root(), nn.Linear(6, 3))
    stops: list[int] = []
    with probed_step(model, unknown, on_non_finite=lambda: stops.append(1)) as facts:
        model(torch.ones(2, 6)).sum().backward()
    assert facts.non_finite is not None
    assert facts.non_finite.operation == "aten.log.default"
    assert (facts.non_finite.module, facts.non_finite.phase, facts.non_finite.num_values) == ("1", "forward", 12)
    assert "test_step_probe.py" in facts.non_finite.place
    assert "in forward" in facts.non_finite.place
    assert stops == [1]


def test_a_gradient_that_is_not_finite() -> None:
    model = nn.Linear(6, 3)
    with probed_step(model, unknown) as facts:
        (model(INPUTS) * 0).square().sum(1).sqrt().sum().backward()
    assert facts.non_finite is not None
    assert facts.non_finite.phase == "backward or update"


def test_a_mask_of_infinity_is_no_fault() -> None:
    attention = nn.MultiheadAttention(6, 2, batch_first=True)
    mask = torch.full((4, 4), -torch.inf).triu(1)
    with probed_step(attention, unknown) as facts:
        x = INPUTS.reshape(2, 4, 6)
        attention(x, x, x, attn_mask=mask)[0].sum().backward()
        scores = (x @ x.transpose(1, 2)).masked_fill(mask < 0, -torch.inf)
        scores.softmax(-1).sum()
    assert facts.non_finite is None


def test_hooks_are_removed_after_an_error() -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(RuntimeError, match="shapes"), probed_step(model, unknown):
        model(torch.ones(2, 5))
    assert not model.weight._post_accumulate_grad_hooks
    assert not nn.modules.module._global_forward_pre_hooks

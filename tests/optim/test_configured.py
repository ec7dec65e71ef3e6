import math

import pytest
import torch
from torch import nn

from trainwright.config.errors import ConfigError
from trainwright.optim import (
    configure_constant_scheduler,
    configure_constant_scheduler_with_warmup,
    configure_cosine_scheduler_with_warmup,
    configure_cosine_with_hard_restarts_scheduler_with_warmup,
    configure_linear_scheduler_with_warmup,
    configure_polynomial_decay_scheduler_with_warmup,
)

W, N = 4, 20
RATES = (0.2, 0.03)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in RATES], lr=1.0)


def assert_follows(scheduler, decay, *, warmup: int = W) -> None:
    for t in range(N + 5):
        expected = [b * t / warmup if t < warmup else decay(t, b) for b in RATES]
        assert [group["lr"] for group in scheduler.optimizer.param_groups] == pytest.approx(
            expected, rel=1e-12, abs=1e-15
        )
        scheduler.optimizer.step()
        scheduler.step()


def progress(t: int) -> float:
    return min(1.0, (t - W) / (N - W))


def test_constant():
    assert_follows(configure_constant_scheduler(optimizer()), lambda t, b: b, warmup=0)


def test_constant_with_warmup():
    assert_follows(configure_constant_scheduler_with_warmup(optimizer(), W), lambda t, b: b)


def test_linear():
    assert_follows(configure_linear_scheduler_with_warmup(optimizer(), W, N), lambda t, b: b * (1 - progress(t)))


@pytest.mark.parametrize("cycles", [0.5, 1.5])
def test_cosine(cycles):
    assert_follows(
        configure_cosine_scheduler_with_warmup(optimizer(), W, N, num_cycles=cycles),
        lambda t, b: b * (1 + math.cos(2 * math.pi * cycles * progress(t))) / 2,
    )


def test_cosine_with_hard_restarts_starts_again_at_the_full_rate():
    def decay(t: int, b: float) -> float:
        return b * (1 + math.cos(math.pi * ((t - W) % 8) / 8)) / 2 if t < N else 0.0  # two cycles of 8 steps

    assert_follows(configure_cosine_with_hard_restarts_scheduler_with_warmup(optimizer(), W, N, num_cycles=2), decay)


def test_polynomial():
    assert_follows(
        configure_polynomial_decay_scheduler_with_warmup(optimizer(), W, N, lr_end=1e-3, power=2.0),
        lambda t, b: (b - 1e-3) * (1 - progress(t)) ** 2 + 1e-3,
    )


def test_a_warm_up_as_long_as_the_run_ends_at_zero_after_it():
    assert_follows(configure_linear_scheduler_with_warmup(optimizer(), N, N), lambda t, b: 0.0, warmup=N)


def test_faults_are_named():
    with pytest.raises(ConfigError, match=r"lr_end: got 0.05.*0.03"):
        configure_polynomial_decay_scheduler_with_warmup(optimizer(), W, N, lr_end=0.05)
    with pytest.raises(ConfigError, match="num_warmup_steps: got -1"):
        configure_constant_scheduler_with_warmup(optimizer(), -1)
    with pytest.raises(ConfigError, match="num_training_steps: got 0"):
        configure_linear_scheduler_with_warmup(optimizer(), 0, 0)

"""Schedules that warm up from zero in ``num_warmup_steps`` and then decay over the steps that are left.

Unlike the ``Warmup...LR`` curves the decay begins where the warm-up ends, at the optimizer's full rate.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer

from trainwright.config.errors import ConfigError
from trainwright.optim.formula import Formula, FormulaLR


def configure_constant_scheduler(optimizer: Optimizer) -> FormulaLR:
    """The optimizer's own rate, always."""
    return FormulaLR(optimizer, lambda step, base_lr: base_lr)


def configure_constant_scheduler_with_warmup(optimizer: Optimizer, num_warmup_steps: int) -> FormulaLR:
    """Warm-up, then the optimizer's own rate."""
    return FormulaLR(optimizer, _after_warmup(lambda step, base_lr: base_lr, num_warmup_steps))


def configure_linear_scheduler_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int
) -> FormulaLR:
    """Warm-up, then a straight line to 0 at ``num_training_steps``."""
    return _over_the_rest(optimizer, num_warmup_steps, num_training_steps, lambda left, base_lr: base_lr * left)


def configure_cosine_scheduler_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5
) -> FormulaLR:
    """Warm-up, then ``num_cycles`` waves of a cosine; half a wave ends at 0."""

    def decay(left: float, base_lr: float) -> float:
        return base_lr * (1 + math.cos(2 * math.pi * num_cycles * (1 - left))) / 2

    return _over_the_rest(optimizer, num_warmup_steps, num_training_steps, decay)


def configure_cosine_with_hard_restarts_scheduler_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1
) -> FormulaLR:
    """Warm-up, then ``num_cycles`` half cosines to 0, each of which starts at the full rate; 0 after the last."""

    def decay(left: float, base_lr: float) -> float:
        if left == 0:
            return 0.0
        return base_lr * (1 + math.cos(math.pi * (num_cycles * (1 - left) % 1))) / 2

    return _over_the_rest(optimizer, num_warmup_steps, num_training_steps, decay)


def configure_polynomial_decay_scheduler_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, lr_end: float = 1e-7, power: float = 1.0
) -> FormulaLR:
    """Warm-up, then a polynomial of degree ``power`` down to the rate ``lr_end``."""
    lowest = min(float(group["lr"]) for group in optimizer.param_groups)
    if lr_end >= lowest:
        raise ConfigError(f"lr_end: got {lr_end}; it must be below the optimizer's learning rate, {lowest}.")

    def decay(left: float, base_lr: float) -> float:
        return float((base_lr - lr_end) * left**power + lr_end)

    return _over_the_rest(optimizer, num_warmup_steps, num_training_steps, decay)


def _over_the_rest(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, decay: Callable[[float, float], float]
) -> FormulaLR:
    """``decay(left, base_lr)``, where ``left`` falls from 1 at the end of the warm-up to 0 at the end of training."""
    if num_training_steps < 1:
        raise ConfigError(f"num_training_steps: got {num_training_steps}; it must be a whole number >= 1.")

    def formula(step: int, base_lr: float) -> float:
        left = (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps)
        return decay(max(0.0, left), base_lr)

    return FormulaLR(optimizer, _after_warmup(formula, num_warmup_steps))


def _after_warmup(formula: Formula, num_warmup_steps: int) -> Formula:
    if num_warmup_steps < 0:
        raise ConfigError(f"num_warmup_steps: got {num_warmup_steps}; it must be a whole number >= 0.")
    return lambda step, base_lr: (
        base_lr * step / num_warmup_steps if step < num_warmup_steps else formula(step, base_lr)
    )

"""Schedules that warm up onto a decay curve.

With t optimizer steps taken, b the group's first rate, W ``warmup_iter``, N ``max_iter`` and f ``warmup_factor``:

* t < W, ``"linear"``: the straight line from b * f at 0 to decay(W) at W (linear warm-up as in Goyal et al. 2017,
  section 2.2); ``"constant"``: b * f.
* t >= W: decay(t). The curve is not shifted by the warm-up, so it ends at N whatever W is.

All of them take ``max_iter``, ``warmup_factor`` and ``warmup_iter``, so that a configuration can set these without
knowing which schedule it is. Curves that do not depend on the length of the run say so.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from torch.optim import Optimizer

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.optim.formula import Formula, FormulaLR

WARMUP_METHODS = ("linear", "constant")


def warmed_up(
    decay: Formula, max_iter: int, warmup_factor: float, warmup_iter: int, warmup_method: str, *faults: str
) -> Formula:
    """``decay`` with its first ``warmup_iter`` steps replaced by the warm-up; the caller's ``faults`` join ours."""
    found = [*faults]
    if max_iter < 1:
        found.append(f"max_iter: got {max_iter}; it must be a whole number >= 1.")
    if warmup_iter < 0:
        found.append(f"warmup_iter: got {warmup_iter}; it must be a whole number >= 0 (0 is no warm-up).")
    if warmup_factor < 0:
        found.append(f"warmup_factor: got {warmup_factor}; it must be >= 0.")
    if warmup_method not in WARMUP_METHODS:
        found.append(f"warmup_method: got {warmup_method!r}. {did_you_mean(str(warmup_method), WARMUP_METHODS)}")
    if found:
        raise ConfigError("\n".join(found))

    def linear(step: int, base_lr: float) -> float:
        if step >= warmup_iter:
            return decay(step, base_lr)
        start = base_lr * warmup_factor
        return start + (decay(warmup_iter, base_lr) - start) * step / warmup_iter

    def constant(step: int, base_lr: float) -> float:
        return decay(step, base_lr) if step >= warmup_iter else base_lr * warmup_factor

    return linear if warmup_method == "linear" else constant


class WarmupCosineLR(FormulaLR):
    """Half a cosine from b to b * ``alpha`` at N, and flat from there."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_iter: int,
        warmup_factor: float,
        warmup_iter: int,
        alpha: float = 0.0,
        warmup_method: str = "linear",
    ) -> None:
        def decay(step: int, base_lr: float) -> float:
            return base_lr * ((1 - alpha) * _half_cosine(min(step, max_iter) / max_iter) + alpha)

        super().__init__(optimizer, warmed_up(decay, max_iter, warmup_factor, warmup_iter, warmup_method))


class WarmupCosineAnnealingLR(FormulaLR):
    """Half a cosine from b to the rate ``eta_min`` at N; a longer run rises again along the same cosine."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_iter: int,
        warmup_factor: float,
        warmup_iter: int,
        eta_min: float = 0.0,
        warmup_method: str = "linear",
    ) -> None:
        def decay(step: int, base_lr: float) -> float:
            return eta_min + (base_lr - eta_min) * _half_cosine(step / max_iter)

        super().__init__(optimizer, warmed_up(decay, max_iter, warmup_factor, warmup_iter, warmup_method))


class WarmupStepLR(FormulaLR):
    """b, times ``gamma`` after every ``step_size`` steps. Does not depend on N."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_iter: int,
        warmup_factor: float,
        warmup_iter: int,
        step_size: int,
        gamma: float = 0.1,
        warmup_method: str = "linear",
    ) -> None:
        def decay(step: int, base_lr: float) -> float:
            return float(base_lr * gamma ** (step // step_size))

        faults = [] if step_size >= 1 else [f"step_size: got {step_size}; it must be a whole number >= 1."]
        super().__init__(optimizer, warmed_up(decay, max_iter, warmup_factor, warmup_iter, warmup_method, *faults))


class WarmupMultiStepLR(FormulaLR):
    """b, times ``gamma`` at each of the ``milestones`` (numbers of steps, increasing). Does not depend on N."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_iter: int,
        warmup_factor: float,
        warmup_iter: int,
        milestones: Sequence[int],
        gamma: float = 0.1,
        warmup_method: str = "linear",
    ) -> None:
        milestones = list(milestones)

        def decay(step: int, base_lr: float) -> float:
            return float(base_lr * gamma ** bisect_right(milestones, step))

        faults = []
        if milestones != sorted(milestones) or any(milestone != int(milestone) for milestone in milestones):
            faults.append(f"milestones: got {milestones}; they must be whole numbers of steps, in increasing order.")
        super().__init__(optimizer, warmed_up(decay, max_iter, warmup_factor, warmup_iter, warmup_method, *faults))


class WarmupExponentialLR(FormulaLR):
    """b, times ``gamma`` after every step. Does not depend on N."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_iter: int,
        warmup_factor: float,
        warmup_iter: int,
        gamma: float,
        warmup_method: str = "linear",
    ) -> None:
        def decay(step: int, base_lr: float) -> float:
            return float(base_lr * gamma**step)

        super().__init__(optimizer, warmed_up(decay, max_iter, warmup_factor, warmup_iter, warmup_method))


class WarmupPolynomialLR(FormulaLR):
    """From b to ``end_learning_rate`` at N, as a polynomial of degree ``power`` in the share of the run that is left.

    Flat from N on; with ``cycle`` the curve is instead stretched to the next multiple of N, so it rises again after
    each one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_iter: int,
        warmup_factor: float,
        warmup_iter: int,
        end_learning_rate: float = 1e-4,
        power: float = 1.0,
        cycle: bool = False,
        warmup_method: str = "linear",
    ) -> None:
        def decay(step: int, base_lr: float) -> float:
            length = max_iter * max(1, math.ceil(step / max_iter)) if cycle else max_iter
            left = 1 - min(step, length) / length
            return float((base_lr - end_learning_rate) * left**power + end_learning_rate)

        faults = [] if power > 0 else [f"power: got {power}; it must be > 0."]
        super().__init__(optimizer, warmed_up(decay, max_iter, warmup_factor, warmup_iter, warmup_method, *faults))


def _half_cosine(progress: float) -> float:
    """1 at progress 0, 0 at progress 1."""
    return (1 + math.cos(math.pi * progress)) / 2

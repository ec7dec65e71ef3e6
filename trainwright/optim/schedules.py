"""Learning-rate schedules with a warm-up.

The ``configure_*`` functions warm up from zero in ``num_warmup_steps`` and then decay over the steps that are left: the
decay begins where the warm-up ends, at the optimizer's full rate.

The ``Warmup...LR`` classes warm up onto a decay curve. With t optimizer steps taken, b the group's first rate,
W ``warmup_iter``, N ``max_iter`` and f ``warmup_factor``:

* t < W, ``"linear"``: the straight line from b * f at 0 to decay(W) at W (linear warm-up as in Goyal et al. 2017,
  section 2.2); ``"constant"``: b * f.
* t >= W: decay(t). The curve is not shifted by the warm-up, so it ends at N whatever W is.

They all take ``max_iter``, ``warmup_factor`` and ``warmup_iter``, so that a configuration can set these without
knowing which schedule it is. Curves that do not depend on the length of the run say so.
"""

import dis
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from trainwright.base.errors import ConfigError, did_you_mean

logger = logging.getLogger("trainwright.optim")

# (optimizer steps taken, the group's first learning rate) -> learning rate of the next step
Formula = Callable[[int, float], float]


def check_rates(optimizer: Optimizer) -> None:
    """Raise if an optimizer computes its learning rates itself: schedules change them, and the log shows them."""
    if any(group.get("lr", 0) is None for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} has no learning rate (lr=None). Pass it one; Adafactor of transformers then"
            " needs relative_step=False."
        )


class FormulaLR(LambdaLR):
    """``lr = formula(step, base_lr)`` in every group; a group whose first rate is 0 stays at 0.

    The formula is not part of the state: a scheduler that is built with other arguments and loads a state continues
    with its own formula. The state holds numbers and lists of numbers, even if the optimizer keeps its learning rates
    as tensors.
    """

    _of_formula: tuple[str, ...] = ()  # attributes with its arguments

    def __init__(self, optimizer: Optimizer, formula: Formula, name: str | None = None) -> None:
        self.name = name or type(self).__name__  # what the start of a run shows
        check_rates(optimizer)
        for group in optimizer.param_groups:
            # As a float, once: with a tensor each step would synchronize with the device.
            group["initial_lr"] = float(group.get("initial_lr", group["lr"]))
        super().__init__(optimizer, [_factor(formula, group["initial_lr"]) for group in optimizer.param_groups])

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {
            key: [float(rate) for rate in value] if isinstance(value, list) else value
            for key, value in state.items()
            if key not in ("lr_lambdas", "name", *self._of_formula)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "lr_lambdas": [None] * len(self.lr_lambdas)})


def _factor(formula: Formula, base_lr: float) -> Callable[[int], float]:
    if base_lr == 0:
        return lambda step: 0.0
    return lambda step: formula(step, base_lr) / base_lr


WARMUP_METHODS = ("linear", "constant")


def warmed_up(
    decay: Formula, max_iter: int, warmup_factor: float, warmup_iter: int, warmup_method: str, *faults: str
) -> Formula:
    """``decay`` with its first ``warmup_iter`` steps replaced by the warm-up; ``faults`` are raised with its own."""
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

    _of_formula = ("step_size", "gamma")

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
        self.step_size, self.gamma = step_size, gamma


class WarmupMultiStepLR(FormulaLR):
    """b, times ``gamma`` at each of the ``milestones`` (numbers of steps, increasing). Does not depend on N."""

    _of_formula = ("milestones", "gamma")

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
        self.milestones, self.gamma = milestones, gamma


class WarmupExponentialLR(FormulaLR):
    """b, times ``gamma`` after every step. Does not depend on N."""

    _of_formula = ("gamma",)

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
        self.gamma = gamma


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


def configure_constant_scheduler(optimizer: Optimizer) -> FormulaLR:
    """The optimizer's own rate, always."""
    return FormulaLR(optimizer, lambda step, base_lr: base_lr, "constant schedule")


def configure_constant_scheduler_with_warmup(optimizer: Optimizer, num_warmup_steps: int) -> FormulaLR:
    """Warm-up, then the optimizer's own rate."""
    formula = _after_warmup(lambda step, base_lr: base_lr, num_warmup_steps)
    return FormulaLR(optimizer, formula, "constant_with_warmup schedule")


def configure_linear_scheduler_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int
) -> FormulaLR:
    """Warm-up, then a straight line to 0 at ``num_training_steps``."""
    return _over_the_rest(
        optimizer, num_warmup_steps, num_training_steps, lambda left, base_lr: base_lr * left, "linear"
    )


def configure_cosine_scheduler_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5
) -> FormulaLR:
    """Warm-up, then ``num_cycles`` waves of a cosine; half a wave ends at 0."""

    def decay(left: float, base_lr: float) -> float:
        return base_lr * (1 + math.cos(2 * math.pi * num_cycles * (1 - left))) / 2

    return _over_the_rest(optimizer, num_warmup_steps, num_training_steps, decay, "cosine")


def configure_cosine_with_hard_restarts_scheduler_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1
) -> FormulaLR:
    """Warm-up, then ``num_cycles`` half cosines to 0, each of which starts at the full rate; 0 after the last."""

    def decay(left: float, base_lr: float) -> float:
        if left == 0:
            return 0.0
        return base_lr * (1 + math.cos(math.pi * (num_cycles * (1 - left) % 1))) / 2

    return _over_the_rest(optimizer, num_warmup_steps, num_training_steps, decay, "cosine_with_restarts")


def configure_polynomial_decay_scheduler_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, lr_end: float = 1e-7, power: float = 1.0
) -> FormulaLR:
    """Warm-up, then a polynomial of degree ``power`` down to the rate ``lr_end``."""
    # With ``initial_lr`` the optimizer has had a schedule before, which has left another rate.
    lowest = min(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
    if lr_end >= lowest:
        raise ConfigError(f"lr_end: got {lr_end}; it must be below the optimizer's learning rate, {lowest}.")

    def decay(left: float, base_lr: float) -> float:
        return float((base_lr - lr_end) * left**power + lr_end)

    return _over_the_rest(optimizer, num_warmup_steps, num_training_steps, decay, "polynomial")


def _over_the_rest(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    decay: Callable[[float, float], float],
    name: str,
) -> FormulaLR:
    """``decay(left, base_lr)``, where ``left`` falls from 1 at the end of the warm-up to 0 at the end of training."""
    if num_training_steps < 1:
        raise ConfigError(f"num_training_steps: got {num_training_steps}; it must be a whole number >= 1.")

    length = max(1, num_training_steps - num_warmup_steps)

    def formula(step: int, base_lr: float) -> float:
        return decay((num_training_steps - step) / length if step < num_training_steps else 0.0, base_lr)

    return FormulaLR(optimizer, _after_warmup(formula, num_warmup_steps), f"{name} schedule")


def _after_warmup(formula: Formula, num_warmup_steps: int) -> Formula:
    if num_warmup_steps < 0:
        raise ConfigError(f"num_warmup_steps: got {num_warmup_steps}; it must be a whole number >= 0.")
    return lambda step, base_lr: (
        base_lr * step / num_warmup_steps if step < num_warmup_steps else formula(step, base_lr)
    )


def _warn_of_vanishing(schedule: Any, planned: int, often: str, epochs: float) -> None:
    """Log that an exponential decay has ended before half of the run: its numbers are probably of epochs."""
    kinds = lr_scheduler.StepLR, lr_scheduler.ExponentialLR, WarmupStepLR, WarmupExponentialLR
    if type(schedule) not in kinds or not 0 < schedule.gamma < 1:
        return
    name, size = ("step_size", schedule.step_size) if hasattr(schedule, "step_size") else ("gamma", 1)
    number = math.ceil(6 / -math.log10(schedule.gamma)) * size
    if number < planned / 2:
        is_epochs = name == "step_size" and size <= epochs <= planned / _MANY
        logger.warning(
            "%s: this run steps it %d times (%s), and after %d of them the learning rate is below a millionth of the"
            " first. Set its %s for steps of this kind.%s",
            type(schedule).__name__, planned, often, number, name,
            f" For {size} of {epochs:g} epochs write step_size={round(size * planned / epochs)}." if is_epochs else "",
        )  # fmt: skip


_MANY = 10  # steps of an epoch: with fewer, a number may as well be one of steps


def _warn_of_milestones(schedule: Any, planned: int, often: str, epochs: float, *, takes_shares: bool) -> None:
    """Log that the last milestone comes within as many steps as the run has epochs: they are probably epochs."""
    if type(schedule) not in (lr_scheduler.MultiStepLR, WarmupMultiStepLR) or not 0 < schedule.gamma < 1:
        return
    milestones = sorted(schedule.milestones)
    if milestones and milestones[0] < epochs <= planned / _MANY and milestones[-1] <= epochs:
        within = [one for one in milestones if one < epochs]
        logger.warning(
            "%s: got milestones=%s, and this run steps it %d times (%s). For epoch%s %s of %g write milestones=%s.",
            type(schedule).__name__, milestones, planned, often, "s" * (len(within) > 1),
            " and ".join(", ".join(map(str, within)).rsplit(", ", 1)), epochs,
            [round(one / epochs, 4) if takes_shares else round(one * planned / epochs) for one in within],
        )  # fmt: skip


_PLACES = 64  # of a run, at which a schedule is computed
_LEAST = 1e-3  # of the highest rate: a curve over iterations, such as one over their root, stays above it


def _warn_of_rates(schedule: Any, planned: int, often: str, epochs: float) -> bool:
    """Log that a function or a polynomial is near 0 for most of the run, or that a function returns rates."""
    rates, kind = _rates_of(schedule, planned), type(schedule).__name__
    if planned < 2 * _MANY or not (highest := max(rates, default=0.0)) > 0:
        return False
    low = sum(rate < _LEAST * highest for rate in rates[rates.index(highest) :]) / len(rates)  # it may start late
    if low > 0.5:
        steps = round(planned / epochs) if 0 < epochs <= planned / _MANY else 0
        if kind == "LambdaLR":
            fix = "its function gets the number of such a step, not of an epoch."
            fix += f" For epochs write step // {steps} in place of step." if steps else ""
        else:
            fix, end = "total_iters is a number of such steps.", schedule.total_iters
            if steps and end <= epochs:
                fix += f" For {end} of {epochs:g} epochs write total_iters={end * steps}."
        logger.warning(
            "%s: in %.0f %% of the %d steps of this run (%s) the learning rate is below a thousandth of its peak: %s",
            kind, 100 * low, planned, often, fix,
        )  # fmt: skip
        return True
    if kind != "LambdaLR":
        return False
    base = max(map(float, schedule.base_lrs))
    factor = highest / base
    is_warm_up = rates[-1] == highest > rates[-2]  # longer than the run
    is_rate = factor < 0.05 and (highest < 1e-6 or 0.2 < factor / base < 5)  # with lr=1.0 a factor may be a rate
    is_rate &= not is_warm_up
    if is_rate:
        logger.warning(
            "LambdaLR: its function returns a factor of lr, not the rate. It is at most %.3g, and with lr=%.3g the"
            " learning rate at most %.3g.", factor, base, highest,
        )  # fmt: skip
    return is_rate


def _rates_of(schedule: Any, planned: int) -> list[float]:
    """Rates at some steps of a run, of a schedule by a function or one that ends at 0; empty: they are unknown."""
    places = [planned * number // _PLACES for number in range(_PLACES)]
    ends_at_zero = type(schedule) is lr_scheduler.PolynomialLR
    ends_at_zero |= type(schedule) is lr_scheduler.LinearLR and schedule.end_factor == 0
    if ends_at_zero:
        return [float(step < schedule.total_iters) for step in places]
    if type(schedule) is LambdaLR and all(map(_only_computes, schedule.lr_lambdas)):
        each = [*zip(schedule.lr_lambdas, map(float, schedule.base_lrs), strict=False)]
        with suppress(Exception):  # the function may know fewer steps
            return [max(float(function(step)) * base for function, base in each) for step in places]
    return []


_PURE = {"math", "cos", "sin", "pi", "exp", "log", "sqrt", "pow", "min", "max", "float", "int", "round", "abs", "bool"}


def _only_computes(function: Any) -> bool:
    """Whether a further call of a function changes nothing, as its code shows: it may count calls, or draw numbers."""
    function = getattr(function, "func", function)  # of a partial
    code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or not all(name in _PURE or isinstance(known.get(name), int | float) for name in code.co_names):
        return False
    stores = {"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR"}
    is_pure = all(step.opname not in stores for step in dis.get_instructions(code))
    return is_pure and all(isinstance(cell.cell_contents, int | float) for cell in function.__closure__ or ())


def check_cycle(
    schedule: Any, planned: int, often: str, fix: str, *, epochs: float, takes_shares: bool = False
) -> bool:
    """Compare the length of a schedule with that of the run: of a decay, a cosine, or a OneCycleLR, which ends.

    Returns whether it has logged what a step of the schedule is.

    Args:
        planned: how many times it is stepped until the run ends, with the steps it has made. ``often``: when.
        fix: what a message says to do.
        epochs: those that set the length of the run; 0: a number of steps does, or it may end early.
        takes_shares: whether milestones may be shares of the run.
    """
    _warn_of_vanishing(schedule, planned, often, epochs)
    _warn_of_milestones(schedule, planned, often, epochs, takes_shares=takes_shares)
    # A length that leaves out the last batch of each epoch ends almost at the lowest rate.
    if type(schedule) is lr_scheduler.CosineAnnealingLR and schedule.T_max < 0.9 * planned:
        is_epochs = schedule.T_max == epochs <= planned / _MANY
        logger.log(
            logging.WARNING if planned < 2 * schedule.T_max or is_epochs else logging.INFO,  # waves may be intended
            "CosineAnnealingLR: got T_max=%s, but this run steps it %d times (%s), so the learning rate rises again"
            " after %s of them. Set T_max=%d. For restarts use CosineAnnealingWarmRestarts.",
            schedule.T_max, planned, often, schedule.T_max, planned,
        )  # fmt: skip
    if not isinstance(schedule, OneCycleLR):
        return _warn_of_rates(schedule, planned, often, epochs)
    length = schedule.total_steps
    if length < planned:
        raise ConfigError(
            f"OneCycleLR: got total_steps={length}, but this run steps it {planned} times ({often}). {fix}."
        )
    if length > planned:
        logger.warning(
            "OneCycleLR: got total_steps=%d, but this run steps it only %d times (%s), so the learning rate does not"
            " complete its cycle. %s.", length, planned, often, fix,
        )  # fmt: skip
    return False


# The attribute with the step of the first change, or of the lowest rate. Others have a default, or no end.
_LENGTHS: dict[type, str] = {
    lr_scheduler.StepLR: "step_size",
    lr_scheduler.MultiStepLR: "milestones",
    WarmupStepLR: "step_size",
    WarmupMultiStepLR: "milestones",
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.CosineAnnealingWarmRestarts: "T_0",
}


def warn_of_unit(schedule: object, planned: int, often: str, num_batches: int, epoch: int) -> None:
    """Warn of a schedule that is as long as a number of batches, and that the run steps only ``planned`` times.

    A length below that of an ``epoch``, or above ``num_batches``, may be that of a longer run, and is only logged.
    """
    name = _LENGTHS.get(type(schedule), "")
    length: Any = getattr(schedule, name, 0)
    shown, first = (sorted(length), min(length, default=0)) if name == "milestones" else (length, length)
    if 0 < planned < first <= num_batches and first >= epoch:
        logger.warning(
            "%s: got %s=%s, but this run steps it only %d times (%s), so the learning rate never reaches that step."
            " Count such steps, or set lr_scheduling_steps=1 to count batches.",
            type(schedule).__name__, name, shown, planned, often,
        )  # fmt: skip
    elif 0 < planned < first:
        logger.info(
            "%s: got %s=%s, which this run does not reach: it steps it %d times (%s).",
            type(schedule).__name__, name, shown, planned, often,
        )  # fmt: skip


def extend_schedule(schedule: LRScheduler, longer: Callable[[Optimizer], Any]) -> None:
    """Make ``schedule`` that of ``longer(optimizer)``, at its position, as after a resume of a longer run.

    The optimizer keeps its current rates until the next step of the schedule.
    """
    groups, state = schedule.optimizer.param_groups, schedule.state_dict()
    rates = [group["lr"] for group in groups]
    vars(schedule).update(vars(longer(schedule.optimizer)))
    schedule.load_state_dict(state)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate

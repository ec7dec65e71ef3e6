import json
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR, PolynomialLR

from trainwright.base.errors import ConfigError
from trainwright.optim import (
    WarmupCosineAnnealingLR,
    WarmupCosineLR,
    WarmupExponentialLR,
    WarmupMultiStepLR,
    WarmupPolynomialLR,
    WarmupStepLR,
    configure_constant_scheduler,
    configure_constant_scheduler_with_warmup,
    configure_cosine_scheduler_with_warmup,
    configure_cosine_with_hard_restarts_scheduler_with_warmup,
    configure_linear_scheduler_with_warmup,
    configure_polynomial_decay_scheduler_with_warmup,
)
from trainwright.optim.schedules import check_cycle

N = 20
RATES = (0.1, 0.004)  # two groups


def optimizer(*rates: float, tensor: bool = False) -> torch.optim.Optimizer:
    make = torch.tensor if tensor else float
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": make(rate)} for rate in rates or RATES], lr=1.0
    )


def curve(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int = 30) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        rates.append([float(group["lr"]) for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def polynomial(t, b, end=1e-4, power=1.0):
    return (b - end) * (1 - min(t, N) / N) ** power + end


def cycling(t, b):
    length = N if t == 0 else N * math.ceil(t / N)
    return (b - 1e-3) * (1 - t / length) ** 2 + 1e-3


# (class, its own arguments, the decay as the documents give it)
CURVES = {
    "cosine": (
        WarmupCosineLR,
        {"alpha": 0.01},
        lambda t, b: b * (0.99 * (1 + math.cos(math.pi * min(t, N) / N)) / 2 + 0.01),
    ),
    "cosine to zero": (WarmupCosineLR, {}, lambda t, b: b * (1 + math.cos(math.pi * min(t, N) / N)) / 2),
    "annealing": (
        WarmupCosineAnnealingLR,
        {"eta_min": 1e-3},
        lambda t, b: 1e-3 + (b - 1e-3) * (1 + math.cos(math.pi * t / N)) / 2,
    ),
    "step": (WarmupStepLR, {"step_size": 7}, lambda t, b: b * 0.1 ** (t // 7)),
    "milestones": (
        WarmupMultiStepLR,
        {"milestones": [3, 10, 18], "gamma": 0.5},
        lambda t, b: b * 0.5 ** sum(m <= t for m in (3, 10, 18)),
    ),
    "exponential": (WarmupExponentialLR, {"gamma": 0.9}, lambda t, b: b * 0.9**t),
    "polynomial": (WarmupPolynomialLR, {}, polynomial),
    "polynomial cycle": (WarmupPolynomialLR, {"end_learning_rate": 1e-3, "power": 2.0, "cycle": True}, cycling),
}
every_curve = pytest.mark.parametrize("name", CURVES)


@every_curve
@pytest.mark.parametrize("warmup_iter", [0, 1, 6])
@pytest.mark.parametrize("method", ["linear", "constant"])
def test_every_step_of_every_group_follows_the_formula(name, warmup_iter, method):
    cls, arguments, decay = CURVES[name]
    factor = 0.25

    def expected(t: int, b: float) -> float:
        if t >= warmup_iter:
            return decay(t, b)
        if method == "constant":
            return b * factor
        return b * factor + (decay(warmup_iter, b) - b * factor) * t / warmup_iter

    scheduler = cls(optimizer(), N, factor, warmup_iter, warmup_method=method, **arguments)
    # Rates are a base rate times a factor: two roundings more than the formula.
    for t, rates in enumerate(curve(scheduler)):
        assert rates == pytest.approx([expected(t, b) for b in RATES], rel=1e-12)


@every_curve
def test_a_schedule_resumed_from_its_state_goes_on_as_if_never_stopped(name):
    cls, arguments, _ = CURVES[name]
    uninterrupted = curve(cls(optimizer(), N, 0.1, 5, **arguments))

    first = cls(optimizer(), N, 0.1, 5, **arguments)
    curve(first, 8)
    state = json.loads(
        json.dumps({"scheduler": first.state_dict(), "optimizer": first.optimizer.state_dict()["param_groups"]})
    )
    second = cls(optimizer(), N, 0.1, 5, **arguments)
    for group, saved in zip(second.optimizer.param_groups, state["optimizer"], strict=True):
        group["lr"] = saved["lr"]
    second.load_state_dict(state["scheduler"])
    assert second.get_last_lr() == first.get_last_lr()
    assert curve(second, 22) == uninterrupted[8:]


def test_a_resumed_run_may_be_made_longer():
    first = WarmupCosineLR(optimizer(0.1), N, 0.1, 0)
    curve(first, 10)
    longer = WarmupCosineLR(optimizer(0.1), 2 * N, 0.1, 0)
    longer.load_state_dict(first.state_dict())
    longer.optimizer.step()
    longer.step()
    assert longer.get_last_lr() == pytest.approx([0.1 * (1 + math.cos(math.pi * 11 / 40)) / 2])


def test_rates_that_are_tensors_are_changed_in_place_and_saved_as_numbers():
    scheduler = WarmupPolynomialLR(optimizer(0.1, tensor=True), N, 0.5, 4)
    rate = scheduler.optimizer.param_groups[0]["lr"]
    plain = WarmupPolynomialLR(optimizer(0.1), N, 0.5, 4)
    # float32 against float64
    torch.testing.assert_close(torch.tensor(curve(scheduler, 9)), torch.tensor(curve(plain, 9)), rtol=1e-6, atol=0)
    assert scheduler.optimizer.param_groups[0]["lr"] is rate
    numbers = [
        number
        for value in scheduler.state_dict().values()
        for number in (value if isinstance(value, list) else [value])
    ]
    assert {type(number) for number in numbers} <= {int, float, bool}


def test_all_faults_of_a_schedule_are_said_at_once():
    with pytest.raises(
        ConfigError, match=r"(?s)milestones.*max_iter: got 0.*warmup_iter: got -1.*Did you mean 'linear'"
    ):
        WarmupMultiStepLR(optimizer(), 0, 0.1, -1, milestones=[5, 3], warmup_method="liner")


@pytest.mark.parametrize(
    ("cls", "arguments", "fault"),
    [
        (WarmupStepLR, {"step_size": 0}, "step_size: got 0"),
        (WarmupPolynomialLR, {"power": 0.0}, "power: got 0.0"),
        (WarmupMultiStepLR, {"milestones": [0.5]}, "milestones: got"),
        (WarmupCosineLR, {"warmup_factor": -1.0}, "warmup_factor: got -1"),
        (WarmupCosineLR, {"warmup_method": None}, "warmup_method: got None"),
    ],
)
def test_a_setting_out_of_range_is_named(cls, arguments, fault):
    with pytest.raises(ConfigError, match=fault):
        cls(optimizer(), **{"max_iter": N, "warmup_factor": 0.1, "warmup_iter": 2, **arguments})


W = 4


def two_groups() -> torch.optim.Optimizer:
    return optimizer(0.2, 0.03)


def assert_follows(scheduler, decay, *, warmup: int = W) -> None:
    for t, rates in enumerate(curve(scheduler, N + 5)):
        expected = [b * t / warmup if t < warmup else decay(t, b) for b in (0.2, 0.03)]
        assert rates == pytest.approx(expected, rel=1e-12, abs=1e-15)


def progress(t: int) -> float:
    return min(1.0, (t - W) / (N - W))


def test_constant_and_linear():
    assert_follows(configure_constant_scheduler(two_groups()), lambda t, b: b, warmup=0)

    assert_follows(configure_constant_scheduler_with_warmup(two_groups(), W), lambda t, b: b)

    assert_follows(configure_linear_scheduler_with_warmup(two_groups(), W, N), lambda t, b: b * (1 - progress(t)))


@pytest.mark.parametrize("cycles", [0.5, 1.5])
def test_cosine(cycles):
    assert_follows(
        configure_cosine_scheduler_with_warmup(two_groups(), W, N, num_cycles=cycles),
        lambda t, b: b * (1 + math.cos(2 * math.pi * cycles * progress(t))) / 2,
    )


def test_cosine_and_polynomial_restart_and_end():
    def decay(t: int, b: float) -> float:
        return b * (1 + math.cos(math.pi * ((t - W) % 8) / 8)) / 2 if t < N else 0.0  # two cycles of 8 steps

    assert_follows(configure_cosine_with_hard_restarts_scheduler_with_warmup(two_groups(), W, N, num_cycles=2), decay)

    shared = two_groups()
    for _ in range(2):
        schedule = configure_polynomial_decay_scheduler_with_warmup(shared, W, N, lr_end=1e-3, power=2.0)
        assert_follows(schedule, lambda t, b: (b - 1e-3) * (1 - progress(t)) ** 2 + 1e-3)

    assert_follows(configure_linear_scheduler_with_warmup(two_groups(), N, N), lambda t, b: 0.0, warmup=N)


def test_faults_are_named():
    with pytest.raises(ConfigError, match=r"lr_end: got 0.05.*0.03"):
        configure_polynomial_decay_scheduler_with_warmup(two_groups(), W, N, lr_end=0.05)
    with pytest.raises(ConfigError, match="num_warmup_steps: got -1"):
        configure_constant_scheduler_with_warmup(two_groups(), -1)
    with pytest.raises(ConfigError, match="num_training_steps: got 0"):
        configure_linear_scheduler_with_warmup(two_groups(), 0, 0)


def test_the_arguments_of_a_curve_are_no_part_of_the_state():
    state = WarmupMultiStepLR(optimizer(), N, 0.1, 0, [5]).state_dict()
    assert not {"milestones", "gamma", "step_size"} & state.keys()


@pytest.mark.parametrize(
    ("schedule", "epochs", "takes_shares", "text"),
    [
        (lambda o: WarmupMultiStepLR(o, 470, 0.1, 0, [6, 8]), 10, True, "6 and 8 of 10 write milestones=[0.6, 0.8]."),
        (lambda o: WarmupMultiStepLR(o, 470, 0.1, 0, [6, 8, 10]), 10, False, "of 10 write milestones=[282, 376]."),
        (lambda o: MultiStepLR(o, [3]), 10, True, "For epoch 3 of 10 write milestones=[0.3]."),
        (lambda o: CosineAnnealingLR(o, 10), 10, True, "Set T_max=470. For restarts use CosineAnnealingWarmRestarts."),
        (lambda o: CosineAnnealingLR(o, 47), 10, True, None),  # one wave in an epoch
        (lambda o: WarmupStepLR(o, 470, 0.1, 0, 3), 10, True, "For 3 of 10 epochs write step_size=141."),
        (lambda o: WarmupStepLR(o, 470, 0.1, 0, 3), 0, True, "Set its step_size for steps of this kind."),
        (lambda o: WarmupExponentialLR(o, 470, 0.1, 0, 0.9), 10, True, "Set its gamma for steps of this kind."),
        (lambda o: WarmupMultiStepLR(o, 470, 0.1, 0, [6, 8]), 0, True, None),  # of iterations
        (lambda o: WarmupMultiStepLR(o, 470, 0.1, 0, [6, 8]), 60, True, None),  # an epoch has eight
        (lambda o: WarmupMultiStepLR(o, 470, 0.1, 0, [6, 80]), 10, True, None),
        (lambda o: WarmupMultiStepLR(o, 470, 0.1, 0, [2, 4], gamma=2.0), 10, True, None),  # a warm-up
        (lambda o: WarmupMultiStepLR(o, 470, 0.1, 0, []), 10, True, None),
        (lambda o: WarmupStepLR(o, 470, 0.1, 0, 3, gamma=0.99), 10, True, None),
        (lambda o: WarmupExponentialLR(o, 470, 0.1, 0, 0.99), 10, True, None),
    ],
)  # fmt: skip
def test_numbers_that_are_probably_of_epochs_are_a_warning(schedule, epochs, takes_shares, text, caplog):
    check_cycle(schedule(optimizer()), 470, "after each iteration", "", epochs=epochs, takes_shares=takes_shares)
    if text is None:
        assert not caplog.records
    else:
        (message,) = caplog.messages
        assert message.endswith(text)


@pytest.mark.parametrize(
    ("schedule", "epochs", "text"),
    [
        (lambda o: LambdaLR(o, lambda epoch: 0.95**epoch), 40, "For epochs write step // 125 in place of step."),
        (lambda o: LambdaLR(o, lambda epoch: 0.95**epoch), 0, "gets the number of such a step, not of an epoch."),
        (lambda o: LambdaLR(o, lambda epoch: max(0, 1 - epoch / 40)), 40, "step // 125 in place of step."),
        (lambda o: LambdaLR(o, partial(lambda t, end: max(0, 1 - t / end), end=40)), 40, "in place of step."),
        (lambda o: PolynomialLR(o, total_iters=40), 40, "For 40 of 40 epochs write total_iters=5000."),
        (lambda o: PolynomialLR(o), 0, "total_iters is a number of such steps."),
        (lambda o: LambdaLR(o, lambda it: 0.04 * min(1, it / 500)), 40, "with lr=0.1 the learning rate at most 0.004."),
        (lambda o: LambdaLR(o, lambda it: 1e-6), 0, "with lr=0.1 the learning rate at most 1e-07."),
        (lambda o: LambdaLR(o, lambda it: 0.95 ** (it // 125)), 40, None),
        (lambda o: LambdaLR(o, lambda it: (1 + math.cos(math.pi * it / 5000)) / 2), 40, None),
        (lambda o: LambdaLR(o, lambda it: (1 + it) ** -0.5), 0, None),
        (lambda o: LambdaLR(o, lambda it: min(1, it / 500)), 40, None),
        (lambda o: LambdaLR(o, lambda it: 512**-0.5 * min((it + 1) ** -0.5, (it + 1) * 4000**-1.5)), 0, None),
        (lambda o: PolynomialLR(o, total_iters=5000), 40, None),
        (lambda o: LambdaLR(o, lambda it: [1.0, 0.5][it]), 40, None),  # an error is not ours
    ],
)  # fmt: skip
def test_a_function_of_epochs_or_of_rates_is_a_warning(schedule, epochs, text, caplog):
    has_said = check_cycle(schedule(optimizer(0.1)), 5000, "after each iteration", "", epochs=epochs)
    assert has_said == (text is not None)
    assert [message.endswith(text) for message in caplog.messages] == [True] * has_said


def test_a_function_of_which_each_call_counts_is_not_called_ahead(caplog):
    factors = iter([0.5, 0.25])
    schedule = LambdaLR(optimizer(0.1), lambda step: next(factors))
    assert not check_cycle(schedule, 5000, "after each iteration", "", epochs=40)
    assert next(factors) == 0.25


def test_a_function_that_draws_or_calls_others_is_not_called_ahead():
    calls = []

    def helper(step):
        calls.append(step)
        return 1e-6

    for function in (lambda step: helper(step), lambda step: 1e-6 * float(torch.rand(()))):
        schedule, drawn = LambdaLR(optimizer(0.1), function), torch.get_rng_state()
        before = len(calls)
        assert not check_cycle(schedule, 5000, "after each iteration", "", epochs=40)
        assert len(calls) == before
        assert torch.equal(torch.get_rng_state(), drawn)


def test_factors_of_a_rate_of_one_may_be_rates(caplog):
    noam = LambdaLR(optimizer(1.0), lambda it: 512**-0.5 * min((it + 1) ** -0.5, (it + 1) * 4000**-1.5))
    assert not check_cycle(noam, 5000, "after each iteration", "", epochs=40)
    assert not caplog.messages

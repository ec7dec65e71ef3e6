"""torch's optimizers in a program: their arithmetic, and states and groups that change between steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.graph.conftest import (
    Event,
    Run,
    Schedule,
    Small,
    adamw,
    both,
    captures,
    refusals,
)

Optimizer = torch.optim.Optimizer


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def plain(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=False)


def two_groups(parameters: Any) -> Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.1}], lr=0.01, fused=True)


def swap(owner: Any, one: Any, other: Any) -> None:
    owner[one], owner[other] = owner[other], owner[one]


def new_dictionary(_: Any, optimizer: Any) -> None:
    optimizer.state = type(optimizer.state)(dict)


def swapped_inside(model: Any, optimizer: Any) -> None:
    swap(optimizer.state, model.first.weight, model.second.weight)


def other_owners(model: Any, optimizer: Any) -> None:
    """The same states in the same order, of parameters that have changed places."""
    first, second = model.first.weight, model.second.weight
    states = {{first: second, second: first}.get(p, p): state for p, state in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(states)


STATES: dict[str, Callable[[Any, Any], Any]] = {
    "cleared": lambda _, optimizer: optimizer.state.clear(),
    "one-deleted": lambda model, optimizer: optimizer.state.pop(model.first.weight),
    "another-dictionary": new_dictionary,
    "swapped": swapped_inside,
    "of-other-owners": other_owners,
}


@pytest.mark.parametrize("optimizer", [adamw, sgd, plain], ids=["adamw", "sgd", "not fused"])
@pytest.mark.parametrize("change", STATES)
@pytest.mark.exhaustive(every=8)
def test_states_that_are_others_are_those_of_the_next_step(
    change: str, optimizer: Callable[[Any], Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    if change == "one-deleted" and optimizer is sgd:
        pytest.skip("torch's fused SGD takes all momenta or none")
    eager, graph = both(STATES[change], optimizer=optimizer)
    theirs, ours = eager.optimizer.state_dict()["state"], graph.optimizer.state_dict()["state"]
    for key, state in theirs.items():
        assert all(torch.allclose(ours[key][name], value, rtol=1e-3, atol=1e-4) for name, value in state.items())
    assert len(captures(caplog)) == 1  # the program works on those that torch has made
    assert not refusals(caplog)


def test_a_reset_within_a_window_and_again_later() -> None:
    at = dict.fromkeys((10, 11, 17), lambda trainer: trainer.optimizer.state.clear())
    both(accumulation=3, hooks=lambda optimizer: [Event(at)])
    both(hooks=lambda optimizer: [Event(at)])


def test_states_of_other_strides(caplog: pytest.LogCaptureFixture) -> None:
    def change(model: Any, optimizer: Any) -> None:
        state = optimizer.state[model.first.weight]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].mul(0.5).t().contiguous().t()

    both(change, optimizer=plain)
    assert len(captures(caplog)) == 2


def test_parameters_that_change_groups(caplog: pytest.LogCaptureFixture) -> None:
    def change(_: Any, optimizer: Any) -> None:
        first, second = (group["params"] for group in optimizer.param_groups)
        first[0], second[1] = second[1], first[0]

    both(change, optimizer=two_groups)
    assert len(captures(caplog)) == 2


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.exhaustive(every=10)
def test_the_steps_of_torchs_optimizers_can_be_in_a_program(name: str, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"optimizer": OPTIMIZERS[name], "hooks": lambda optimizer: [Schedule(optimizer)]}
    eager, graph = Run(None, updates=60, **settings), Run("aot_eager", updates=60, **settings)
    torch.testing.assert_close(graph.values(), eager.values(), rtol=1e-5, atol=1e-5)
    theirs, ours = eager.optimizer.state_dict(), graph.optimizer.state_dict()
    assert [*ours["state"]] == [*theirs["state"]]
    for left, right in zip(ours["state"].values(), theirs["state"].values(), strict=True):
        assert [*left] == [*right]
        assert all(a is b is None or a.dtype == b.dtype for a, b in zip(left.values(), right.values(), strict=True))
    assert ours["param_groups"] == theirs["param_groups"]
    assert len(captures(caplog)) == 1


COUPLED = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COUPLED)
def test_the_decay_of_weights_in_a_compiled_program(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Inductor lost its factor where the gradient is a matrix product."""
    settings: dict[str, Any] = {"net": Small, "optimizer": COUPLED[name], "updates": 20}
    eager, graph = Run(None, **settings), Run("inductor", **settings)
    assert len(captures(caplog)) == 1
    torch.testing.assert_close(graph.values(), eager.values(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(graph.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

"""Each step is a program or eager: what changes between steps has the effect that it has on eager steps."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.conftest import (
    Event,
    Run,
    Small,
    batches,
    both,
    captures,
    losses,
    refusals,
    train_by_trainer,
)
from trainwright.hooks import CallbackHook

# What is put around a step.


def lowered(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-0.2, 0.2)


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.0)


def own_gradient(model: Any, _: Any) -> None:
    model.first.weight.grad = torch.ones(6, 6)


Change = Callable[[Any, Any], Any]
# What changes, the number of programs, and why it ends them or is behind the second one.
CHANGES: dict[str, tuple[Change, str, str]] = {
    "hook of a tensor": (
        lambda model, _: model.first.weight.register_hook(lambda gradient: gradient * 0),
        "a parameter has a",
        "eager",
    ),
    "hook of a gradient": (
        lambda model, _: model.second.bias.register_post_accumulate_grad_hook(halve),
        "a parameter has a hook on its gradient",
        "eager",
    ),
    "before a step": (lambda _, optimizer: optimizer.register_step_pre_hook(lowered), "which has hooks.", "outside"),
    "after a step": (lambda _, optimizer: optimizer.register_step_post_hook(lowered), "which has hooks.", "outside"),
    "another step": (
        lambda _, optimizer: setattr(optimizer, "step", lambda *a: None),
        "which has been replaced.",
        "outside",
    ),
    "a gradient": (own_gradient, "", "program"),
}


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_put_around_a_later_step(name: str, accumulation: int, caplog: pytest.LogCaptureFixture) -> None:
    """A hook on a gradient ends the programs, one on the step leaves it outside, a gradient is added to."""
    change, why, then = CHANGES[name]
    both(change, accumulation=accumulation)
    assert len(captures(caplog)) == (2 if then == "outside" else 1)
    assert then != "outside" or captures(caplog)[1].endswith(why)
    assert len(refusals(caplog)) == (then == "eager")
    assert then != "eager" or why in refusals(caplog)[0]


def test_a_hook_on_a_parameter_from_the_beginning(caplog: pytest.LogCaptureFixture) -> None:
    def net() -> nn.Module:
        model = Small()
        model.first.weight.register_hook(lambda gradient: gradient * 0)
        return model

    _, graph = both(net=net)
    assert not captures(caplog)
    assert "a hook on its gradient" in refusals(caplog)[0]
    assert torch.equal(graph.model.first.weight * 0, torch.zeros(6, 6))


def slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A making of programs that takes a second more, of no processor."""
    from trainwright.graph import programs

    seconds = [0.0]
    clock = time.perf_counter

    def make(*arguments: Any, **settings: Any) -> Any:
        seconds[0] += 1000
        return capture(*arguments, **settings)

    capture = programs.Capture
    monkeypatch.setattr(programs, "Capture", make)
    monkeypatch.setattr("time.perf_counter", lambda: clock() + seconds[0])


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("api", ["python_api", "config_files"])
def test_the_making_of_programs_is_a_phase_of_its_own(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    slowed(monkeypatch)
    if api == "python_api":
        trainer: Any = train_by_trainer(tmp_path, save_enabled=False)
    else:
        trainer = losses("aot_eager", nn.Flatten(), nn.Linear(192, 4))[1]
    phases = trainer.phases
    assert 1000 <= phases.compile < 1100
    assert 0 < phases.forward < 100
    assert phases.compile < phases.step < phases.total < 1200
    if api == "python_api":
        found = re.search(r"Trained 60 iterations in .* \((.*) each, without 0:16:\d\d of compiling\)", caplog.text)
        assert found is not None
        assert found[1].endswith(("ms", "us"))
        assert re.search(r"Time: .*compile \d\d+ %", caplog.text)


def test_many_batches_of_other_shapes_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    data = [*batches(2), *batches(30, size=5)]
    eager, graph = Run(None, data, updates=64), Run("aot_eager", data, updates=64)
    torch.testing.assert_close(graph.values(), eager.values(), rtol=1e-5, atol=1e-5)
    assert caplog.text.count("20 consecutive batches do not have the shape") == 1


def thaw(trainer: Any) -> None:
    first = next(trainer._plain_model.parameters())
    first.requires_grad_(not first.requires_grad)


def less_dropout(trainer: Any) -> None:
    trainer._plain_model.layers[3].p = 0.01


def other_decay(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.3


def reload(trainer: Any) -> None:
    state = trainer.optimizer.state_dict()
    zeroed = {k: {n: torch.zeros_like(t) + (n == "step") for n, t in s.items()} for k, s in state["state"].items()}
    trainer.optimizer.load_state_dict({**state, "state": zeroed})


def other_values(trainer: Any) -> None:
    for parameter in trainer._plain_model.parameters():
        parameter.data = parameter.data.clone() * 0.5


def evaluation_mode(trainer: Any) -> None:
    trainer._plain_model.eval()


@pytest.mark.parametrize(
    ("event", "programs"),
    [(thaw, 2), (less_dropout, 2), (other_decay, 2), (reload, 1), (other_values, 1), (evaluation_mode, 2)],
)
@pytest.mark.exhaustive(every=12)
def test_what_happens_to_the_model_between_steps_is_noticed(
    event: Callable[[Any], None], programs: int, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = lambda optimizer: [Event({20: event})]  # noqa: E731
    eager, graph = Run(None, hooks=hooks, updates=40), Run("aot_eager", hooks=hooks, updates=40)
    torch.testing.assert_close(graph.values(), eager.values(), rtol=1e-5, atol=1e-5)
    undisturbed = Run(None, updates=40)
    assert (undisturbed.values() - eager.values()).abs().max() > 1e-4  # it did matter
    assert len(captures(caplog)) == programs


def test_what_has_been_is_no_reason_for_another_program(caplog: pytest.LogCaptureFixture) -> None:
    hooks = lambda optimizer: [Event(dict.fromkeys(range(5, 60, 5), thaw))]  # noqa: E731
    eager, graph = Run(None, hooks=hooks, updates=60), Run("aot_eager", hooks=hooks, updates=60)
    torch.testing.assert_close(graph.values(), eager.values(), rtol=1e-5, atol=1e-5)
    assert len(captures(caplog)) == 2


def dropout_of(trainer: Any) -> None:
    trainer._plain_model.layers[3].p = 0.2 + 0.01 * trainer.iter


def betas_of(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["betas"] = (0.9 - 0.001 * trainer.iter, 0.999)


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", [dropout_of, betas_of])
def test_a_model_or_settings_that_change_at_each_step_end_the_programs(
    change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = lambda optimizer: [CallbackHook(after_step=change)]  # noqa: E731
    eager, graph = Run(None, hooks=hooks, updates=30), Run("aot_eager", hooks=hooks, updates=30)
    torch.testing.assert_close(graph.values(), eager.values(), rtol=1e-5, atol=1e-5)
    assert "has changed 8 times" in refusals(caplog)[0]
    assert len(captures(caplog)) == 8

"""Programs of forward and backward, followed by an eager step: of other optimizers, and of many parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.conftest import (
    CHANGE_AT,
    FEW_UPDATES,
    Event,
    Net,
    Run,
    Small,
    batches,
    both,
    captures,
    refusals,
    train_by_trainer,
)
from tests.graph.test_graph_trainer import (
    Clipped,
    OwnOptimizer,
    with_hook,
)
from tests.graph.test_step import checkpoints
from trainwright.graph import optimizer as compiled_optimizer
from trainwright.hooks import HookBase

OUTSIDE = "forward and backward are one program"


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a hundred parameters."""
    monkeypatch.setattr(compiled_optimizer, "_MOST_PARAMETERS", 0)


class SignSteps(torch.optim.Optimizer):
    """No state; the rate changes in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.99
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign() * group["lr"])


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda p: OwnOptimizer(p, lr=0.1), "the step of OwnOptimizer, which is not one of torch.optim."),
        (SignSteps, "the step of SignSteps, which is not one of torch.optim."),
        (with_hook, "the step of AdamW, which has hooks."),
    ],
)
def test_other_optimizers(optimizer: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    both(optimizer=optimizer)
    (line,) = captures(caplog)
    assert line.startswith(f"Graph mode: {OUTSIDE} (")
    assert line.endswith(why)
    assert not refusals(caplog)


class KeepsGradients(SignSteps):
    """Steps by this gradient and the one before, which it keeps as the tensor that it got."""

    before: dict[Tensor, Tensor]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.05 * parameter.grad)
            if parameter in self.before:
                parameter.sub_(0.05 * self.before[parameter])
            self.before[parameter] = parameter.grad


def keeps_gradients(parameters: Any) -> KeepsGradients:
    optimizer = KeepsGradients(parameters)
    optimizer.before = {}
    return optimizer


def test_an_optimizer_may_keep_the_gradients_of_an_update_that_ends_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    """The last micro-batch of each second update is shorter, hence eager: its step gets tensors of its own."""
    data = [*batches(3), *batches(1, size=3)]
    both(data=data, accumulation=2, optimizer=keeps_gradients)
    assert len(captures(caplog)) == 1


@pytest.mark.exhaustive
def test_many_parameters(caplog: pytest.LogCaptureFixture) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(51))

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            for layer in self.layers:
                inputs = inputs + 0.1 * layer(inputs).tanh()
            return {"loss": nn.functional.cross_entropy(inputs, labels)}

    both(net=Deep, updates=5)
    assert captures(caplog)[0].endswith("the step of AdamW, which for 102 parameters takes long to compile.")


@pytest.mark.exhaustive(every=6)
@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"optimizer": Clipped()}, {"net": Net}], ids=["plain", "clipped", "buffers"])
def test_updates_are_those_of_eager_steps(
    accumulation: int, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Also with a shorter micro-batch, which is eager."""
    eager, graph = both(data=[*batches(6), *batches(1, size=3)], accumulation=accumulation, **settings)
    assert len(captures(caplog)) == 1
    if "optimizer" in settings:
        torch.testing.assert_close(graph.values("grad_norm"), eager.values("grad_norm"), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("outside")
def test_a_resume_is_the_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    saving: dict[str, Any] = {"save_steps": 25, "save_total_limit": 9}
    whole = train_by_trainer(tmp_path / "whole", **saving)
    resumed = train_by_trainer(tmp_path / "resumed", resume=str(checkpoints(tmp_path / "whole")), **saving)
    assert resumed.state.global_step == whole.state.global_step
    for left, right in zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(left, right)


def test_a_hook_on_the_step_that_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    """The step leaves the program, and returns to it when the hook is removed."""
    handles: list[Any] = []

    def add(trainer: Any) -> None:
        handles.append(trainer.optimizer.register_step_pre_hook(lambda *_: calls.append(trainer.iter)))

    calls: list[int] = []
    events = {CHANGE_AT: add, CHANGE_AT + 5: lambda trainer: handles[0].remove()}
    Run("aot_eager", net=Small, hooks=lambda optimizer: [Event(events)], updates=FEW_UPDATES)
    assert calls == [*range(CHANGE_AT + 1, CHANGE_AT + 6)]
    assert [OUTSIDE in line for line in captures(caplog)] == [False, True]


class Cycle(HookBase):
    """A schedule that also changes the momentum in each step, by default."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        schedules = torch.optim.lr_scheduler
        self._schedule = (
            schedules.OneCycleLR(optimizer, 0.1, total_steps=FEW_UPDATES + 1)
            if name == "OneCycleLR"
            else schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=5)
        )

    def after_step(self) -> None:
        self._schedule.step()


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR"])
def test_schedules_that_change_more_than_the_rate(make: Any, schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    both(hooks=lambda optimizer: [Cycle(optimizer, schedule)], optimizer=make)
    (line,) = captures(caplog)
    assert line.endswith("which has settings that change.")
    assert not refusals(caplog)


class Partly(Small):
    """Uses its third layer only for batches with a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(6, 6)

    def forward(self, inputs: Tensor, labels: Tensor, flag: Tensor | None = None) -> dict[str, Tensor]:
        return super().forward(inputs if flag is None else inputs + self.third(inputs), labels)


@pytest.mark.exhaustive(every=12)
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
def test_micro_batches_of_a_window_that_use_different_parameters(
    make: Any, accumulation: int, is_outside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = batches(7)
    for number in (2, 4, 5):
        data[number]["flag"] = torch.ones(())
    _, graph = both(data=data, net=Partly, optimizer=make, accumulation=accumulation)
    assert captures(caplog)
    assert all(parameter.grad is None for parameter in graph.model.parameters())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, sparse=True)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.words(ids), labels)}


@pytest.mark.exhaustive(every=2)
@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_sparse_gradients(accumulation: int, caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [{"ids": torch.randint(0, 10, (8,), generator=generator), "labels": torch.arange(8) % 4} for _ in range(5)]
    both(data=data, net=Words, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), accumulation=accumulation)
    assert len(captures(caplog)) == 1
    assert not refusals(caplog)


class OneGradient(nn.Module):
    """Two parameters with one gradient, and one whose elements have one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.full((4,), 0.5)) for _ in range(3))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = inputs[:, :4] * (self.a + self.b)
        return {"loss": nn.functional.cross_entropy(scores, labels) + self.c.mean()}


def clipped_sgd(parameters: Any) -> torch.optim.Optimizer:
    group = {"params": [*parameters], "clip_grad_max_norm": 0.05, "clip_grad_norm_type": 2.0}
    return torch.optim.SGD([group], lr=2.0, momentum=0.9)


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_parameters_with_one_gradient_are_clipped_once(
    accumulation: int, is_outside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    both(net=OneGradient, optimizer=clipped_sgd, accumulation=accumulation)
    assert len(captures(caplog)) == 1

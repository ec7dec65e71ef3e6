"""An optimizer's state is loaded by the names of its parameters."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.toys import Tied
from trainwright.checkpoint import Checkpointer, CheckpointError
from trainwright.optim.named import NamedOptimizers


def trained(groups: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(groups(dict(model.named_parameters())))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def in_order(named: dict[str, nn.Parameter]) -> Any:
    return [
        {"params": [named["inner.weight"], named["embedding.weight"]], "lr": 0.1},
        {"params": [named["inner.bias"]], "lr": 0.2, "weight_decay": 0.0},
    ]


def reversed_order(named: dict[str, nn.Parameter]) -> Any:
    first, second = in_order(named)
    return [second, {**first, "params": first["params"][::-1]}]


def of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: [group["lr"], *(value.tolist() for value in optimizer.state[parameter].values())]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("order", [in_order, reversed_order])
def test_each_parameter_gets_its_own_state_and_settings_in_another_order(tmp_path, order) -> None:
    model, optimizer = trained(in_order)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    Checkpointer(model, tmp_path, optimizer=optimizer, schedule=schedule, asynchronous=False).save("one")
    other = Tied()
    into = torch.optim.AdamW(order(dict(other.named_parameters())))
    loaded = torch.optim.lr_scheduler.StepLR(into, step_size=9)
    Checkpointer(other, optimizer=into, schedule=loaded).load(tmp_path / "one")
    assert of(other, into) == of(model, optimizer)
    assert loaded.base_lrs == loaded.get_last_lr() == [group["lr"] for group in into.param_groups]


def test_other_parameters_are_refused(tmp_path) -> None:
    model, optimizer = trained(in_order)
    Checkpointer(model, tmp_path, optimizer=optimizer, asynchronous=False).save("one")
    model.extra = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([model.inner.weight, model.embedding.weight, model.extra])
    checkpointer = Checkpointer(model, optimizer=optimizer, only={"inner.weight"})
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: extra\s+not in the optimizer: inner.bias"):
        checkpointer.load(tmp_path / "one")


def test_a_group_that_was_added_in_a_run_is_refused_with_what_to_do(tmp_path) -> None:
    model = Tied()
    optimizer = torch.optim.SGD([model.embedding.weight], lr=0.1)
    optimizer.add_param_group({"params": [*model.inner.parameters()], "lr": 0.01})
    Checkpointer(model, tmp_path, optimizer=optimizer, asynchronous=False).save("one")
    into = torch.optim.SGD([model.embedding.weight], lr=0.1)
    with pytest.raises(CheckpointError, match=r"lacks .*inner\.\{weight, bias\}(.|\n)*`unfreeze`"):
        Checkpointer(model, optimizer=into).load(tmp_path / "one")
    into.add_param_group({"params": [*model.inner.parameters()]})  # which it says
    Checkpointer(model, optimizer=into).load(tmp_path / "one")
    assert [group["lr"] for group in into.param_groups] == [0.1, 0.01]


def test_parameters_of_a_group_with_different_saved_settings_are_refused(tmp_path) -> None:
    model, optimizer = trained(in_order)
    Checkpointer(model, tmp_path, optimizer=optimizer, asynchronous=False).save("one")
    optimizer = torch.optim.AdamW([model.inner.bias, model.inner.weight, model.embedding.weight])
    with pytest.raises(CheckpointError, match="in 2 groups: inner"):
        Checkpointer(model, optimizer=optimizer).load(tmp_path / "one")


def test_a_parameter_outside_of_the_model_keeps_its_place(tmp_path) -> None:
    model, scale = nn.Linear(1, 1), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([scale, model.weight], lr=0.1, momentum=0.9)
    scale.grad, model.weight.grad = torch.full((2,), 3.0), torch.full((1, 1), 4.0)
    optimizer.step()
    Checkpointer(model, tmp_path, optimizer=optimizer, asynchronous=False).save("one")
    into = torch.optim.SGD([scale, model.weight], lr=0.1, momentum=0.9)
    Checkpointer(model, optimizer=into).load(tmp_path / "one")
    assert into.state[scale]["momentum_buffer"].tolist() == [3.0, 3.0]
    assert into.state[model.weight]["momentum_buffer"].tolist() == [[4.0]]


def test_a_state_without_names_is_loaded_by_number(tmp_path) -> None:
    model, optimizer = trained(in_order)

    class Older(torch.optim.AdamW):
        def state_dict(self) -> dict[str, Any]:
            state = super().state_dict()
            return {**state, "param_groups": tuple(state["param_groups"])}

    optimizer.__class__ = Older
    Checkpointer(model, tmp_path, optimizer=optimizer, asynchronous=False).save("one")
    assert '"names"' not in (tmp_path / "one" / "optimizer.json").read_text()
    other = Tied()
    into = torch.optim.AdamW(in_order(dict(other.named_parameters())))
    Checkpointer(other, optimizer=into).load(tmp_path / "one")
    assert of(other, into) == of(model, optimizer)


def test_the_names_are_those_of_the_trained_model_if_an_average_is_saved(tmp_path) -> None:
    model, optimizer = trained(in_order)
    average = copy.deepcopy(model)
    Checkpointer(model, tmp_path, weights=lambda: average, optimizer=optimizer, asynchronous=False).save("one")
    assert '"embedding.weight"' in (tmp_path / "one" / "optimizer.json").read_text()
    Checkpointer(model, optimizer=optimizer).load(tmp_path / "one")


class SAM(torch.optim.Optimizer):
    """The usual one of two steps, without its perturbation: it holds the optimizer that has the momentum."""

    def __init__(self, params, **settings):
        super().__init__(params, settings)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        self.base_optimizer.step()


class Outer(torch.optim.Optimizer):
    """It holds an optimizer in a list, and may share its state."""

    def __init__(self, params, shares, **settings):
        self.parts = [torch.optim.SGD(params, **settings)]
        super().__init__(self.parts[0].param_groups, {})
        self.param_groups = self.parts[0].param_groups
        if shares:
            self.state = self.parts[0].state

    def step(self, closure=None):
        self.parts[0].step()


class Shown(torch.optim.Optimizer):
    """A wrapper that shows groups and state of another optimizer as its own, and cannot be given others."""

    def __init__(self, params, **settings):
        self.inner = torch.optim.SGD(params, **settings)
        self.defaults = self.inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        self.inner.step()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


@pytest.mark.parametrize("kind", [SAM, partial(Outer, shares=False), partial(Outer, shares=True), Shown])
def test_an_optimizer_that_another_one_holds_is_saved_too(tmp_path, kind):
    def built(seed):
        torch.manual_seed(seed)
        model = nn.Linear(4, 2)
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return model, optimizer, schedule

    def train(model, optimizer, schedule):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
            schedule.step()

    model, optimizer, schedule = built(0)
    train(model, optimizer, schedule)
    Checkpointer(model, tmp_path, optimizer=optimizer, schedule=schedule, asynchronous=False).save("a")
    train(model, optimizer, schedule)
    other = built(1)
    Checkpointer(other[0], optimizer=other[1], schedule=other[2]).load(tmp_path / "a")
    train(*other)
    assert torch.equal(other[0].weight, model.weight)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("dtype", "of_state"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_the_state_keeps_its_dtype(tmp_path, dtype, of_state, named):
    model = nn.Linear(4, 2).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum"] = torch.randn(parameter.shape).to(of_state)
    saved = Checkpointer(model, tmp_path, optimizer=NamedOptimizers({"a": optimizer}) if named else optimizer)
    saved.save("a")
    saved.wait()
    before = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    optimizer.state.clear()
    saved.load(tmp_path / "a")
    for parameter, values in before.items():
        momentum = optimizer.state[parameter]["momentum"]
        assert momentum.dtype == of_state
        assert torch.equal(momentum, values["momentum"])


class Factors(torch.optim.Optimizer):
    """Gradients divided by the sums over a square factor of each weight, which it keeps column by column."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            rows = parameter.grad.reshape(len(parameter), -1)
            factor = self.state[parameter].setdefault("factor", torch.zeros(len(rows), len(rows)).t())
            factor.lerp_(rows @ rows.t(), 0.3)
            scale = factor.abs().sum(0).sqrt() + 1e-3
            parameter.sub_(0.05 * parameter.grad / scale.reshape(-1, *[1] * (parameter.dim() - 1)))


@pytest.fixture
def mesh_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["a folder", "parts"])  # 67 x 67: the factor has the shape of its weight, too
def test_a_state_with_a_layout_of_its_own_keeps_it(tmp_path, name, request):
    def built():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(67, 67), nn.Tanh(), nn.Linear(67, 2))
        return model, Factors(model.parameters(), lr=0.05)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            inputs = torch.randn(3, 67, generator=torch.Generator().manual_seed(step))
            model(inputs).square().sum().backward()
            optimizer.step()

    mesh = request.getfixturevalue("mesh_of_one") if name == "parts" else None
    model, optimizer = built()
    train(model, optimizer, range(3))
    Checkpointer(model, tmp_path, mesh=mesh, optimizer=optimizer, asynchronous=False).save("a")
    train(model, optimizer, range(3, 9))
    other, into = built()
    Checkpointer(other, mesh=mesh, optimizer=into).load(tmp_path / "a")
    factors = [into.state[parameter]["factor"] for parameter in other.parameters()]
    assert [factor.stride() for factor in factors[:2]] == [(1, 67)] * 2
    train(other, into, range(3, 9))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))

"""Direct steps compared with torch's own steps of an equal optimizer."""

import copy
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests._torch_compat.conftest import CHANGES, Trained, change_torch, changed
from trainwright._torch_compat import fused_update
from trainwright._torch_compat.fused_update import direct
from trainwright._torch_compat.optimizer_import import PlainUpdate

CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adam, decay": (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "maximize": (torch.optim.Adam, {"maximize": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.05}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
}


class Twins:
    """Two equal networks with equal optimizers: one stepped as torch does, one directly."""

    def __init__(self, kind: type[Optimizer], settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)]
        self.models.append(copy.deepcopy(self.models[0]))
        make: Callable[..., Optimizer] = kind
        self.optimizers = [
            make(
                [{"params": m[0].parameters(), "lr": 0.02}, {"params": m[2].parameters()}],
                **{"lr": 0.05, "fused": True, **settings},
            )
            for m in self.models
        ]
        self.plain, self.other = self.optimizers
        self.updaters = [self.plain, direct(self.other)]
        self.dtype = dtype
        self.seed = 0

    def run(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.seed += 1
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(self.seed)).to(self.dtype)
            for model, updater in zip(self.models, self.updaters, strict=True):
                model(x).square().sum().backward()
                updater.step()
                updater.zero_grad()
                assert all(parameter.grad is None for parameter in model.parameters())
        self.check()

    def check(self) -> None:
        for a, b in zip(*(m.parameters() for m in self.models), strict=True):
            assert torch.equal(a, b)
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        assert [*states[0]["state"]] == [*states[1]["state"]]
        for index, state in states[0]["state"].items():
            assert state.keys() == states[1]["state"][index].keys()
            for name, value in state.items():
                there = states[1]["state"][index][name]
                assert torch.equal(value, there) if isinstance(value, Tensor) else value == there

    def both(self, change: Callable[[nn.Module, Optimizer], Any]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            change(model, optimizer)
        self.run()

    def both_without_state(self, change: Callable[[nn.Module, Optimizer], Any]) -> None:
        """As ``both``, after which parameters have no state: Adagrad creates none in a step before torch 2.12."""
        if not isinstance(self.plain, torch.optim.Adagrad) or torch.__version__ >= "2.12":
            self.both(change)
            return
        with pytest.raises(KeyError):
            self.both(change)  # torch's step
        self.models[1](torch.ones(1, 4)).sum().backward()
        with pytest.raises(KeyError):
            self.updaters[1].step()


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def twins(request: pytest.FixtureRequest) -> Twins:
    return Twins(*request.param)


def test_it_is_torchs_step_to_the_last_bit(twins: Twins) -> None:
    twins.run(5)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_other_precisions(dtype: torch.dtype) -> None:
    Twins(torch.optim.Adam, {}, dtype).run(5)


def test_the_optimizers_own_step_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(torch.optim.Adam, {})
    calls: list[int] = []
    adam = importlib.import_module("torch.optim.adam")
    original = adam.adam
    monkeypatch.setattr(adam, "adam", lambda *a, **k: (calls.append(1), original(*a, **k)))
    for optimizer, expected in ((twins.updaters[1], 0), (twins.plain, 6)):  # the plain step calls it for each group
        for model in twins.models:
            model(torch.randn(5, 4)).sum().backward()
        for _ in range(3):
            optimizer.step()
        assert len(calls) == expected


@pytest.mark.parametrize("settings", [{}, {"fused": False}], ids=["fused", "not fused"])
def test_a_step_put_in_place_of_the_classs_is_called(settings: dict[str, Any]) -> None:
    twins = Twins(torch.optim.Adam, settings)
    twins.run()
    with mock.patch.object(torch.optim.Adam, "step") as step:
        twins.models[1](torch.randn(5, 4)).sum().backward()
        before = [p.detach().clone() for p in twins.models[1].parameters()]
        twins.updaters[1].step()
        twins.updaters[1].zero_grad()
    assert step.call_count == 1
    assert all(map(torch.equal, before, twins.models[1].parameters()))
    twins.run()


def set_all(**values: Any) -> Callable[[nn.Module, Optimizer], Any]:
    return lambda _, optimizer: [group.update(values) for group in optimizer.param_groups]


def replace_one_state(_: nn.Module, optimizer: Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = torch.ones_like(state["exp_avg"])


BETWEEN_STEPS: dict[str, tuple[str, Callable[[nn.Module, Optimizer], Any]]] = {
    "states in place": ("adam", lambda _, optimizer: [s["exp_avg"].mul_(0.5) for s in optimizer.state.values()]),
    "one state": ("adam", replace_one_state),
    "settings that ask for another state": ("sgd", set_all(momentum=0.9)),
    "settings": ("adam", set_all(weight_decay=0.1, betas=(0.5, 0.6))),
    "fused no more": ("momentum", set_all(fused=False)),
    "a rate that is a tensor": ("adam", lambda _, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.01))),
}


class TestWhatChangesBetweenSteps:
    @pytest.mark.parametrize("name", BETWEEN_STEPS)
    def test_any_of_these(self, name: str) -> None:
        case, change = BETWEEN_STEPS[name]
        twins = Twins(*CASES[case])
        twins.run()
        twins.both(change)

    def test_a_loaded_state(self, twins: Twins) -> None:
        twins.run()
        saved = copy.deepcopy(twins.plain.state_dict())
        twins.run()
        twins.both(lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(saved)))

    def test_a_state_that_was_reset(self, twins: Twins) -> None:
        twins.run()

        def reset(_: nn.Module, optimizer: Optimizer) -> None:
            optimizer.state.clear()

        twins.both_without_state(reset)

    def test_a_parameter_without_a_gradient_for_a_while(self, twins: Twins) -> None:
        twins.run()
        twins.both(lambda model, _: model[0].requires_grad_(False))
        twins.both(lambda model, _: model[0].requires_grad_(True))

    def test_a_further_group(self, twins: Twins) -> None:
        twins.run()
        extra = [nn.Parameter(torch.ones(2)) for _ in range(2)]

        def add(model: nn.Module, optimizer: Optimizer) -> None:
            parameter = extra.pop()
            model.extra = parameter
            model.register_forward_hook(lambda _, __, out: out + parameter.sum())
            optimizer.add_param_group({"params": [parameter], "lr": 0.1})

        twins.both_without_state(add)


class TestWhatIsLeftToTorch:
    def test_hooks_of_the_optimizer(self) -> None:
        twins = Twins(torch.optim.Adam, {})
        twins.run()
        seen: list[str] = []
        twins.other.register_step_pre_hook(lambda *_: seen.append("pre"))
        twins.other.register_step_post_hook(lambda *_: seen.append("post"))
        twins.run(2)
        assert seen == ["pre", "post"] * 2

    def test_hooks_of_all_optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        twins = Twins(torch.optim.Adam, {})
        seen: list[Optimizer] = []
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
        twins.run(1)
        handle.remove()
        assert seen == twins.optimizers

    def test_parameters_of_several_types(self) -> None:
        twins = Twins(torch.optim.Adam, {})
        parameters = [[nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())] for _ in range(2)]
        for own in parameters:
            optimizer = torch.optim.Adam(own, fused=True)
            updater = optimizer if own is parameters[0] else direct(optimizer)
            for _ in range(3):
                for parameter in own:
                    parameter.grad = torch.full_like(parameter, 0.5)
                updater.step()
        for a, b in zip(*parameters, strict=True):
            assert torch.equal(a, b)
        twins.check()

    @pytest.mark.parametrize("settings", [{"fused": False}, {"foreach": True, "fused": None}])
    def test_what_is_not_fused(self, settings: dict[str, Any]) -> None:
        Twins(torch.optim.Adam, settings).run()

    def test_other_optimizers_and_subclasses(self) -> None:
        class Own(torch.optim.Adam):
            pass

        parameter = nn.Parameter(torch.ones(2))
        for optimizer in (torch.optim.RMSprop([parameter]), Own([parameter], fused=True)):
            assert type(direct(optimizer)) is PlainUpdate


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_a_zero_grad_of_somebodys_own_is_called(kind: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = kind([parameter])
    parameter.grad = torch.ones(2)
    calls: list[int] = []
    optimizer.zero_grad = lambda: calls.append(1)
    direct(optimizer).zero_grad()
    assert calls == [1]
    assert parameter.grad is not None


@pytest.mark.exhaustive(every=6)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("adam", "_fused_adam_"), ("adamw", "_fused_adamw_"), ("sgd", "_fused_sgd_"), ("adagrad", "_fused_adagrad_")],
)
def test_the_fused_kernels(
    name: str, kernel: str, change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    change_torch(monkeypatch, fused_update, kernel, change, lambda *args, **kwargs: None)
    (line,) = lines_of_training(optimizer=name)
    assert "using the public API for the steps of" in line


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_the_lists_that_an_optimizer_makes(
    kind: Any, change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    def empty(*args: Any) -> None:
        """Fills no list."""

    monkeypatch.setattr(kind, "_init_group", changed(kind._init_group, change, empty))
    lines = lines_of_training(optimizer=kind.__name__.lower())
    # Without a list of parameters there is nothing that a kernel could be called for: the step is torch's own.
    assert len(lines) == (change != "other result")


def test_the_hooks_of_an_optimizer(monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    def missing(optimizer: Optimizer) -> Any:
        raise AttributeError("_optimizer_step_pre_hooks")

    monkeypatch.setattr(fused_update, "step_hooks", missing)
    (line,) = lines_of_training()
    assert "using the public API for the steps of Adam" in line

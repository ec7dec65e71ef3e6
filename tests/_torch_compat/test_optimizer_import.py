"""Optimizers without the import of torch's compiler: the same results, and torch left as it was.

In processes of their own: in this one the compiler may be imported.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests._torch_compat.conftest import CHANGES, Trained, changed
from trainwright._torch_compat import optimizer_import
from trainwright._torch_compat.optimizer_import import PlainUpdate, steps_as, without_compiler

COMMON = """
import sys, hashlib, warnings
import torch
from torch import nn
from trainwright._torch_compat.optimizer_import import PlainUpdate, without_compiler
warnings.simplefilter("error")

def is_loaded():
    return "torch._dynamo" in sys.modules

def made(name, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    return net, getattr(torch.optim, name)(net.parameters(), lr=0.01, **settings)

def gradients(net):
    net(torch.arange(8.0).view(2, 4)).square().mean().backward()

def weights(net):
    return b"".join(p.detach().numpy().tobytes() for p in net.parameters())
"""

OPTIMIZERS = """
ALL = {
    "ASGD": {}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"foreach": True}, "AdamW": {"amsgrad": True},
    "Adamax": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9}, "Rprop": {}, "SGD": {"momentum": 0.9},
    "Muon": {},
}
digest = hashlib.sha256()
for name, settings in ALL.items():
    with without_compiler():
        net, optimizer = made(name, **settings)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    update = PlainUpdate(optimizer)
    for _ in range(3):
        gradients(net)
        update.step()
        update.zero_grad()
        schedule.step()
        assert all(p.grad is None for p in net.parameters())
    assert calls == ["before", "after"] * 3 and torch.is_grad_enabled()
    with without_compiler():
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
        optimizer.zero_grad()
    gradients(net)
    update.step()
    digest.update(weights(net))
print(is_loaded(), digest.hexdigest())
"""


def output_of(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", COMMON + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.exhaustive
def test_all_optimizers_do_the_same_without_the_compiler_as_with_it() -> None:
    before, without = output_of(OPTIMIZERS)
    after, with_it = output_of("import torch._dynamo\n" + OPTIMIZERS)
    assert (before, after) == ("False", "True")
    assert without == with_it


@pytest.mark.exhaustive
def test_what_is_compiled_later_is_what_it_would_have_been() -> None:
    program = """
net, optimizer = None, None
with without_compiler():
    net, optimizer = made("RMSprop")
for _ in range(2):
    gradients(net)
    PlainUpdate(optimizer).step()
    with without_compiler():
        optimizer.zero_grad()
assert not is_loaded()
methods = [torch.optim.Optimizer.__dict__[name].__wrapped__
           for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad")]
assert not any(hasattr(method, "__dynamo_disable") for method in methods)

warnings.simplefilter("ignore")  # torch's own, of what its compiler imports
gradients(net)
torch.compile(optimizer.step, backend="eager")()
assert is_loaded()
optimizer.zero_grad()
assert methods[3].__dynamo_disable is not methods[3]  # guarded from the first call on, as torch does it
print(hashlib.sha256(weights(net)).hexdigest())
"""
    reference = """
net, optimizer = made("RMSprop")
for _ in range(2):
    gradients(net)
    optimizer.step()
    optimizer.zero_grad()
assert is_loaded()

warnings.simplefilter("ignore")
gradients(net)
torch.compile(optimizer.step, backend="eager")()
print(hashlib.sha256(weights(net)).hexdigest())
"""
    assert output_of(program) == output_of(reference)


class Own(Optimizer):
    """A user's, with a step and a zero_grad of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})
        self.zeroed = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter -= parameter.grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)


class TestOptimizersOfTheUser:
    def test_their_methods_are_called(self) -> None:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = Own([parameter])
        update = PlainUpdate(optimizer)
        parameter.grad = torch.ones(2)
        update.step()
        update.zero_grad()
        assert torch.equal(parameter.detach(), torch.zeros(2))
        assert optimizer.zeroed == 1
        assert parameter.grad is None

    def test_a_step_that_was_put_in_place_of_its_own(self) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        assert steps_as(type(optimizer).step, optimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert steps_as(type(optimizer).step, optimizer)
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
        assert not steps_as(type(optimizer).step, optimizer)


def test_a_torch_that_looks_different_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "add_param_group", Optimizer.add_param_group.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.delattr(Optimizer, "state_dict")
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    with without_compiler():
        assert torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("change", CHANGES)
def test_the_step_of_an_optimizer_without_the_compiler(
    change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    monkeypatch.setattr(optimizer_import, "_COMPILER", "nothing.has.imported.it")
    for kind in (torch.optim.SGD, torch.optim.RMSprop):
        kind([nn.Parameter(torch.ones(2))], lr=0.1)  # the first optimizer of a class is what wraps its step
        guarded: Any = kind.step.__wrapped__  # type: ignore[attr-defined]
        if change == "missing":
            monkeypatch.delattr(guarded, "__wrapped__")
        else:
            monkeypatch.setattr(guarded, "__wrapped__", changed(guarded.__wrapped__, change, lambda self: None))
    lines = lines_of_training(optimizer="rmsprop")
    # Where torch does not wrap its steps there is nothing to leave out, and nothing to say.
    assert len(lines) == (change != "missing")


@pytest.mark.parametrize("change", ["other result", "error"])
def test_how_torch_keeps_the_guarded_form_of_a_method(
    change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    def other(name: str) -> Any:
        if change == "error":
            raise AttributeError("a method has no attributes")
        return lambda *args, **kwargs: None

    monkeypatch.setattr(optimizer_import, "_COMPILER", "nothing.has.imported.it")
    monkeypatch.setattr(optimizer_import, "_unguarded", other)
    if change == "other result":  # what is put there is called in place of the method
        monkeypatch.setattr(optimizer_import, "_unguarded_methods", _methods_that_do_nothing)
    (line,) = lines_of_training(optimizer="rmsprop")
    assert "using the public API for optimizers without torch's compiler" in line


def _methods_that_do_nothing() -> Any:
    patch = pytest.MonkeyPatch.context()
    monkeypatch = patch.__enter__()
    monkeypatch.setattr(Optimizer, "zero_grad", lambda self, set_to_none=True: None)
    return patch

"""torch's fused optimizers are chosen where they may be, give the plain ones' result, and never against a choice."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.data import TensorDataset

from tests.toys import assert_equal_weights, quiet
from trainwright import LazyCall, Trainer
from trainwright.optim import build_optimizer
from trainwright.optim.fused import may_be_fused


def net(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, **options), nn.Tanh(), nn.Linear(8, 2, **options))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_where_torch_has_it_and_equal_to_the_plain_one(name: str) -> None:
    model, other = net(), net()
    kind = getattr(torch.optim, name)
    fused, plain = build_optimizer(LazyCall(kind)(lr=0.01), model), kind(other.parameters(), lr=0.01)
    assert is_fused(fused)
    train(model, fused, 20)
    train(other, plain, 20)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)  # float32: another order of operations


@pytest.mark.parametrize(
    "settings", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}], ids=str
)
def test_a_choice_of_the_users_is_kept(settings: dict[str, Any]) -> None:
    optimizer = build_optimizer(LazyCall(torch.optim.Adam)(lr=0.01, **settings), net())
    assert not is_fused(optimizer)


class Mine(torch.optim.Adam):
    pass


@pytest.mark.parametrize("kind", [Mine, torch.optim.RMSprop, torch.optim.Adadelta])
def test_other_classes_are_left_alone(kind: Any) -> None:
    optimizer = build_optimizer(LazyCall(kind)(lr=0.01), net())
    assert not any(group.get("fused") for group in optimizer.param_groups)


def test_what_fused_kernels_do_not_take_is_trained_by_the_plain_ones() -> None:
    assert not is_fused(build_optimizer(LazyCall(torch.optim.SGD)(lr=0.01), nn.Embedding(4, 2, sparse=True)))
    assert not is_fused(build_optimizer(LazyCall(torch.optim.Adam)(lr=0.01), net(dtype=torch.complex64)))
    assert not is_fused(build_optimizer(LazyCall(torch.optim.Adam)(lr=0.01), net(device="meta")))
    assert is_fused(build_optimizer(LazyCall(torch.optim.Adam)(lr=0.01), net(dtype=torch.bfloat16)))


@pytest.mark.parametrize(("version", "expected"), [("2.11.0+cu130", False), ("2.12.0", True), ("2.14.1+cu130", True)])
def test_adagrad_is_fused_on_cuda_where_torch_has_it(
    version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    there: Any = SimpleNamespace(device=torch.device("cuda"))
    assert may_be_fused(torch.optim.Adagrad, [there]) is expected
    assert may_be_fused(torch.optim.SGD, [there])
    assert may_be_fused(torch.optim.Adagrad, [torch.ones(1)])


def test_a_run_goes_on_with_the_kind_that_it_began_with(tmp_path: Path) -> None:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())

    def trainer(folder: str, optimizer: Any, **settings: Any) -> Trainer:
        return Trainer(net(), quiet(tmp_path / folder, optimizer=optimizer, **settings), data)

    plain = {"name_": "Adam", "fused": False}
    whole = trainer("whole", plain)
    whole.train()
    trainer("cut", plain, max_steps=4).train()
    resumed = trainer("cut", "Adam", resume_from_checkpoint=True)
    assert not is_fused(resumed.optimizer)
    resumed.train()
    assert_equal_weights(resumed.model, whole.model)


def test_optimizers_made_by_a_function_run_fused_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01)

    models = net(), net()
    with caplog.at_level("INFO", logger="trainwright.optim"):
        optimizer = build_optimizer(LazyCall(make)(), models[0])
    assert is_fused(optimizer)
    assert "AdamW runs fused" in caplog.text
    train(models[0], optimizer, 3)
    train(models[1], build_optimizer(LazyCall(torch.optim.AdamW)(lr=0.01), models[1]), 3)
    assert_equal_weights(*models)


@pytest.mark.parametrize("chosen", [{"fused": False}, {"foreach": False}, {"foreach": True}, {"capturable": True}])
def test_not_against_a_choice_of_the_function(chosen: dict[str, Any]) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01, **chosen)

    assert not is_fused(build_optimizer(LazyCall(make)(), net()))


KINDS = {
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"weight_decay": 0.05},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr_decay": 0.1},
}
ONE_SAMPLE = TensorDataset(torch.linspace(-1, 1, 4).reshape(1, 4), torch.tensor([1]))


def one_sample_trainer(folder: Path, optimizer: Any) -> Trainer:
    settings: dict[str, Any] = {"batch_size": 1, "num_epochs": 5}
    return Trainer(net(), quiet(folder, optimizer=optimizer, learning_rate=0.01, **settings), ONE_SAMPLE)


@pytest.mark.parametrize("name", KINDS)
def test_an_update_of_a_trainer_is_torchs_own_fused_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, kind = net(), getattr(torch.optim, name)
    optimizer = kind(theirs.parameters(), lr=0.01, fused=True, **KINDS[name])
    for _ in range(5):
        loss = nn.functional.cross_entropy(theirs(ONE_SAMPLE.tensors[0]), ONE_SAMPLE.tensors[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trainer = one_sample_trainer(tmp_path, {"name_": name, **KINDS[name]})
    functional = importlib.import_module(kind.step.__module__)
    function = kind.step.__module__.rpartition(".")[2]  # runs the kernel of each group; AdamW has Adam's
    step = mock.Mock(wraps=getattr(functional, function))
    monkeypatch.setattr(functional, function, step)
    trainer.train()
    assert step.call_count == 5
    assert all(call.kwargs["fused"] for call in step.call_args_list)
    assert_equal_weights(trainer.model, theirs)


def count_in_class(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch, count: Any) -> None:
    monkeypatch.setattr(type(optimizer), "step", lambda self, closure=None: count())


def count_in_object(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch, count: Any) -> None:
    monkeypatch.setattr(optimizer, "step", lambda closure=None: count(), raising=False)


def count_in_hook(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch, count: Any) -> None:
    optimizer.register_step_post_hook(lambda *_: count())


def count_in_zero_grad(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch, count: Any) -> None:
    monkeypatch.setattr(optimizer, "zero_grad", lambda set_to_none=True: count(), raising=False)


@pytest.mark.parametrize("change", [count_in_class, count_in_object, count_in_hook, count_in_zero_grad])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_what_the_user_has_put_into_an_optimizer_is_called(
    kind: Any, change: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, count = one_sample_trainer(tmp_path, kind.__name__), mock.Mock()
    change(trainer.optimizer, monkeypatch, count)
    trainer.train()
    assert count.call_count >= 5  # gradients are also set to None before the first step

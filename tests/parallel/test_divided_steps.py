"""What a step cannot do with divided parameters is refused by name: by the optimizer, and by a step of the user."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests import toys
from tests.ranks import on_ranks
from tests.toys import quiet
from trainwright import DefaultTrainer, Trainer
from trainwright.base.errors import ConfigError
from trainwright.config import LazyCall


class Factored(torch.optim.Optimizer):
    """Its state has tensors of its own, which are not divided."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                square = self.state[parameter].setdefault("square", torch.zeros(parameter.shape))
                square.mul_(0.9).add_(parameter.grad.square(), alpha=0.1)
                parameter.sub_(group["lr"] * parameter.grad / (square.sqrt() + 1e-8))


class Noisy(torch.optim.SGD):
    """Draws random numbers, counts its steps, and has a list of tensors, as some optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.steps, self.others = 0, [torch.zeros(2)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.others[0] += torch.rand(2)
        super().step()


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    import timm.optim
    import transformers

    makers: dict[str, Any] = {
        "Factored": Factored,
        "Noisy": Noisy,
        "Adafactor": lambda p: transformers.Adafactor(p, lr=0.01, scale_parameter=False, relative_step=False),
        "AdamP": timm.optim.AdamP,
        "NvNovoGrad": timm.optim.NvNovoGrad,
        "Lion": timm.optim.Lion,
    }
    optimizer: torch.optim.Optimizer = makers[name](model.parameters())
    return optimizer


def build_classifier() -> nn.Module:
    return toys.Classifier()


def points() -> Any:
    return toys.points()


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def complete(model: nn.Module) -> list[Tensor]:
    return [getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for one in model.parameters()]


def train(name: str, folder: Path, layout: dict[str, Any]) -> Any:
    """The weights, or the error and whether an update was made before it."""
    model = build_model()
    data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2)
    config = quiet(folder, num_epochs=1, batch_size=4, metrics=None, save_enabled=False, **layout)
    optimizer = optimizer_of(name, model)
    try:
        trainer = Trainer(model, config, data, optimizer=optimizer)
        state = torch.get_rng_state()
        if isinstance(optimizer, Noisy):
            assert (optimizer.steps, optimizer.others[0].tolist()) == (0, [0, 0])
        assert not optimizer.state
        trainer.train()
        return {"weights": complete(trainer.model), "random": state}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


CALLS: list[tuple[str, dict[str, Any]]] = [
    (name, {"zero_stage": stage})
    for name in ("Factored", "Adafactor", "AdamP", "NvNovoGrad", "Lion", "Noisy")
    for stage in (0, 2, 3)
]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs).tanh()
        return self.head(inputs)


class Penalized(Trainer):
    def train_step(self, model: Any, inputs: Any) -> Any:
        data, labels = inputs
        loss = nn.functional.cross_entropy(model(data), labels)
        self.backward(loss + 0.1 * sum(parameter.square().sum() for parameter in model.parameters()))
        self.step()
        return {"step_loss": loss.detach()}


class SecondOrder(Trainer):
    def train_step(self, model: Any, inputs: Any) -> Any:
        data, labels = inputs[0].requires_grad_(), inputs[1]
        loss = nn.functional.cross_entropy(model(data), labels)
        (gradient,) = torch.autograd.grad(loss, [data], create_graph=True)
        self.backward(loss + gradient.square().sum())
        self.step()
        return {"step_loss": loss.detach()}


def own_steps(folder: Path) -> dict[Any, Any]:
    """The weights, or the error, by the trainer and the stage."""
    data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2)
    found: dict[Any, Any] = {}
    for number, (kind, stage) in enumerate((kind, stage) for kind in (Penalized, SecondOrder) for stage in range(4)):
        settings = {"num_epochs": 1, "batch_size": 2, "metrics": None, "save_enabled": False, "zero_stage": stage}
        trainer = kind(Blocks(), quiet(folder / str(number), gradient_accumulation_steps=2, **settings), data)
        try:
            trainer.train()
            found[kind.__name__, stage] = complete(trainer.model)
        except Exception as error:
            found[kind.__name__, stage] = f"{type(error).__name__}: {error}"
    return found


def test_steps_that_read_parameters_or_compute_second_derivatives_train_or_are_refused(tmp_path: Path) -> None:
    for found in on_ranks(own_steps, tmp_path):
        for stage in (1, 2):
            for one, other in zip(found["Penalized", stage], found["Penalized", 0], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        assert re.match(r"ConfigError: .*in train_step .* uses parameters where they are div", found["Penalized", 3])
        assert isinstance(found["SecondOrder", 0], list)
        for stage in (1, 2, 3):
            assert "gradients of gradients (create_graph=True" in found["SecondOrder", stage]


def train_all(folder: Path) -> list[Any]:
    return [train(name, folder / str(number), layout) for number, (name, layout) in enumerate(CALLS)]


def from_config_file(folder: Path) -> str:
    cfg = toys.file_config(folder, build_classifier, points, train_micro_batch_size=4, train_iter=2)
    cfg.train.zero_optimization.update({"enabled": True, "stage": 2})
    cfg.optim = LazyCall(Factored)(lr=0.1)
    try:
        DefaultTrainer(cfg).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_step_that_mixes_complete_and_divided_tensors_is_refused_by_name(tmp_path: Path) -> None:
    for rank in on_ranks(train_all, tmp_path, timeout=120):
        found = {(name, layout["zero_stage"]): result for (name, layout), result in zip(CALLS, rank, strict=True)}
        for name in ("Factored", "Adafactor", "AdamP", "NvNovoGrad"):
            assert isinstance(found[name, 0], dict), found[name, 0]
            for stage in (2, 3):
                assert found[name, stage].startswith(f"ConfigError: {name} (")
                assert "data parallelism without zero_stage, or pipeline stages" in found[name, stage]
        for name in ("Lion", "Noisy"):
            for stage in (2, 3):
                for one, other in zip(found[name, stage]["weights"], found[name, 0]["weights"], strict=True):
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
                assert torch.equal(found[name, stage]["random"], found[name, 0]["random"])


def test_a_config_file_says_the_same(tmp_path: Path) -> None:
    for found in on_ranks(from_config_file, tmp_path):
        assert found.startswith("ConfigError: Factored (tests.parallel.test_divided_steps): its step cannot update")


def test_an_optimizer_without_a_rate_is_refused_by_name(tmp_path: Path) -> None:
    import transformers

    model = build_model()
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
    optimizer = transformers.Adafactor(model.parameters())  # computes its rates
    for schedule in (None, "linear"):
        with pytest.raises(ConfigError, match=r"Adafactor has no learning rate \(lr=None\)"):
            Trainer(model, quiet(tmp_path, lr_scheduler_type=schedule), data, optimizer=optimizer).train()


def second_order_optimizer(folder: Path) -> str:
    import timm.optim

    model = build_model()
    settings = {"num_epochs": 1, "batch_size": 4, "metrics": None, "save_enabled": False, "zero_stage": 2}
    try:
        Trainer(model, quiet(folder, **settings), points(), optimizer=timm.optim.Adahessian(model.parameters()))
    except ConfigError as error:
        return str(error)
    return ""


def test_an_optimizer_that_differentiates_gradients_is_refused_by_name(tmp_path: Path) -> None:
    for message in on_ranks(second_order_optimizer, tmp_path):
        assert re.search(r"Adahessian .*its step cannot update parameters that ZeRO.*differentiates gradients", message)

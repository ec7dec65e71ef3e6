"""Optimizers whose step needs a closure, such as LBFGS, in the trainer's own step of both APIs."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.test_several_optimizers import Net, rows
from tests.toys import assert_equal_weights, file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.config import ConfigError

SETTINGS: dict[str, Any] = {"lr": 0.5, "max_iter": 4, "history_size": 3, "line_search_fn": "strong_wolfe"}


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {"optimizer": {"name_": "LBFGS", **SETTINGS}, "batch_size": 12, "metrics": [], "eval_strategy": "no"}
    return quiet(folder, **{**given, **settings})


def python(folder: Path, steps: int = 6, kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    trainer = kind(Net(), config(folder, num_epochs=3, max_steps=steps, **settings), rows())
    trainer.train()
    return trainer


def config_files(folder: Path, steps: int = 6, **settings: Any) -> DefaultTrainer:
    cfg = file_config(folder, Net, rows, train_iter=steps, train_micro_batch_size=12, **settings)
    cfg.optim = LazyCall(torch.optim.LBFGS)(params={}, **SETTINGS)
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
    trainer = DefaultTrainer(cfg)
    trainer.train()
    return trainer


def by_hand(batches: list[Any], max_norm: float | None = None) -> tuple[Net, list[float]]:
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), **SETTINGS)
    losses = []
    for batch in batches:

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(**batch)["loss"]
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            return loss.detach()

        losses.append(float(optimizer.step(closure)))
    return net, losses


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The distinct batches that forward passes get."""
    found: list[Any] = []
    forward = Net.forward

    def recorded(net: Net, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if not found or found[-1]["inputs"] is not inputs:
            found.append({"inputs": inputs, "labels": labels})
        return forward(net, inputs, labels)

    monkeypatch.setattr(Net, "forward", recorded)
    return found


@pytest.mark.parametrize("run", [python, config_files])
def test_the_weights_and_losses_are_those_of_a_plain_loop(
    run: Callable[..., Any], batches: list[Any], tmp_path: Path
) -> None:
    trainer = run(tmp_path)
    assert len(batches) == 6
    net, losses = by_hand(list(batches))
    assert_equal_weights(trainer.model, net)
    assert [value for value, _ in trainer.storage.history("total_loss").values()] == losses


class Sharp(torch.optim.Optimizer):
    """SAM (Foret et al. 2021): the gradient at the worst point nearby. Its step has torch's signature."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        moves = [0.05 * p.grad for p in parameters]
        torch._foreach_add_(parameters, moves)
        closure()
        torch._foreach_sub_(parameters, moves)
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        return loss


class Sgd(torch.optim.SGD):
    """Of another package: it passes the closure on, which is called once."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def run_of(kind: Any, api: str, folder: Path, **settings: Any) -> nn.Module:
    if api == "Trainer":
        model = Net()
        fields = quiet(folder, batch_size=4, num_epochs=1, metrics=[], eval_strategy="no", **settings)
        Trainer(model, fields, rows(), optimizer=kind(model.parameters(), lr=0.1)).train()
        return model
    cfg = file_config(folder, Net, rows, train_iter=3, train_micro_batch_size=4, **settings)
    cfg.optim = LazyCall(kind)(params={}, lr=0.1)
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
    trainer = DefaultTrainer(cfg)
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("api", ["Trainer", "config file"])
def test_an_optimizer_with_an_optional_closure_gets_it(api: str, batches: list[Any], tmp_path: Path) -> None:
    model = run_of(Sharp, api, tmp_path)
    net = Net()
    optimizer = Sharp(net.parameters(), lr=0.1)
    for batch in list(batches):

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(**batch)["loss"]
            loss.backward()
            return loss

        optimizer.step(closure)
    assert len(batches) >= 3
    assert_equal_weights(model, net)


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"non_finite": "skip"}])
def test_an_optimizer_that_uses_no_closure_trains_as_without_one(settings: dict[str, Any], tmp_path: Path) -> None:
    found = [run_of(kind, "Trainer", tmp_path / kind.__name__, **settings) for kind in (Sgd, torch.optim.SGD)]
    assert_equal_weights(*found)


def test_each_evaluation_is_clipped(batches: list[Any], tmp_path: Path) -> None:
    trainer = python(tmp_path, max_grad_norm=0.05)
    assert_equal_weights(trainer.model, by_hand(list(batches), max_norm=0.05)[0])
    assert trainer.storage.latest()["grad_norm"][0] > 0


def test_each_evaluation_has_the_precision_of_the_run(tmp_path: Path) -> None:
    """Also in graph mode, which falls back to eager steps."""
    net = python(tmp_path / "bf16", mixed_precision="bf16").model
    assert all(torch.isfinite(parameter).all() for parameter in net.parameters())
    assert_equal_weights(python(tmp_path / "graph", graph=True).model, python(tmp_path / "eager").model)


def test_an_own_training_step_is_evaluated_as_often(tmp_path: Path) -> None:
    calls: list[int] = []

    class Own(Trainer):
        def training_step(self, batch: Any) -> Any:
            calls.append(self.iter)
            loss = self.compute_loss(self.model, batch)
            self.backward(loss)
            return loss.detach()

    trainer = python(tmp_path / "own", 2, Own)
    assert len(calls) > 2
    assert_equal_weights(trainer.model, python(tmp_path / "plain", 2).model)


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("run", [python, config_files])
def test_a_resumed_run_continues_bitwise(run: Callable[..., Any], tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", 6)
    run(tmp_path / "resumed", 3)
    resuming = {"resume_from_checkpoint": True} if run is python else {"resume": True}
    assert_equal_weights(run(tmp_path / "resumed", 6, **resuming).model, straight.model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gradient_accumulation_steps": 2}, "make each update of one batch"),
        ({"mixed_precision": "fp16"}, "use bfloat16 or float32"),
        ({"non_finite": "skip"}, "use 'stop' or 'warn'"),
    ],
)
def test_what_a_closure_excludes_is_refused_before_the_first_step(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"LBFGS computes loss and gradients several times in a step.*{said}"):
        python(tmp_path, **settings)


def test_beside_other_optimizers_it_needs_an_own_step(tmp_path: Path) -> None:
    def make(kind: type[Trainer]) -> Trainer:
        net = Net()
        both: dict[str, torch.optim.Optimizer] = {"body": torch.optim.SGD(net.body.parameters(), lr=0.1)}
        both["head"] = torch.optim.LBFGS(net.head.parameters())
        return kind(net, config(tmp_path, max_steps=2, optimizer="Adam"), rows(), optimizers=both)

    class Own(Trainer):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            self.backward(model(**inputs)["loss"], optimizer="body")
            self.step("body")

            def closure() -> Tensor:
                self.optimizers["head"].zero_grad()
                loss: Tensor = model(**inputs)["loss"]
                self.backward(loss, optimizer="head")
                return loss.detach()

            return {"step_loss": self.optimizers["head"].step(closure).detach()}  # type: ignore[arg-type]

    class Wrong(Own):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            self.backward(model(**inputs)["loss"])
            self.step()
            return {}

    with pytest.raises(ConfigError, match="write a train_step that calls"):
        make(Trainer).train()
    with pytest.raises(ConfigError, match="LBFGS needs a closure"):
        make(Wrong).train()
    trainer = make(Own)
    trainer.train()
    assert not torch.equal(trainer.model.head.weight, Net().head.weight)


class Newton(torch.optim.Optimizer):
    """Its step differentiates the gradients, as Adahessian."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = [one.grad for one in group["params"]]
            ones = [torch.ones_like(one) for one in gradients]
            second = torch.autograd.grad(gradients, group["params"], ones)
            with torch.no_grad():
                for parameter, curvature in zip(group["params"], second, strict=True):
                    parameter -= group["lr"] * parameter.grad / (curvature.abs() + 1)


class Declared(torch.optim.SGD):
    is_second_order = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("refused before the first step")


class Mentioned(torch.optim.SGD):
    """Unlike ``torch.autograd.grad(gradients, parameters)`` in others, its step needs no graph."""


@pytest.mark.parametrize("api", ["Trainer", "config file"])
def test_an_optimizer_that_differentiates_gradients_is_answered_with_the_step_to_write(
    api: str, tmp_path: Path
) -> None:
    for number, kind in enumerate((Declared, Newton)):
        with pytest.raises(
            ConfigError, match=rf"{kind.__name__} .*: its step differentiates the grad.*Override train_step .*run_step"
        ):
            run_of(kind, api, tmp_path / str(number))
    run_of(Mentioned, api, tmp_path / "mentioned")


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_step_of_the_users_own_gives_it_a_graph(tmp_path: Path) -> None:
    class Mine(Trainer):
        def train_step(self, model: Any, inputs: Any) -> Any:
            loss = model(**inputs)["loss"]
            loss.backward(create_graph=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return {"step_loss": loss.detach()}

    model = Net()
    before = copy.deepcopy(model)
    fields = quiet(tmp_path, batch_size=4, num_epochs=1, metrics=[], eval_strategy="no")
    Mine(model, fields, rows(), optimizer=Newton(model.parameters(), lr=0.1)).train()
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))

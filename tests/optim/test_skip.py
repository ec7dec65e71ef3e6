"""A left-out update leaves weights, optimizer state and running statistics bit for bit as they were."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.optim.clip import gradient_norm
from trainwright.optim.skip import ScaledStep, SkipNonFinite

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=generator), torch.randint(2, (6,), generator=generator)) for _ in range(count)]


def update(
    model: nn.Module, optimizer: Any, skip: SkipNonFinite, batch: Any, spoil: str = "", scaler: Any = None
) -> bool | None:
    """Forward, backward, step; with NaN in the ``input``, or only in the ``loss``, or only in a ``gradient``."""
    inputs, labels = batch
    skip.begin()
    loss = F.cross_entropy(model(inputs * math.nan if spoil == "input" else inputs), labels)
    loss = loss + math.inf if spoil == "loss" else loss
    (loss if scaler is None else scaler.scale(loss)).backward()
    if spoil == "gradient":
        next(model.parameters()).grad[0, 0] = math.inf
    if scaler is not None:
        scaler.unscale_(optimizer)
    skip.record_loss(loss)
    skipped = skip.step(gradient_norm(optimizer)())
    optimizer.zero_grad()
    return None if skipped is None else bool(skipped)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    # BatchNorm counts its batches in an integer, which a left-out one may have changed.
    weights = [value for value in model.state_dict().values() if value.is_floating_point()]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return copy.deepcopy([*weights, *states])


@pytest.mark.exhaustive(every=6)
@pytest.mark.parametrize("spoil", ["input", "loss", "gradient"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [0, 2])
def test_the_run_is_the_one_without_that_batch(name: str, spoil: str, bad: int) -> None:
    results = []
    for skips in (False, True):
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        skip = SkipNonFinite(optimizer, model.buffers())
        for number, batch in enumerate(data(5)):
            if number != bad:
                assert update(model, optimizer, skip, batch) is False
            elif skips:
                assert update(model, optimizer, skip, batch, spoil) is True
        results.append(everything(model, optimizer))
    assert len(results[0]) == len(results[1])
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


class CountReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "reads"), [("adamw fused", 0), ("sgd fused", 0), ("sgd", 1)])
def test_what_an_update_waits_for(name: str, reads: int) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    skip = SkipNonFinite(optimizer, model.buffers())
    batch = data(1)[0]
    update(model, optimizer, skip, batch)
    skip.begin()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    with CountReads() as counted:
        skip.record_loss(loss)
        skip.step(gradient_norm(optimizer)())
    assert counted.reads == reads


@pytest.mark.parametrize("spoil", ["loss", "gradient", "input"])
def test_with_a_gradient_scaler_the_two_leave_out_what_each_has_found(spoil: str) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = copy.deepcopy(model.state_dict())
    update(model, optimizer, SkipNonFinite(optimizer, model.buffers(), grad_scaler=scaler), data(1)[0], spoil, scaler)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert scaler.get_scale() == (64.0 if spoil == "loss" else 32.0)  # a scale that was too large has been halved


def test_without_anything_to_judge_by_the_step_is_made() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    before = copy.deepcopy(model.state_dict())
    F.cross_entropy(model(data(1)[0][0]), data(1)[0][1]).backward()
    assert SkipNonFinite(optimizer).step(None) is None
    assert not torch.equal(next(model.parameters()), before["0.weight"])


@pytest.mark.parametrize("name", ["sgd", "sgd fused"])
def test_statistics_of_a_loop_that_does_not_announce_its_updates_are_left_alone(name: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    skip = SkipNonFinite(optimizer, model.buffers())
    update(model, optimizer, skip, data(1)[0])
    for spoil in (1.0, math.inf):
        (F.cross_entropy(model(data(2)[1][0]), data(2)[1][1]) * spoil).backward()
        statistics = copy.deepcopy(model[1].running_mean)
        skip.step(gradient_norm(optimizer)())
        optimizer.zero_grad()
        assert torch.equal(model[1].running_mean, statistics)


def fill_freed_memory() -> None:
    """What torch allocates next holds large numbers."""
    blocks = [torch.full((64, 64), 1e30) for _ in range(64)]
    del blocks


def step_twice(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
    """A step with infinite gradients, which is skipped, and one with gradients of 1."""
    scaler = torch.amp.GradScaler("cpu")
    step = ScaledStep(scaler, optimizer)
    for factor in (float("inf"), 1.0):
        fill_freed_memory()
        scaler.scale((weight * factor).sum()).backward()
        step()
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {}], ids=str)
def test_fused_sgd_after_a_skipped_first_step_is_a_first_step(settings: dict[str, Any]) -> None:
    weights = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    for weight, fused in zip(weights, (True, False), strict=True):
        step_twice(torch.optim.SGD([weight], lr=0.1, fused=fused, **settings), weight)
    assert torch.equal(weights[0], weights[1])


class OwnStep(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = self.compute_loss(model, inputs)
        self.backward(loss)
        self.step(self.optimizer)
        return {"step_loss": loss.detach()}


@pytest.mark.parametrize("trainer_class", [Trainer, OwnStep])
@pytest.mark.parametrize("non_finite", ["warn", "skip"])
def test_training_in_fp16_with_momentum_survives_an_overflow_in_its_first_update(
    trainer_class: type[Trainer], non_finite: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    x = torch.randn(32, 64) * 30  # gradients of the first layer overflow at a scale of 65536
    config = TrainingConfig(
        output_dir=str(tmp_path), num_epochs=2, batch_size=8, learning_rate=1e-4, mixed_precision="fp16",
        save_enabled=False, optimizer={"name_": "SGD", "momentum": 0.9}, non_finite=non_finite,
    )  # fmt: skip
    trainer = trainer_class(model, config, TensorDataset(x, (x[:, 0] > 0).long()))
    fill_freed_memory()
    trainer.train()
    assert trainer.run.grad_scaler is not None
    assert trainer.run.grad_scaler.get_scale() < 65536  # there was an overflow
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 10

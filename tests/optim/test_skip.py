"""A left-out update leaves weights, optimizer state and running statistics bit for bit as they were."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.optim.clip import gradient_norm
from trainwright.optim.skip import SkipNonFinite

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


def update(model: nn.Module, optimizer: Any, skip: SkipNonFinite, batch: Any, spoil: str = "") -> bool | None:
    """Forward, backward, step; with NaN in the ``input``, or only in the ``loss``, or only in a ``gradient``."""
    inputs, labels = batch
    skip.begin()
    loss = F.cross_entropy(model(inputs * math.nan if spoil == "input" else inputs), labels)
    if spoil == "loss":
        loss = loss + math.inf
    loss.backward()
    if spoil == "gradient":
        next(model.parameters()).grad[0, 0] = math.inf
    skip.record_loss(loss)
    skipped = skip.step(gradient_norm(optimizer)())
    optimizer.zero_grad()
    return None if skipped is None else bool(skipped)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    # BatchNorm counts its batches in an integer, which a left-out one may have changed.
    weights = [value for value in model.state_dict().values() if value.is_floating_point()]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return copy.deepcopy([*weights, *states])


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


def test_a_schedule_does_not_mistake_it_for_no_step() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    assert update(model, optimizer, SkipNonFinite(optimizer), data(1)[0], "loss") is True
    schedule.step()  # warnings are errors here


@pytest.mark.parametrize("spoil", ["loss", "gradient", "input"])
def test_with_a_gradient_scaler_the_two_leave_out_what_each_has_found(spoil: str) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    skip = SkipNonFinite(optimizer, model.buffers(), grad_scaler=scaler)
    before = copy.deepcopy(model.state_dict())
    inputs, labels = data(1)[0]
    skip.begin()
    loss = F.cross_entropy(model(inputs * math.nan if spoil == "input" else inputs), labels)
    loss = loss + math.nan if spoil == "loss" else loss
    scaler.scale(loss).backward()
    if spoil == "gradient":
        next(model.parameters()).grad[0, 0] = math.inf
    scaler.unscale_(optimizer)
    skip.record_loss(loss)
    skip.step(gradient_norm(optimizer)())
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

"""Gradients of several processes are averaged, also where a rank has none; one process is the reference."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks import on_ranks
from tests.toys import quiet
from trainwright import Trainer
from trainwright.base.dist import get_rank
from trainwright.data import ColumnDataset
from trainwright.engine import gradient_sync
from trainwright.engine.gradient_sync import Replica, average_gradients
from trainwright.hooks import CallbackHook

INPUTS = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0))  # a batch for each of two updates and ranks


class Branches(nn.Module):
    """``second`` takes part in a loss only if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, inputs: Tensor, *, both: bool) -> Tensor:
        return (self.first(inputs) + (self.second(inputs) if both else 0)).square().mean()


def averaged() -> tuple[list[Any], bool]:
    """Gradients of rank + 1; the second parameter has one on rank 1 only, the third on none, the fourth is frozen."""
    rank = get_rank()
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    parameters[0].grad = torch.full((2,), rank + 1.0)
    if rank == 1:
        parameters[1].grad = torch.full((2,), 8.0)
    parameters[3].requires_grad_(False)
    all_take_part = average_gradients(parameters)
    return [None if p.grad is None else p.grad.tolist() for p in parameters], all_take_part


def test_a_missing_gradient_counts_as_zero_and_stays_missing_where_no_rank_has_one() -> None:
    for gradients, all_take_part in on_ranks(averaged):
        assert gradients == [[1.5, 1.5], [4.0, 4.0], None, None]
        assert not all_take_part


def takes_both(update: int, micro_step: int, period: int) -> bool:
    """Whether the second branch takes part: in every other update, or in the first one of ``period`` batches."""
    return micro_step % period == 0 if period else update % 2 == 1


def replicated(accumulation: int, frozen_at: int | None, period: int, ranks: int = 1) -> list[Tensor]:
    """Four updates; the second branch takes part in some batches, and a bias may be frozen on the way.

    ``ranks``: one process computes the batches of so many, for the mean of their losses.
    """
    model = Branches()
    holder: dict[str, Any] = {"model": model}
    replica = Replica(model, torch.device("cpu"), lambda wrapped: holder.update(model=wrapped)) if ranks == 1 else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(4):
        if update == frozen_at:
            model.first.bias.requires_grad_(False)
        for micro_step in range(accumulation):
            if replica is not None:
                replica.before_batch(is_last=micro_step == accumulation - 1)
            for rank in [get_rank()] if ranks == 1 else range(ranks):
                batch = INPUTS[(update % 2) * 2 + rank]
                loss = holder["model"](batch, both=takes_both(update, micro_step, period))
                (loss / accumulation / ranks).backward()
        if replica is not None:
            replica.finish()
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().clone() for value in model.state_dict().values()]


def all_replicas() -> list[list[Tensor]]:
    return [replicated(*case) for case in CASES]


# Micro-batches, the update that freezes, the period of batches that use both branches.
CASES = [(1, None, 0), (3, None, 0), (1, 2, 0), (2, 1, 0), (2, None, 2), (3, 2, 2)]


def test_a_replica_has_the_weights_of_one_process() -> None:
    first, second = on_ranks(all_replicas)
    for case, ours, theirs in zip(CASES, first, second, strict=True):
        for left, right, expected in zip(ours, theirs, replicated(*case, ranks=2), strict=True):
            assert torch.equal(left, right)
            torch.testing.assert_close(left, expected, rtol=1e-6, atol=1e-7)  # float32 sums in another order


class Counts(nn.Module):
    """Its buffer counts what this rank has read; ``found`` is the buffer at each forward pass."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(1))
        self.found: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.found.append(self.seen.item())
        self.seen += get_rank() + 1
        return self.layer(inputs).mean()


def buffers_of_updates() -> list[float]:
    model, wrapped = Counts(), []
    replica = Replica(model, torch.device("cpu"), wrapped.append)
    for inputs in INPUTS[:3]:
        for is_last in (False, True):
            replica.before_batch(is_last=is_last)
            wrapped[-1](inputs).backward()
        replica.finish()
        model.zero_grad()
    return model.found


def test_each_update_starts_with_the_buffers_of_the_first_rank() -> None:
    first, other = on_ranks(buffers_of_updates)
    assert first == [0, 1, 2, 3, 4, 5]
    assert other == [0, 2, 2, 4, 4, 6]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Any) -> dict[str, Any]:
        return {"loss": self.head(self.norm(x)).square().mean()}


class Own(Trainer):
    def train_step(self, model: Any, inputs: Any) -> Any:
        loss = model(**inputs)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"step_loss": loss.detach()}


def means_with(folder: Path, kind: type[Trainer]) -> list[list[float]]:
    """The running means of a model after each of six updates."""
    torch.manual_seed(0)
    net, data = Net(), ColumnDataset(x=torch.randn(48, 3) * torch.arange(48)[:, None])
    found: list[list[float]] = []
    settings = {"num_epochs": 1, "batch_size": 4, "optimizer": "SGD", "learning_rate": 0.01, "seed": 0, "metrics": []}
    trainer = kind(net, quiet(folder, save_enabled=False, **settings), data)
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: found.append(net.norm.running_mean.tolist()))])  # type: ignore[union-attr]
    trainer.train()
    return found


def test_with_a_step_of_the_users_the_first_ranks_buffers_are_sent_before_each_update(tmp_path: Path) -> None:
    """Otherwise those of the other processes would drift away."""
    expected, found = (on_ranks(means_with, tmp_path / kind.__name__, kind) for kind in (Trainer, Own))
    for rank in range(2):
        torch.testing.assert_close(torch.tensor(found[rank]), torch.tensor(expected[rank]), rtol=1e-5, atol=1e-5)
    assert expected[0] != expected[1]  # each process has added its own batch since


class Pair(nn.Module):
    """Two networks of 20 parameters each, and two losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (nn.Sequential(*(nn.Linear(6, 6) for _ in range(10))) for _ in range(2))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        one = self.one(inputs)
        return {"one": one.square().mean(), "two": self.two(one.detach()).abs().mean()}


class InTurn(Trainer):
    """Steps each optimizer on its loss."""

    def train_step(self, model: Any, inputs: Any) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        for name in ("one", "two"):
            with self.toggled(self.optimizers[name]):
                losses[name] = model(inputs["inputs"])[name]
                self.backward(losses[name])
                self.step(self.optimizers[name])
        return {"step_loss": sum(losses.values())}  # type: ignore[dict-item]


def trained_in_turn(folder: Path) -> tuple[int, list[Tensor]]:
    """The all-reduces of floats in an update, and the weights after four updates of 8 samples of all ranks."""
    model, world = Pair(), torch.distributed.is_initialized()
    optimizers = {name: torch.optim.SGD(getattr(model, name).parameters(), lr=0.1) for name in ("one", "two")}
    size = 4 if world else 8
    config = quiet(folder, batch_size=size, num_epochs=1, metrics=None, dataloader_shuffle=False)
    trainer = InTurn(model, config, ColumnDataset(inputs=INPUTS.reshape(32, 6)), optimizers=optimizers)
    calls, before = [0], torch.distributed.all_reduce

    def counted(tensor: Tensor, *args: Any, **named: Any) -> Any:
        calls[0] += tensor.is_floating_point() and tensor.numel() >= 6 * 7  # others are logged values
        return before(tensor, *args, **named)

    torch.distributed.all_reduce = counted
    try:
        trainer.train()
    finally:
        torch.distributed.all_reduce = before
    return calls[0], [p.detach().clone() for p in model.parameters()]


def in_small_buckets(folder: Path) -> tuple[int, list[Tensor]]:
    gradient_sync.BUCKET_BYTES = 4 * 6 * 7 * 3  # three layers
    return trained_in_turn(folder)


def test_several_optimizers_of_an_own_step_average_their_gradients_in_buckets(tmp_path: Path) -> None:
    _, expected = trained_in_turn(tmp_path)
    for function, calls in ((trained_in_turn, 4 * 2), (in_small_buckets, 4 * 2 * 4)):
        for number, weights in on_ranks(function, tmp_path / str(calls)):
            assert number == calls  # one for each optimizer and update, not one for each parameter
            for one, other in zip(weights, expected, strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-6)


def mixed_gradients() -> list[Any]:
    rank = get_rank()
    kinds = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
    parameters = [nn.Parameter(torch.zeros(2, 3, dtype=kind)) for kind in kinds]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full((2, 3), number + 2.0 * rank, dtype=parameter.dtype)
    parameters[2].grad = torch.arange(6.0).reshape(3, 2).T * (1 + rank)  # another order in memory
    sparse = nn.Parameter(torch.zeros(3, 1))
    sparse.grad = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1, 1), (3, 1))
    average_gradients([*parameters, sparse, nn.Parameter(torch.tensor(0.0))])
    return [p.grad.to_dense().tolist() for p in (*parameters, sparse) if p.grad is not None]


def test_gradients_of_several_types_are_averaged() -> None:
    for first, second, third, fourth, sparse in on_ranks(mixed_gradients):
        assert (first, second, fourth) == ([[1.0] * 3] * 2, [[2.0] * 3] * 2, [[4.0] * 3] * 2)
        assert third == [[0.0, 3.0, 6.0], [1.5, 4.5, 7.5]]
        assert sparse == [[0.5], [0.5], [0.0]]

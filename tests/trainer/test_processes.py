"""What comes back of several GPUs is joined as one batch's: here with the GPUs left out."""

import logging
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SubsetRandomSampler, WeightedRandomSampler

from tests.ranks import on_ranks
from trainwright.engine import TrainingLoop
from trainwright.engine.loaders import warn_of_unsharded
from trainwright.parallel.data_parallel import setup_dist_util
from trainwright.trainer.processes import AllGPUs, has_all_gpus

CPU = torch.device("cpu")


def halves(sizes: tuple[int, int]) -> AllGPUs:
    model = AllGPUs(nn.Linear(2, 2))
    model._sizes = list(sizes)
    return model


def test_a_loss_is_the_mean_over_samples() -> None:
    outputs = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(4.0)}]
    assert halves((2, 1)).gather(outputs, CPU)["loss"] == 2.0


def test_a_loss_of_tokens_is_the_mean_over_tokens_and_one_over_none_has_no_part() -> None:
    outputs = [
        {"loss": torch.tensor(3.0), "num_tokens": torch.tensor(5)},
        {"loss": torch.tensor(torch.nan), "num_tokens": torch.tensor(0)},
    ]
    joined = halves((2, 2)).gather(outputs, CPU)
    assert (joined["loss"], joined["num_tokens"]) == (3.0, 5)


def test_gradients_flow_through_the_joined_loss() -> None:
    weight = torch.ones((), requires_grad=True)
    loss: Tensor = halves((3, 1)).gather([weight * 2, weight * 6], CPU)
    loss.backward()
    assert (loss.item(), weight.grad) == (3.0, torch.tensor(3.0))


def test_one_gpu_and_other_devices_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert has_all_gpus("cuda")
    assert not any(map(has_all_gpus, (None, "cpu", "cuda:1")))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not has_all_gpus("cuda")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not has_all_gpus("cuda")


class OwnBatches(BatchSampler):
    """It may know the processes."""


def warned_of() -> list[bool]:
    setup_dist_util({"device_type": "cpu", "data_parallel_size": None})
    data, rank = torch.arange(8), torch.distributed.get_rank()
    weighted, part = WeightedRandomSampler([1.0] * 8, 4), DistributedSampler(data)
    loaders = [
        DataLoader(data, 2),
        DataLoader(data, 2, sampler=weighted),
        DataLoader(data, batch_sampler=BatchSampler(weighted, 2, drop_last=False)),
        DataLoader(data, 2, sampler=SubsetRandomSampler(range(4))),
        DataLoader(data, 2, sampler=SubsetRandomSampler(range(rank, 8, 2))),
        DataLoader(data, 2, sampler=part),
        DataLoader(data, batch_sampler=OwnBatches(part, 2, drop_last=False)),
    ]
    found: list[str] = []
    logging.getLogger("trainwright.engine").addHandler(Kept(found))
    counts = []
    for loader in loaders:
        warn_of_unsharded(loader, "Trainer.train_dataloader")
        counts.append(len(found))
    return [after > before for before, after in pairwise([0, *counts])]


class Kept(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def test_a_loader_that_gives_each_process_all_samples_is_warned_of() -> None:
    assert on_ranks(warned_of) == [[True, True, True, True, False, False, False]] * 2


def loop_warned_of(folder: str) -> list[list[str]]:
    setup_dist_util({"device_type": "cpu", "data_parallel_size": None})
    data, found, warned = torch.arange(8.0)[:, None], [], []
    logging.getLogger("trainwright.engine").addHandler(Kept(found))
    for number, sampler in enumerate((None, DistributedSampler(data))):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, 2, sampler=sampler)
        for batch in TrainingLoop(model, optimizer, loader, max_iter=2, output_dir=f"{folder}/{number}"):
            model(batch).mean().backward()
            optimizer.step()
        warned.append([one.partition(":")[0] for one in found if "reads all of its batches" in one])
        found.clear()
    return warned


def test_a_loop_of_the_users_own_is_warned_of_such_a_loader(tmp_path: Path) -> None:
    assert on_ranks(loop_warned_of, str(tmp_path)) == [[["TrainingLoop.data_loader"], []]] * 2

"""The batches of a training: each epoch is opened by its first batch, with and without workers, and at any position."""

import random
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler, Subset, TensorDataset

from tests.toys import Stream
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import build_image_train_loader
from trainwright.data.batches import Batches, Repeated
from trainwright.data.seeding import random_state, seed_everything, set_random_state


class Epochs(Dataset[Any]):
    """A sample is the epoch that the data set knows, and its index."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.epoch = self.changed = -1

    def set_epoch(self, epoch: int) -> None:
        self.calls.append(epoch)
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.epoch, self.changed, index])


def read(batches: Batches, number: int) -> list[Any]:
    return [batches.next() for _ in range(number)]


def test_a_loader_of_a_stream_is_read_again_and_again() -> None:
    batches = Batches(DataLoader(Stream([1, 2, 3]), 2))
    batches.start(0)
    assert [batch.tolist() for batch in read(batches, 4)] == [[1, 2], [3], [1, 2], [3]]


@pytest.mark.parametrize("done", [0, 2, 3, 4, 7])
def test_batches_start_where_a_run_stopped(done: int) -> None:
    batches = Batches([10, 11, 12], length=3)
    batches.start(done)
    assert read(batches, 5) == [10 + (done + n) % 3 for n in range(5)]
    assert batches.done == done + 5


def test_a_loader_is_iterated_again_when_it_ends() -> None:
    assert list(islice(Batches([1, 2, 3], prepare=str), 7)) == [1, 2, 3, 1, 2, 3, 1]
    assert read(Batches([1, 2, 3], prepare=str), 4) == ["1", "2", "3", "1"]


@pytest.mark.parametrize("prefetches", [False, True])
def test_a_generator_goes_on_after_the_batches_of_another_run_are_gone(prefetches: bool) -> None:
    numbers = (number for number in count())
    found = []
    for _ in range(3):
        batches = Batches(numbers, prefetches_to=torch.device("cpu") if prefetches else None)
        found += read(batches, 2)
        batches.close()
    assert found == [0, 1, 2, 3, 4, 5]


def test_set_epoch_of_a_sampler_is_called_for_each_epoch() -> None:
    data = TensorDataset(torch.arange(8))
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    batches = Batches(DataLoader(data, 4, sampler=sampler), length=2)
    batches.start(3)  # in the middle of the second epoch
    found = [batch[0].tolist() for batch in read(batches, 3)]
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(2)
    assert found == [second[4:], list(sampler)[:4], list(sampler)[4:]]


class Shuffled(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(number + self.epoch) % 4 for number in range(4)])

    def __len__(self) -> int:
        return 4


class ShuffledBatches(Shuffled):
    def __iter__(self) -> Iterator[Any]:
        return iter([[index] for index in super().__iter__()])


@pytest.mark.parametrize("length", [4, None])
def test_set_epoch_of_a_batch_sampler_and_of_the_sampler_inside_is_called(length: int | None) -> None:
    for sampler in (ShuffledBatches(), BatchSampler(Shuffled(), 1, drop_last=False)):
        loader = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=sampler)  # type: ignore[arg-type]
        found = [int(batch[0]) for batch in read(Batches(loader, length=length), 12)]
        assert found == [0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1]


def test_a_loader_that_ends_early_or_is_empty_is_an_error() -> None:
    with pytest.raises(ConfigError, match="list gave 2 batches, but its length is 3"):
        list(Batches([1, 2], length=3))
    with pytest.raises(ConfigError, match="DataLoader gave no batch"):
        next(Batches(DataLoader(TensorDataset(torch.arange(3)), batch_size=4, drop_last=True)))
    with pytest.raises(ConfigError, match=r"generator gave no batch: it can be read once\. Give a DataLoader"):
        list(Batches(number for number in range(2)))


def test_a_sampler_of_single_indices_is_answered_with_the_line_to_write() -> None:
    loader = build_image_train_loader([TensorDataset(torch.arange(4))], 2, sampler=Shuffled(), num_workers=0)
    with pytest.raises(ConfigTypeError, match=r"Shuffled yields single indices.*BatchSampler\(sampler, batch_size"):
        next(iter(loader[0] if isinstance(loader, tuple) else loader))


@pytest.mark.parametrize(
    ("options", "is_logged"),
    [({"num_workers": 1}, True), ({}, False), ({"num_workers": 1, "persistent_workers": True}, False)],
)
def test_workers_that_restart_in_each_epoch_are_logged(
    options: Any, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="trainwright.data"):
        batches = Batches(DataLoader(TensorDataset(torch.arange(3)), **options))
        next(batches)
    batches.close()
    assert ("persistent_workers=True keeps them" in caplog.text) == is_logged


@pytest.mark.parametrize("workers", [0, 1])
def test_each_sample_knows_the_epoch_it_belongs_to(workers: int) -> None:
    """Batches of 3 of 8 samples run across the ends of epochs, and workers read ahead."""
    data = Epochs()
    loader, _, _ = build_image_train_loader(data, 3, num_workers=workers)
    batches = Batches(loader)
    samples = torch.cat(read(batches, 7))
    batches.close()
    assert samples[:, 0].tolist() == [number // 8 for number in range(21)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_data_set_gets_the_epoch_in_workers_that_are_kept(workers: int, is_ours: bool) -> None:
    data = Epochs()
    inner = Subset(data, range(8))
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loader: Any = DataLoader(inner, 4, **options)
    if is_ours:
        loader, _, _ = build_image_train_loader(inner, 4, **options)
    batches = Batches(loader, length=None if is_ours else 2)
    samples = torch.cat(read(batches, 5))
    batches.close()
    assert samples[:, 0].tolist() == [0] * 8 + [1] * 8 + [2] * 4
    assert data.calls == [0, 1, 2] or (is_ours and workers and data.calls[0] == 0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [4, 3])
def test_workers_see_what_was_changed_before_the_first_batch_of_an_epoch(workers: int, size: int) -> None:
    data = Epochs()
    loader, _, _ = build_image_train_loader(data, size, num_workers=workers)
    whole, found = Batches(loader, may_change=lambda: True), []
    for number in range(7):
        data.changed = number * size // 8  # the epoch of its first sample
        found.append(whole.next()[:, 1].unique().tolist())
    whole.close()
    assert found == [[number * size // 8] for number in range(7)]


@pytest.mark.parametrize("may_change", [True, False])
def test_kept_workers_of_a_loader_of_torch_start_again_where_the_data_may_have_changed(may_change: bool) -> None:
    data = Epochs()
    batches = Batches(
        DataLoader(_Changing(data), 4, num_workers=1, persistent_workers=True), length=2, may_change=lambda: may_change
    )
    found = []
    for number in range(4):
        data.changed = number // 2
        found.append(batches.next()[:, 1].unique().tolist())
    batches.close()
    assert found == ([[0], [0], [1], [1]] if may_change else [[0]] * 4)


class _Changing(Dataset[Any]):
    """Hides ``set_epoch`` of the data."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def shuffled(kind: str) -> Any:
    """A loader of the user's own that shuffles."""
    data, seeded = TensorDataset(torch.arange(24)), torch.Generator().manual_seed(3)
    if kind == "numpy":
        return Iterated(lambda: iter(np.random.permutation(6).tolist()))
    if kind == "passes":
        return Repeated(DataLoader(Stream(lambda: (torch.rand(1) for _ in range(5))), None, num_workers=1), 24)
    if kind in OWN_GENERATORS:
        return DataLoader(data, 4, sampler=Drawn(OWN_GENERATORS[kind]()))
    return DataLoader(
        data, 4, shuffle=True, generator=seeded if kind == "generator" else None, num_workers=kind == "workers"
    )


class Drawn(Sampler[int]):
    """An order by a generator that is an attribute."""

    def __init__(self, generator: Any) -> None:
        self.draws = generator

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        order = list(range(24))
        self.draws.shuffle(order)
        return iter(order)


OWN_GENERATORS: dict[str, Callable[[], Any]] = {
    "python's own": lambda: random.Random(3),
    "numpy's own": lambda: np.random.default_rng(3),
    "numpy's old": lambda: np.random.RandomState(3),
}


class Iterated:
    """A loader without a length."""

    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return self._read()


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("done", [2, 6, 8, 12])
@pytest.mark.parametrize("kind", ["generator", "global", "workers", "numpy", "passes", *OWN_GENERATORS])
@pytest.mark.usefixtures("forked_workers")
def test_the_order_of_a_users_loader_goes_on_where_its_generators_were(kind: str, done: int) -> None:
    length = {"numpy": None, "passes": 24}.get(kind, 6)

    def draw() -> None:  # as dropout does in each step
        torch.rand(1), np.random.rand()

    def following(batches: Batches, number: int) -> list[str]:
        found = []
        for _ in range(number):
            found.append(str(batches.next()))
            draw()
        return found

    seed_everything(0)
    batches = Batches(shuffled(kind), length=length)
    batches.start(0)
    following(batches, done)
    position, generators = batches.state(), random_state()
    expected = following(batches, 10)
    batches.close()  # torch waits 5 s for each worker that the garbage collector ends
    assert position is not None

    seed_everything(1)
    resumed = Batches(shuffled(kind), length=length)
    resumed.load_state(position)
    set_random_state(generators)
    resumed.start(done, keeps_generators=None if length else True)
    assert following(resumed, 10) == expected
    resumed.close()

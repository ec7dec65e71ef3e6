"""Tensors side by side are read by whole batches, with the same result as sample by sample."""

from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset, random_split

from trainwright.data import EpochSampler, collate
from trainwright.data.batch_loader import make_loader

X = torch.randn(23, 3, 2)
Y = torch.arange(23)
FLAGS = X[:, 0, 0] > 0


class Sample(TensorDataset):
    """Its batches are made of samples: it is not torch's own class."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        Sample.reads += 1
        return super().__getitem__(index)


def batches(dataset: Any, workers: int = 0, **options: Any) -> list[Any]:
    sampler = EpochSampler(range(len(dataset)), 5, shuffle=True, seed=3)
    sampler.endless = False
    settings = {"seed": 3, "num_workers": workers, "collate_fn": None, "loader_options": {}, **options}
    return list(make_loader(dataset, sampler, **settings))


def assert_equal(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert type(a) is type(b) is list
        for one, other in zip(a, b, strict=True):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_those_of_samples(workers: int) -> None:
    Sample.reads = 0
    assert_equal(batches(TensorDataset(X, Y, FLAGS), workers), batches(Sample(X, Y, FLAGS)))
    assert Sample.reads == 23


def test_a_part_of_one_as_well() -> None:
    part, _ = random_split(TensorDataset(X, Y), [15, 8], torch.Generator().manual_seed(0))
    assert_equal(batches(part), batches(Subset(Sample(X, Y), part.indices)))
    assert_equal(batches(Subset(TensorDataset(X, Y), range(4, 20))), batches(Sample(X[4:20], Y[4:20])))


def test_what_is_changed_in_the_tensors_is_read() -> None:
    data = TensorDataset(X.clone(), Y)
    data.tensors[0].zero_()
    assert all(not inputs.any() for inputs, _ in batches(data))


def test_a_batch_is_no_view_of_the_data() -> None:
    x = X.clone()
    batch = batches(TensorDataset(x, Y))[0]
    batch[0].zero_()
    assert torch.equal(x, X)


def test_a_collate_function_of_ones_own_gets_samples() -> None:
    seen: list[Any] = []

    def mine(samples: list[Any]) -> Any:
        seen.extend(samples)
        return collate(samples)

    assert_equal(batches(TensorDataset(X, Y), collate_fn=mine), batches(Sample(X, Y)))
    assert len(seen) == 23


def test_indices_beyond_the_end_are_refused() -> None:
    loader = make_loader(TensorDataset(X), [[1, 99]], seed=0, num_workers=0, collate_fn=None, loader_options={})
    with pytest.raises(IndexError):
        list(loader)

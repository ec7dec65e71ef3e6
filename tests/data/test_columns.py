"""Tensors side by side are read by whole batches, with the same result as sample by sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from trainwright.base.errors import UserError
from trainwright.data import ColumnDataset, EpochSampler, collate
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
    sampler.infinite = False
    settings = {"seed": 3, "num_workers": workers, "collate_fn": None, "loader_options": {}, **options}
    return list(make_loader(dataset, sampler, **settings))


def read(dataset: Any, *rows: list[int]) -> list[Any]:
    """The batches of these indices."""
    return list(make_loader(dataset, rows, seed=0, num_workers=0, collate_fn=None, loader_options={}))


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


def test_batches_of_a_part_are_those_of_its_samples() -> None:
    part, _ = random_split(TensorDataset(X, Y), [15, 8], torch.Generator().manual_seed(0))
    assert_equal(batches(part), batches(Subset(Sample(X, Y), part.indices)))
    assert_equal(batches(Subset(TensorDataset(X, Y), range(4, 20))), batches(Sample(X[4:20], Y[4:20])))

    inner = Subset(TensorDataset(X, Y), range(2, 20, 2))
    assert_equal(batches(Subset(inner, [8, 0, 3, 5, 1])), batches(Subset(Sample(X, Y), [18, 2, 8, 12, 4])))


def test_a_batch_is_read_from_the_tensors_and_is_no_view() -> None:
    data = TensorDataset(X.clone(), Y)
    data.tensors[0].zero_()
    assert all(not inputs.any() for inputs, _ in batches(data))

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


def columns() -> ColumnDataset:
    return ColumnDataset(x=X.numpy(), labels=Y, flags=FLAGS, small=np.arange(23, dtype=np.uint16))


class Rows:
    """The same samples, one by one."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index], "labels": Y[index], "flags": FLAGS[index], "small": torch.tensor(index).to(torch.uint16)}


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_named_columns_are_those_of_samples(workers: int) -> None:
    data = columns()
    assert len(data) == 23
    assert {name: value.tolist() for name, value in data[7].items()} == {
        name: value.tolist() for name, value in Rows()[7].items()
    }
    found, expected = batches(data, workers), batches(Rows())
    assert [[*batch] for batch in found] == [["x", "labels", "flags", "small"]] * 5
    assert_equal([[*batch.values()] for batch in found], [[*batch.values()] for batch in expected])
    part = batches(Subset(data, range(3, 9)))
    assert sorted(label for batch in part for label in batch["labels"].tolist()) == [*range(3, 9)]


def test_columns_are_not_copied_and_files_may_be_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    array = np.zeros(23)
    data = ColumnDataset(x=mapped, y=array)
    array[5] = 7
    assert data[5]["y"] == 7
    assert torch.equal(data[5]["x"], X[5])
    assert sum(batch["y"].sum() for batch in batches(data)) == 7


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"x": X, "y": Y[:5]}, "equally long: x has 23, y has 5"),
        ({}, "there is none"),
        ({"x": [1, 2]}, r"ColumnDataset.x: got list; .*torch.tensor\(list\)"),
        ({"x": torch.tensor(1)}, "got Tensor without a dimension"),
        ({"x": np.array(["a"])}, "an array of <U1 that cannot be a tensor"),
        ({"x": np.arange(4)[::-1]}, "forward strides"),
    ],
)
def test_columns_that_are_none_are_refused(given: dict[str, Any], fact: str) -> None:
    with pytest.raises(UserError, match=fact):
        ColumnDataset(**given)


def test_a_subclass_of_columns_is_read_by_samples() -> None:
    class Twice(ColumnDataset):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {name: 2 * column for name, column in super().__getitem__(index).items()}

    found = [label for batch in batches(Twice(y=Y)) for label in batch["y"].tolist()]
    assert sorted(found) == [2 * n for n in range(23)]


@pytest.mark.parametrize("indices", [[-1, 3, -5, 0, 7], np.array([-1, 3, 2]), torch.tensor([1, -2, 4])], ids=str)
def test_indices_of_a_subset_may_count_from_the_end(indices: Any) -> None:
    data = TensorDataset(X, Y)
    outer = Subset(Subset(data, indices), [-1, 0, 1])
    samples = [[collate([Subset(data, indices)[index] for index in (-1, 0, 1)])]]
    assert_equal(read(outer, [0, 1, 2]), samples[0])


@pytest.mark.parametrize("indices", [[0.7, 1.2], ["a", "b"], [1, 99]], ids=str)
def test_indices_that_are_none_fail_as_the_data_set_does(indices: Any) -> None:
    part = Subset(TensorDataset(X, Y), indices)
    try:
        expected = list(DataLoader(part, batch_size=2))[:1]
    except (IndexError, TypeError) as error:
        with pytest.raises(type(error)):
            read(part, [0, 1])
    else:
        assert_equal(read(part, [0, 1]), expected)


def test_what_a_data_set_is_given_between_epochs_is_read() -> None:
    columns, tensors = ColumnDataset(x=X, y=Y), TensorDataset(X, Y)
    part = Subset(tensors, [0, 1, 2])
    for data, change in (
        (columns, lambda: columns.columns.update(y=Y + 100)),
        (tensors, lambda: setattr(tensors, "tensors", (X, Y + 100))),
        (part, lambda: setattr(part, "indices", [7, 8, 9])),
    ):
        loader = make_loader(data, [[0, 2]], seed=0, num_workers=0, collate_fn=None, loader_options={})
        list(loader)
        change()
        (batch,), expected = list(loader), collate([data[0], data[2]])
        keys = range(2) if isinstance(expected, list) else ("x", "y")
        assert all(torch.equal(batch[key], expected[key]) for key in keys)

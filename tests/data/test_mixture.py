"""Mixtures: exact shares, every sample of a source before one comes again, exact positions, on any number of ranks."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from tests.toys import Samples
from trainwright import LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import (
    CyclicSampler,
    EpochSampler,
    MixedDataset,
    MixedStream,
    StreamLoader,
    build_image_test_loader,
    build_nlp_train_loader,
)


def test_a_dict_without_weights_is_refused(tmp_path: Path) -> None:
    config = TrainingConfig(output_dir=tmp_path)
    with pytest.raises(ConfigTypeError, match=r"'b' has no weight; give \{name: \(data set, weight\), ...\}"):
        Trainer(nn.Linear(1, 1), config, {"a": (range(3), 0.5), "b": range(3)})


def numbers(first: int, length: int) -> list[int]:
    return list(range(first, first + length))


def mixture(**settings: Any) -> MixedDataset:
    return MixedDataset([numbers(0, 50), numbers(1000, 7)], [0.7, 0.3], **settings)


def epochs(data: MixedDataset, count: int, **settings: Any) -> list[list[int]]:
    sampler = EpochSampler(data, 1, shuffle=True, **settings)
    indices = iter(sampler)
    return [[data[next(indices)[0]] for _ in range(len(data))] for _ in range(count)]


def test_an_epoch_has_the_share_of_each_source() -> None:
    data = mixture(length=40)
    found = epochs(data, 7)
    assert [sum(value >= 1000 for value in epoch) for epoch in found] == [12] * 7
    assert len({tuple(epoch) for epoch in found}) == 7
    small = Counter(value for epoch in found for value in epoch if value >= 1000)
    assert set(small.values()) == {12}  # 84 = 12 passes over 7
    large = Counter(value for epoch in found for value in epoch if value < 1000)
    assert set(large.values()) <= {3, 4}  # 196 of 50
    places = [place for epoch in found for place, value in enumerate(epoch) if value >= 1000]
    assert 15 < sum(places) / len(places) < 24  # spread over the epoch


def test_the_default_length_is_that_of_all_sources() -> None:
    assert len(mixture()) == 57
    assert [mixture()[index] for index in (0, 49, 50, 56)] == [0, 49, 1000, 1006]
    in_order = [index for batch in islice(CyclicSampler(mixture(), 1), 57) for index in batch]
    assert in_order == [*range(40), *(50 + k % 7 for k in range(17))]  # the shares follow each other


@pytest.mark.parametrize("lengths", [None, list(range(57))])
def test_positions_and_ranks_have_the_same_batches(lengths: Any) -> None:
    whole = list(islice(CyclicSampler(mixture(), 4, shuffle=True, lengths=lengths), 40))
    for stop in (1, 14, 15, 30):
        later = CyclicSampler(mixture(), 4, shuffle=True, consumed_samples=4 * stop, lengths=lengths)
        assert list(islice(later, 10)) == whole[stop : stop + 10]
    ranks = [CyclicSampler(mixture(), 2, True, 0, rank, 2, lengths=lengths) for rank in (0, 1)]
    assert [one + two for one, two in islice(zip(*ranks, strict=True), 40)] == whole


class Stream(IterableDataset[Any]):
    def __init__(self, first: int, length: int) -> None:
        self.first, self.length, self.start, self.done = first, length, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        while self.done < self.length:
            self.done += 1
            yield self.first + self.done - 1


class StatefulStream(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["done"]


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("kind", [Stream, StatefulStream])
@pytest.mark.parametrize("settings", [{}, {"shuffle_buffer": 5, "data_parallel_rank": 1, "data_parallel_size": 2}])
@pytest.mark.slow
def test_streams_are_mixed_and_resume_exactly(kind: Any, settings: dict[str, Any]) -> None:
    def loader() -> StreamLoader:
        return StreamLoader(MixedStream([kind(0, 500), kind(1000, 7)], [3, 1], seed=5), 4, **settings)

    whole = [batch.tolist() for batch in islice(loader(), 600)]
    values = [value for batch in whole for value in batch]
    assert sum(value >= 1000 for value in values) / len(values) == pytest.approx(0.25, abs=0.03)
    assert len({value for value in values if value < 500}) == (500 if not settings else 250)
    for stop in (1, 5, 300, 590):
        first, later = loader(), loader()
        assert [batch.tolist() for batch in islice(first, stop)] == whole[:stop]
        later.load_state_dict(first.state_dict())
        assert [batch.tolist() for batch in islice(later, 8)] == whole[stop : stop + 8]


class NoisyStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from (number + torch.rand(()) for number in super().__iter__())


@pytest.mark.parametrize("shuffle_buffer", [None, 5])
def test_a_resume_draws_the_same_numbers_where_a_stream_reads_its_samples_again(shuffle_buffer: int | None) -> None:
    def loader() -> StreamLoader:
        mixture = MixedStream([NoisyStream(0, 30), NoisyStream(1000, 7)], [3, 1])
        return StreamLoader(mixture, 4, shuffle_buffer=shuffle_buffer)

    whole = [batch.tolist() for batch in islice(loader(), 20)]
    for stop in (1, 5, 12):
        first, later = loader(), loader()
        assert [batch.tolist() for batch in islice(first, stop)] == whole[:stop]
        later.load_state_dict(first.state_dict())
        assert [batch.tolist() for batch in islice(later, 8)] == whole[stop : stop + 8]


def rows(value: float, length: int) -> Samples:
    return Samples(value + torch.arange(length).repeat(3, 1).T, lambda index: index % 2, length=length)


@pytest.mark.exhaustive
def test_both_apis_take_a_dict_with_weights_and_resume(tmp_path: Path) -> None:
    def weights(folder: str, **settings: Any) -> torch.Tensor:
        torch.manual_seed(0)
        given: dict[str, Any] = {"batch_size": 4, "progress_bar": False, "lr": 0.01, "lr_scheduler_type": None}
        config = TrainingConfig(output_dir=tmp_path / folder, **given, **settings)
        trainer = Trainer(nn.Linear(3, 2), config, {"a": (rows(0.0, 20), 0.7), "b": (rows(9.0, 5), 0.3)})
        trainer.train()
        return trainer.model.weight

    whole = weights("whole")
    weights("cut", max_steps=8)
    assert torch.equal(weights("cut", resume_from_checkpoint=True), whole)

    parts = {"a": [LazyCall(rows)(value=0.0, length=20), 0.7], "b": [LazyCall(rows)(value=9.0, length=5), 0.3]}
    loader, _, _ = build_nlp_train_loader(parts, 5, num_workers=0)
    assert isinstance(loader.dataset, MixedDataset)
    first = torch.cat([batch[0][:, 0] for batch in islice(loader, 5)])
    assert int((first >= 9).sum()) >= 7


def test_wrong_mixtures_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 1 for 2 data sets"):
        MixedDataset([[1], [2]], [1.0])
    with pytest.raises(ConfigError, match=r"got \[1, 0\]; each must be a number above 0"):
        MixedDataset([[1], [2]], [1, 0])
    with pytest.raises(ConfigError, match=r"datasets\[1\]: list is empty"):
        MixedDataset([[1], []], [1, 1])
    with pytest.raises(ConfigTypeError, match=r"datasets\[0\]: Stream has no __getitem__.*MixedStream"):
        MixedDataset([Stream(0, 3)], [1])
    with pytest.raises(ConfigError, match=r"datasets\[0\]: Stream yields no sample"):
        next(iter(MixedStream([Stream(0, 0)], [1])))
    with pytest.raises(ConfigError, match=r"MixedStream: it has no end.*evaluate each of its streams"):
        build_image_test_loader(MixedStream([Stream(0, 5)], [1]), 2)

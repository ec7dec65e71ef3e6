"""Streams: each sample once per pass on any number of ranks and workers, and every position resumes exactly."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import (
    DataError,
    MixedStream,
    StreamLoader,
    build_image_test_loader,
    build_nlp_train_loader,
)
from trainwright.data.seeding import kept_generators


class Numbers(IterableDataset[Any]):
    """Without a state."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.length)


class Stateful(Numbers):
    """With a state, shared among ranks and workers, in another order in each pass; adds random numbers."""

    def __init__(self, length: int = 23, part: int = 0, num_parts: int = 1) -> None:
        super().__init__(length)
        self.part, self.num_parts, self.epoch = part, num_parts, 0
        self.start = self.done = 0

    def shard(self, num_shards: int, index: int) -> "Stateful":
        return Stateful(self.length, self.part * num_shards + index, self.num_parts * num_shards)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        own = list(range(self.length))
        random.Random(self.epoch).shuffle(own)
        own = own[self.part :: self.num_parts][worker::num_workers]
        self.done, self.start = self.start, 0
        while self.done < len(own):
            self.done += 1
            yield own[self.done - 1] + 0.5 * (random.random() < 0.5) + 0.25 * bool(torch.rand(()) < 0.5)


def batches(loader: StreamLoader, count: int) -> list[list[float]]:
    return [batch.tolist() for batch in islice(loader, count)]


KINDS = [
    (Stateful, {}),
    (Stateful, {"num_workers": 2}),
    (Stateful, {"shuffle_buffer": 5}),
    (Stateful, {"shuffle_buffer": 5, "num_workers": 2, "drop_last": True}),
    (Stateful, {"data_parallel_rank": 1, "data_parallel_size": 2}),
    (Numbers, {}),
    (Numbers, {"shuffle_buffer": 4, "drop_last": False}),
    (Numbers, {"num_workers": 1, "data_parallel_rank": 1, "data_parallel_size": 2}),
]


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
@pytest.mark.exhaustive(every=4)
@pytest.mark.slow
def test_every_position_resumes_exactly(kind: type, settings: dict[str, Any]) -> None:
    whole = batches(StreamLoader(kind(), 3, seed=7, **settings), 30)
    for stop in [1, 2, 7, 8, 15] if settings.get("num_workers") else range(1, 18):
        first = StreamLoader(kind(), 3, seed=7, **settings)
        assert batches(first, stop) == whole[:stop]
        later = StreamLoader(kind(), 3, seed=7, **settings)
        later.load_state_dict(first.state_dict())
        assert batches(later, 30 - stop) == whole[stop:], stop


def test_the_position_of_batches_read_ahead_is_known() -> None:
    loader, later = StreamLoader(Stateful(), 3), StreamLoader(Stateful(), 3)
    read = batches(loader, 9)
    later.load_state_dict(loader.state_dict(7))
    assert batches(later, 2) == read[7:]


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize(
    ("kind", "settings", "num_ranks"),
    [
        (Numbers, {}, 1),
        (Numbers, {}, 3),
        (Stateful, {}, 3),
        (Stateful, {"num_workers": 2}, 2),
        (Numbers, {"num_workers": 2}, 2),
    ],
)
@pytest.mark.parametrize("shuffle_buffer", [None, 6])
@pytest.mark.slow
def test_no_sample_comes_twice(
    kind: type, settings: dict[str, Any], num_ranks: int, shuffle_buffer: int | None
) -> None:
    seen: list[int] = []
    for rank in range(num_ranks):
        ranks = {"data_parallel_rank": rank, "data_parallel_size": num_ranks}
        loader = StreamLoader(
            kind(), 4, drop_last=False, infinite=False, shuffle_buffer=shuffle_buffer, **ranks, **settings
        )
        for number in (1, 2):  # each iteration is a pass
            seen += [int(value) for batch in loader for value in batch.tolist()]
            assert len(seen) * num_ranks >= 23 * number
    assert sorted(seen) == sorted([*range(23)] * 2)


def test_blocks_are_shuffled_and_batches_run_across_passes() -> None:
    loader = StreamLoader(Numbers(64), 8, shuffle_buffer=16, seed=1)
    first, second = batches(loader, 8), batches(loader, 8)
    assert first != second
    assert first != batches(StreamLoader(Numbers(64), 8, shuffle_buffer=16, seed=2), 8)
    assert [sorted(first[k] + first[k + 1]) for k in (0, 2, 4, 6)] == [list(range(k, k + 16)) for k in range(0, 64, 16)]

    assert batches(StreamLoader(Numbers(5), 2), 4) == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert batches(StreamLoader(Numbers(5), 2, drop_last=False), 4) == [[0, 1], [2, 3], [4], [0, 1]]
    assert batches(StreamLoader(Numbers(5), 2, drop_last=True), 3) == [[0, 1], [2, 3], [0, 1]]

    loader, _, _ = build_nlp_train_loader([Numbers(5)], 2, num_workers=0)
    assert batches(loader, 3) == [[0, 1], [2, 3], [4, 0]]
    test = build_image_test_loader(Numbers(5), 2, num_workers=0)
    assert [batch.tolist() for batch in test] == [batch.tolist() for batch in test] == [[0, 1], [2, 3], [4]]


def test_reading_leaves_the_generators_as_they_are() -> None:
    def next_numbers() -> tuple[float, ...]:
        with kept_generators():
            return random.random(), np.random.random(), float(torch.rand(()))

    before = next_numbers()
    batches(StreamLoader(Stateful(), 3, shuffle_buffer=4), 9)
    assert next_numbers() == before


def test_samples_that_are_read_again_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    first, later = StreamLoader(Numbers(), 3), StreamLoader(Numbers(), 3)
    batches(first, 5)
    later.load_state_dict(first.state_dict())
    with caplog.at_level("INFO", "trainwright.data"):
        batches(later, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "Numbers has no state_dict: 15 samples are read again and dropped."
    ]
    shorter = StreamLoader(Numbers(4), 3)
    shorter.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="pass 0 has 4 samples, but 15 were read before"):
        batches(shorter, 1)


def test_another_number_of_ranks_or_workers_starts_the_pass_again(caplog: pytest.LogCaptureFixture) -> None:
    first = StreamLoader(Stateful(), 3)
    batches(first, 10)
    later = StreamLoader(Stateful(), 3, data_parallel_rank=0, data_parallel_size=2)
    later.load_state_dict(first.state_dict())
    assert "saved by 1 ranks with 0 workers, and there are 2 with 0 now" in caplog.text
    expected = StreamLoader(Stateful(), 3, data_parallel_rank=0, data_parallel_size=2)
    expected.reader.starts = {0: {"batches": 0, "epoch": 1, "samples": 0, "offset": 0, "state": None}}
    assert [[int(v) for v in row] for row in batches(later, 3)]
    assert later.batches == 13


class Once(Numbers):
    def __init__(self) -> None:
        self.left = iter(range(10))

    def __iter__(self) -> Iterator[Any]:
        return self.left


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigTypeError, match="is an iterator"):
        StreamLoader(iter(Numbers()), 3)
    with pytest.raises(ConfigError, match="yields no sample"):
        batches(StreamLoader(Numbers(0), 3), 1)
    with pytest.raises(ConfigError, match=r"Once.__iter__ gave no sample when it was iterated again"):
        batches(StreamLoader(Once(), 5), 3)
    with pytest.raises(DataError, match="fewer samples than a batch of 30"):
        batches(StreamLoader(Numbers(), 30, drop_last=True), 1)
    with pytest.raises(ConfigError, match="remove sampler and bucket_by_length"):
        build_nlp_train_loader(Numbers(), 2, bucket_by_length=True)
    with pytest.raises(ConfigError, match="shuffle_buffer: got 0"):
        build_nlp_train_loader(Numbers(), 2, shuffle_buffer=0)


class Failing(Numbers):
    def __iter__(self) -> Iterator[Any]:
        yield from range(4)
        raise OSError("shard 3 is gone")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_stream_is_raised(num_workers: int) -> None:
    with pytest.raises(OSError, match="shard 3 is gone"):
        batches(StreamLoader(Failing(), 2, num_workers=num_workers), 3)


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}, {"shuffle_buffer": 5}])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "mixed"])
@pytest.mark.usefixtures("forked_workers")
def test_streams_of_the_package_datasets(settings: dict[str, Any], kind: str) -> None:
    datasets = pytest.importorskip("datasets")

    def loader(num_shards: int = 4, **how: Any) -> StreamLoader:
        stream = datasets.Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset(num_shards=num_shards)
        if kind != "in order":  # by a buffer, which its state_dict does not hold
            stream = stream.shuffle(seed=3, buffer_size=4).map(lambda row: {"x": row["x"]})
        return StreamLoader(MixedStream([stream], [1.0]) if kind == "mixed" else stream, 5, **how)

    def rows(loader: StreamLoader, count: int) -> list[Any]:
        return [batch["x"].tolist() for batch in islice(loader, count)]

    whole = rows(loader(**settings), 12)
    for stop in (1, 4, 5, 7):
        first, later = loader(**settings), loader(**settings)
        assert rows(first, stop) == whole[:stop]
        later.load_state_dict(first.state_dict())
        assert rows(later, 12 - stop) == whole[stop:], stop
    if kind == "mixed":  # it has no end
        return
    for num_shards in (4, 3):  # ranks share the samples
        seen = []
        for rank in (0, 1):
            ranks = {"data_parallel_rank": rank, "data_parallel_size": 2, "drop_last": False, "infinite": False}
            seen += [x for batch in loader(num_shards, **ranks) for x in batch["x"].tolist()]
        assert sorted(seen) == list(range(24))

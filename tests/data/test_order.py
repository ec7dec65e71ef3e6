"""Orders that are computed from the position: one to one, in parts, and independent of the number of ranks."""

import tracemalloc

import numpy as np
import pytest
import torch

from trainwright.data import CyclicSampler, DataError, EpochSampler
from trainwright.data.order import LARGE, Bijection, Permutation, sample_lengths, shuffled_order
from trainwright.data.seeding import permutation


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17, 1000, 40_000])
def test_a_bijection_has_every_index_once_in_any_parts(length: int) -> None:
    whole = Bijection(length)(7, 3, 0, length)
    assert sorted(whole.tolist()) == list(range(length))
    order, step = Bijection(length), max(1, length // 7)
    parts = [order(7, 3, start, min(start + step, length)) for start in range(0, length, step)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_large_orders_are_shuffled_and_small_ones_torchs() -> None:
    one, other_epoch, other_seed = (Bijection(50_000)(*key, 0, 50_000) for key in ((1, 0), (1, 1), (2, 0)))
    positions = np.arange(50_000)
    # Uncorrelated: 5 standard deviations of the correlation of two random permutations.
    for first, second in [(one, positions), (one, other_epoch), (one, other_seed), (one[:-1], one[1:])]:
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(50_000)
    assert len(np.unique(one[:1000] // 500)) == pytest.approx(100, abs=2)  # the first 2 % come from everywhere

    assert isinstance(shuffled_order(LARGE - 1), Permutation)
    assert shuffled_order(1000)(3, 2, 10, 20).tolist() == permutation(1000, 3, 2)[10:20].tolist()


def test_a_hundred_million_samples_need_no_memory_for_their_order() -> None:
    sampler = EpochSampler(range(10**8), 32, shuffle=True, data_parallel_rank=1, data_parallel_size=2)
    tracemalloc.start()
    sampler.set_batches_done(10**6)
    batches = iter(sampler)
    rows = [next(batches) for _ in range(3)]
    assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    tracemalloc.stop()
    assert len({index for row in rows for index in row}) == 96
    assert torch.equal(next(sampler.index_tensors()), torch.tensor(rows[0]))


LENGTHS = np.random.default_rng(0).integers(1, 200, 1003)


def spread(batches: list[list[int]]) -> float:
    return float(np.mean([np.ptp(LENGTHS[batch]) for batch in batches]))


def test_batches_of_similar_length_hold_each_sample_once_per_epoch() -> None:
    sampler = EpochSampler(range(1003), 8, shuffle=True, lengths=LENGTHS)
    batches = [batch for batch, _ in zip(iter(sampler), range(2 * len(sampler)), strict=False)]
    first, second = batches[: len(sampler)], batches[len(sampler) :]
    for epoch in (first, second):
        assert sorted(index for batch in epoch for index in batch) == list(range(1003))
    assert first != second
    assert spread(first[:-1]) < 8
    means = [LENGTHS[batch].mean() for batch in first[:64]]
    assert abs(np.corrcoef(means, range(64))[0, 1]) < 0.5  # long and short batches come in random order
    sampler.set_batches_done(70)
    assert next(iter(sampler)) == batches[70]


def test_batches_of_similar_length_run_across_epoch_ends() -> None:
    sampler = CyclicSampler(range(1003), 8, shuffle=True, lengths=LENGTHS)
    batches = [batch for batch, _ in zip(iter(sampler), range(1003), strict=False)]  # eight epochs
    counts = np.bincount([index for batch in batches for index in batch], minlength=1003)
    assert set(counts.tolist()) == {8}
    whole = [batch for batch in batches if batch.position + 8 <= 1003]
    assert spread(whole) < 12
    sampler.set_consumed_samples(8 * 500)
    assert next(iter(sampler)) == batches[500]


@pytest.mark.parametrize("kind", [EpochSampler, CyclicSampler])
def test_the_ranks_together_have_the_batches_of_one(kind: type) -> None:
    one = iter(kind(range(1003), 8, shuffle=True, lengths=LENGTHS))
    settings = [{"data_parallel_rank": rank, "data_parallel_size": 2} for rank in (0, 1)]
    two = [iter(kind(range(1003), 4, shuffle=True, lengths=LENGTHS, **each)) for each in settings]
    for _ in range(200):
        assert next(one) == [*next(two[0]), *next(two[1])]


def test_lengths_come_from_the_data_set_or_a_field() -> None:
    rows = [{"input_ids": [0] * size, "weight": size + 1} for size in (3, 1, 2)]
    assert sample_lengths(rows, False) is None
    assert list(sample_lengths(rows, True)) == [3, 1, 2]
    assert list(sample_lengths(rows, "weight")) == [4, 2, 3]
    assert list(sample_lengths([{"input_ids": torch.zeros(4)}], True)) == [4]
    with pytest.raises(DataError, match=r"fields input_ids, weight; needed is 'size'"):
        sample_lengths(rows, "size")

    class Rows(list):  # type: ignore[type-arg]
        lengths = (1, 2)

    assert sample_lengths(Rows([7, 8]), True) == (1, 2)
    with pytest.raises(DataError, match="2 numbers for 3 samples"):
        sample_lengths(Rows([7, 8, 9]), True)

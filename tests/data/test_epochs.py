"""Batches that end with their epoch, in CyclicSampler's order."""

from itertools import chain, islice

import pytest

from trainwright.data import CyclicSampler, DataError, EpochSampler


def take(sampler: EpochSampler, count: int) -> list[list[int]]:
    return list(islice(sampler, count))


def test_every_epoch_holds_each_sample_once_in_another_order() -> None:
    batches = take(EpochSampler(range(10), 4, shuffle=True, seed=3), 6)
    assert [len(batch) for batch in batches] == [4, 4, 2] * 2
    first, second = [*chain(*batches[:3])], [*chain(*batches[3:])]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_the_order_is_that_of_the_cyclic_sampler() -> None:
    ours = take(EpochSampler(range(12), 4, shuffle=True, seed=3), 9)
    assert ours == list(islice(CyclicSampler(range(12), 4, shuffle=True, seed=3), 9))


@pytest.mark.parametrize("drop_last", [False, True])
def test_it_goes_on_behind_any_number_of_batches(drop_last: bool) -> None:
    sampler = EpochSampler(range(10), 4, shuffle=True, drop_last=drop_last)
    assert len(sampler) == (2 if drop_last else 3)
    whole = take(sampler, 9)
    for done in range(8):
        sampler.set_batches_done(done)
        assert take(sampler, 9 - done) == whole[done:]


def test_a_data_set_smaller_than_the_only_batch_is_an_error() -> None:
    with pytest.raises(DataError, match=r"3 samples, fewer than a batch of 4.*dataloader_drop_last=False"):
        EpochSampler(range(3), 4, drop_last=True)

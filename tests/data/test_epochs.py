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


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("length", [12, 13, 17, 18, 25])
def test_ranks_together_have_the_batches_of_one_process(length: int, ranks: int, drop_last: bool) -> None:
    settings = {"shuffle": True, "drop_last": drop_last, "seed": 3}
    whole = EpochSampler(range(length), 4 * ranks, **settings)
    shares = [
        EpochSampler(range(length), 4, **settings, data_parallel_rank=rank, data_parallel_size=ranks)
        for rank in range(ranks)
    ]
    assert {(len(s), s.samples_per_epoch) for s in shares} == {(len(whole), whole.samples_per_epoch)}
    taken = [take(s, 3 * len(s)) for s in shares]
    for number, batch in enumerate(take(whole, 3 * len(whole))):
        own = [share[number][: s.num_samples(number)] for s, share in zip(shares, taken, strict=True)]
        assert [*chain(*own)] == batch
        assert max(map(len, own)) - min(map(len, own)) <= 1
        borrowed = [share[number] for share, mine in zip(taken, own, strict=True) if not mine]
        assert borrowed == [batch[:1]] * len(borrowed)


def test_ranks_go_on_behind_any_number_of_batches() -> None:
    sampler = EpochSampler(range(10), 2, shuffle=True, data_parallel_rank=1, data_parallel_size=2)
    whole = take(sampler, 9)
    for done in range(8):
        sampler.set_batches_done(done)
        assert take(sampler, 9 - done) == whole[done:]


def test_too_few_samples_for_a_batch_of_all_ranks_is_an_error() -> None:
    with pytest.raises(DataError, match=r"7 samples, fewer than a batch of 4 on each of 2 ranks"):
        EpochSampler(range(7), 4, drop_last=True, data_parallel_size=2)

import random
import re
import time
from itertools import chain, islice

import numpy as np
import pytest
import torch

from trainwright.config.errors import ConfigError
from trainwright.data import CyclicSampler, DataError, RangedSampler, SingleRoundSampler


def stream(count, **options):
    """The first positions of the stream, as one rank with micro-batches of one sample sees them."""
    return [batch[0] for batch in islice(CyclicSampler(range(10), 1, **options), count)]


def take(sampler, count):
    return list(islice(sampler, count))


def test_batches_run_across_epoch_ends_and_drop_nothing():
    assert take(CyclicSampler(range(5), 3), 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_a_batch_may_span_several_epochs_of_a_small_data_set():
    assert take(CyclicSampler(range(2), 5), 2) == [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1]]


def test_each_epoch_is_a_permutation_and_no_two_epochs_are_alike():
    order = stream(40, shuffle=True, seed=3)
    epochs = [order[start : start + 10] for start in range(0, 40, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_no_epoch_of_one_seed_is_an_epoch_of_the_next_seed():
    epochs = {}
    for seed in range(8):
        order = stream(80, shuffle=True, seed=seed)
        for epoch in range(8):
            epochs.setdefault(tuple(order[epoch * 10 : epoch * 10 + 10]), []).append((seed, epoch))
    assert len(epochs) == 64


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_ranks_of_a_step_together_hold_the_same_samples_on_any_number_of_ranks(world_size):
    micro = 8 // world_size
    ranks = [
        CyclicSampler(range(37), micro, True, data_parallel_rank=rank, data_parallel_size=world_size, seed=5)
        for rank in range(world_size)
    ]
    steps = [list(chain.from_iterable(step)) for step in islice(zip(*ranks, strict=True), 12)]
    assert steps == take(CyclicSampler(range(37), 8, True, seed=5), 12)


@pytest.mark.parametrize("consumed", [0, 8, 36, 40, 72, 7 * 37])
def test_resuming_continues_the_stream_where_it_was_left(consumed):
    whole = list(chain.from_iterable(take(CyclicSampler(range(37), 4, True, seed=1), 100)))
    resumed = CyclicSampler(range(37), 4, True, seed=1)
    resumed.set_consumed_samples(consumed)
    assert list(chain.from_iterable(take(resumed, 10))) == whole[consumed : consumed + 40]


def test_resuming_with_another_batch_size_and_other_ranks_continues_the_same_stream():
    whole = stream(60, shuffle=True)
    ranks = [
        CyclicSampler(range(10), 3, True, consumed_samples=14, data_parallel_rank=rank, data_parallel_size=2)
        for rank in (0, 1)
    ]
    steps = [a + b for a, b in islice(zip(*ranks, strict=True), 5)]
    assert list(chain.from_iterable(steps)) == whole[14:44]


def test_iterating_does_not_move_the_position():
    sampler = CyclicSampler(range(10), 4, consumed_samples=4)
    take(sampler, 5)
    assert sampler.consumed_samples == 4
    assert take(sampler, 1) == [[4, 5, 6, 7]]


def test_length_is_the_number_of_steps_that_consume_an_epoch():
    assert len(CyclicSampler(range(10), 2, data_parallel_size=2)) == 3
    assert len(CyclicSampler(range(3), 8)) == 1


def test_a_data_set_that_supports_prefetch_is_told_of_each_batch_before_it_is_read():
    class Prefetching(list):
        supports_prefetch = True
        seen: list = []  # noqa: RUF012

        def prefetch(self, indices):
            self.seen.append(indices)

    data = Prefetching("abcde")
    batches = take(CyclicSampler(data, 2), 3)
    assert data.seen == batches
    data.seen.clear()
    batches = list(SingleRoundSampler(data, 2))
    assert data.seen == batches


@pytest.mark.parametrize(
    "sampler",
    [
        CyclicSampler(range(50), 4, True),
        SingleRoundSampler(range(50), 4, True),
        RangedSampler(range(50), 4, shuffle=True, seed=0),
    ],
)
def test_global_generators_are_left_alone_and_do_not_matter(sampler):
    torch.manual_seed(1)
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    first = take(iter(sampler), 10)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])
    with torch.random.fork_rng():
        torch.manual_seed(99)
        fresh = type(sampler)(range(50), 4, shuffle=True, seed=0)
        assert take(iter(fresh), 10) == first


def test_two_million_samples_start_at_once_in_the_middle_of_a_late_epoch():
    sampler = CyclicSampler(range(2_000_000), 64, True, consumed_samples=7_500_000)
    start = time.perf_counter()
    batch = next(iter(sampler))
    assert time.perf_counter() - start < 0.3  # one permutation takes a tenth of that; replaying 7 million takes seconds
    assert len(batch) == 64


@pytest.mark.parametrize("num_samples", [1, 7, 8, 12, 13])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_round_holds_every_sample_once_and_round_by_round_in_order(num_samples, world_size):
    ranks = [
        SingleRoundSampler(range(num_samples), 4, data_parallel_rank=rank, data_parallel_size=world_size)
        for rank in range(world_size)
    ]
    batches = [list(rank) for rank in ranks]
    assert [len(rank) for rank in ranks] == [len(of_rank) for of_rank in batches]
    gathered = []
    for number in range(max(map(len, batches))):
        for of_rank in batches:
            gathered += of_rank[number] if number < len(of_rank) else []
    assert gathered == list(range(num_samples))


def test_drop_last_drops_the_incomplete_batch_and_nothing_else():
    ranks = [
        SingleRoundSampler(range(14), 4, drop_last=True, data_parallel_rank=r, data_parallel_size=2) for r in (0, 1)
    ]
    assert [list(rank) for rank in ranks] == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7]]]
    assert [len(rank) for rank in ranks] == [2, 1]


def test_a_shuffled_round_is_a_permutation_and_the_same_on_every_pass_and_rank():
    sampler = SingleRoundSampler(range(20), 4, True, seed=2)
    order = list(chain.from_iterable(sampler))
    assert sorted(order) == list(range(20))
    assert order != list(range(20))
    assert list(chain.from_iterable(sampler)) == order
    halves = [list(SingleRoundSampler(range(20), 4, True, False, rank, 2, 2)) for rank in (0, 1)]
    assert halves[0][0] + halves[1][0] + halves[0][1] + halves[1][1] + halves[0][2] == order


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_range_continues_the_order_that_it_was_cut_from(shuffle):
    whole = list(RangedSampler(range(100_000), 32, shuffle=shuffle, seed=4))
    part = RangedSampler(range(100_000), 32, start_index=90_016, shuffle=shuffle, seed=4)
    assert sorted(whole) == list(range(100_000))
    assert list(part) == whole[90_016:]
    assert len(part) == 100_000 - 90_016


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"end_index": 6}, [0, 1, 2, 3, 4, 5]),
        ({"end_index": 0}, []),
        ({"start_index": 4, "end_index": 9, "drop_last": True}, [4, 5, 6, 7]),
        ({"start_index": 12}, []),
    ],
)
def test_a_range_yields_as_many_indices_as_its_length_says(options, expected):
    sampler = RangedSampler(range(10), 4, **options)
    assert list(sampler) == expected
    assert len(sampler) == len(expected)


class NoSamples:
    def __len__(self):
        return 0


@pytest.mark.parametrize("sampler_class", [CyclicSampler, SingleRoundSampler, RangedSampler])
def test_an_empty_data_set_is_named(sampler_class):
    with pytest.raises(DataError, match=f"{sampler_class.__name__}: the data set NoSamples is empty"):
        sampler_class(NoSamples(), 4)


@pytest.mark.parametrize("sampler_class", [CyclicSampler, SingleRoundSampler, RangedSampler])
def test_a_data_set_without_length_is_told_what_it_needs(sampler_class):
    with pytest.raises(DataError, match=r"generator has no len\(\).*define __len__ and __getitem__"):
        sampler_class((x for x in "ab"), 4)


def test_all_faults_are_said_at_once():
    with pytest.raises(ConfigError) as raised:
        CyclicSampler(range(4), 0, consumed_samples=-1, data_parallel_size="2")
    message = str(raised.value)
    assert "CyclicSampler.micro_batch_size: got 0 (int); it must be a whole number >= 1." in message
    assert "CyclicSampler.consumed_samples: got -1" in message
    assert "CyclicSampler.data_parallel_size: got '2' (str)" in message


@pytest.mark.parametrize("sampler_class", [CyclicSampler, SingleRoundSampler])
def test_a_rank_outside_the_world_is_refused(sampler_class):
    with pytest.raises(ConfigError, match=r"data_parallel_rank: got 2; with data_parallel_size=2 it must be below 2"):
        sampler_class(range(4), 1, data_parallel_rank=2, data_parallel_size=2)


def test_a_position_must_be_a_whole_number():
    with pytest.raises(ConfigError, match=r"set_consumed_samples.consumed_samples: got 1.5"):
        CyclicSampler(range(4), 1).set_consumed_samples(1.5)


def test_a_range_is_refused_what_it_cannot_do():
    with pytest.raises(ConfigError, match="shuffle=True needs a seed"):
        RangedSampler(range(4), 2, shuffle=True)
    with pytest.raises(ConfigError, match="end_index: got 5; range has only 4 samples"):
        RangedSampler(range(4), 2, end_index=5)
    with pytest.raises(ConfigError, match="start_index: got -1"):
        RangedSampler(range(4), 2, start_index=-1)


def test_a_sampler_shows_how_to_make_it_again():
    data = range(6)
    for sampler in (
        CyclicSampler(data, 2, True, 4, 1, 2, 9),
        SingleRoundSampler(data, 2, True, True, 1, 2, 9),
        RangedSampler(data, 2, 1, 5, True, True, 9),
    ):
        again = eval(re.sub("<.*?>", "data", repr(sampler)))
        assert take(iter(again), 3) == take(iter(sampler), 3)
        assert repr(again) == repr(sampler)

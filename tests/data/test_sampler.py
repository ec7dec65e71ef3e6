import pickle
import re
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch

from trainwright.base.errors import ConfigError
from trainwright.data import CyclicSampler, DataError, EpochSampler, MixedDataset, RangedSampler, SingleRoundSampler
from trainwright.data.batch_loader import Rounds
from trainwright.data.sampler import SampleIndices


def stream(count, **options):
    """The first positions of the stream, as one rank with micro-batches of one sample sees them."""
    return [batch[0] for batch in islice(CyclicSampler(range(10), 1, **options), count)]


def take(sampler, count):
    return list(islice(sampler, count))


def test_batches_run_across_epoch_ends_and_the_position_stays():
    assert take(CyclicSampler(range(5), 3), 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]

    sampler = CyclicSampler(range(10), 4, consumed_samples=4)
    take(sampler, 5)
    assert sampler.consumed_samples == 4
    assert take(sampler, 1) == [[4, 5, 6, 7]]

    assert len(CyclicSampler(range(10), 2, data_parallel_size=2)) == 3
    assert len(CyclicSampler(range(3), 8)) == 1


def test_prefetch_of_a_dataset_is_called_for_each_batch_before_it_is_read():
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
def test_data_without_samples_or_length_are_named(sampler_class):
    with pytest.raises(DataError, match=f"{sampler_class.__name__}: the data set NoSamples is empty"):
        sampler_class(NoSamples(), 4)

    with pytest.raises(DataError, match=r"generator has no len\(\).*define __len__ and __getitem__"):
        sampler_class((x for x in "ab"), 4)
    with pytest.raises(DataError, match=r"len\(\) of the data set Wrong failed: 'float' object"):
        sampler_class(type("Wrong", (), {"__len__": lambda self: 2.0})(), 4)


def test_wrong_arguments_are_all_named():
    with pytest.raises(ConfigError) as raised:
        CyclicSampler(range(4), 0, consumed_samples=-1, data_parallel_size="2")
    message = str(raised.value)
    assert "CyclicSampler.micro_batch_size: got 0 (int); it must be a whole number >= 1." in message
    assert "CyclicSampler.consumed_samples: got -1" in message
    assert "CyclicSampler.data_parallel_size: got '2' (str)" in message

    with pytest.raises(ConfigError, match=r"set_consumed_samples.consumed_samples: got 1.5"):
        CyclicSampler(range(4), 1).set_consumed_samples(1.5)

    with pytest.raises(ConfigError, match="shuffle=True needs a seed"):
        RangedSampler(range(4), 2, shuffle=True)
    with pytest.raises(ConfigError, match="end_index: got 5; range has only 4 samples"):
        RangedSampler(range(4), 2, end_index=5)
    with pytest.raises(ConfigError, match="start_index: got -1"):
        RangedSampler(range(4), 2, start_index=-1)


@pytest.mark.parametrize("sampler_class", [CyclicSampler, SingleRoundSampler])
def test_a_rank_outside_the_world_is_refused(sampler_class):
    with pytest.raises(ConfigError, match=r"data_parallel_rank: got 2; .*data_parallel_size=2"):
        sampler_class(range(4), 1, data_parallel_rank=2, data_parallel_size=2)


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


def test_every_epoch_holds_each_sample_once_in_the_order_of_the_cyclic_sampler() -> None:
    batches = take(EpochSampler(range(10), 4, shuffle=True, seed=3), 6)
    assert [len(batch) for batch in batches] == [4, 4, 2] * 2
    first, second = [*chain(*batches[:3])], [*chain(*batches[3:])]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second

    ours = take(EpochSampler(range(12), 4, shuffle=True, seed=3), 9)
    assert ours == list(islice(CyclicSampler(range(12), 4, shuffle=True, seed=3), 9))


RANK_1 = {"data_parallel_rank": 1, "data_parallel_size": 2}


@pytest.mark.parametrize(
    ("size", "settings", "length"), [(4, {"drop_last": False}, 3), (4, {"drop_last": True}, 2), (2, RANK_1, 3)]
)
def test_it_goes_on_behind_any_number_of_batches(size: int, settings: dict[str, Any], length: int) -> None:
    sampler = EpochSampler(range(10), size, shuffle=True, **settings)
    assert len(sampler) == length
    whole = take(sampler, 9)
    for done in range(8):
        sampler.set_batches_done(done)
        assert take(sampler, 9 - done) == whole[done:]


@pytest.mark.parametrize(
    ("length", "ranks", "facts"),
    [(3, 1, r"3 samples, .*batch of 4.*dataloader_drop_last=False"), (7, 2, r"7 samples, .*batch of 4 .* 2 ranks")],
)
def test_fewer_samples_than_a_batch_of_all_ranks_are_an_error(length: int, ranks: int, facts: str) -> None:
    with pytest.raises(DataError, match=facts):
        EpochSampler(range(length), 4, drop_last=True, data_parallel_size=ranks)


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


def places(batch):
    return [(batch.epoch_of(number), index) for number, index in enumerate(batch)]


def test_each_index_knows_its_epoch_and_place():
    batch = SampleIndices([4, 0], epoch=2, position=4, epoch_length=5)
    twin = pickle.loads(pickle.dumps(batch))
    assert isinstance(twin, list)
    assert twin == batch == [4, 0]
    assert repr(twin) == "[4, 0]"
    assert places(twin) == [(2, 4), (3, 0)]

    batches = islice(CyclicSampler(range(2), 5), 2)
    assert [places(batch) for batch in batches] == [
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)],
        [(2, 1), (3, 0), (3, 1), (4, 0), (4, 1)],
    ]

    sampler = EpochSampler(range(5), 2, drop_last=True)
    sampler.set_batches_done(1)
    batches = list(islice(sampler, 3))
    assert [places(batch) for batch in batches] == [[(0, 2), (0, 3)], [(1, 0), (1, 1)], [(1, 2), (1, 3)]]
    assert [batch.position for batch in batches] == [2, 0, 2]

    sampler = SingleRoundSampler(range(5), 2, data_parallel_rank=1, data_parallel_size=2)
    assert [places(batch) for _ in range(2) for batch in sampler] == [[(0, 2), (0, 3)]] * 2

    known = SampleIndices([1], epoch=9, position=0, epoch_length=None)
    rounds = Rounds([[0, 1], known, (2,)])
    rounds.round = 3
    batches = list(rounds)
    assert len(rounds) == 3
    assert batches == [[0, 1], [1], [2]]
    assert [(batch.epoch, batch.position) for batch in batches] == [(3, 0), (9, 0), (3, 2)]


def test_the_places_of_training_do_not_depend_on_the_start_the_batch_size_or_the_ranks():
    def stream(micro, ranks, consumed):
        samplers = [CyclicSampler(range(7), micro, True, consumed, rank, ranks) for rank in range(ranks)]
        steps = islice(zip(*samplers, strict=True), 24 // (micro * ranks))
        return [place for step in steps for batch in step for place in places(batch)]

    whole = stream(1, 1, 0) + stream(1, 1, 24)
    for micro, ranks, consumed in [(4, 1, 0), (2, 2, 0), (1, 4, 13), (3, 2, 21), (8, 1, 24)]:
        assert stream(micro, ranks, consumed) == whole[consumed : consumed + 24]


SAMPLERS = {
    "cyclic": lambda shuffle, **ranks: CyclicSampler(range(7), 3, shuffle, 5, **ranks),
    "cyclic, larger than the data": lambda shuffle, **ranks: CyclicSampler(range(2), 5, shuffle, **ranks),
    "epochs": lambda shuffle, **ranks: EpochSampler(range(7), 2, shuffle=shuffle, **ranks),
    "epochs, whole batches": lambda shuffle, **ranks: EpochSampler(
        range(7), 2, shuffle=shuffle, drop_last=True, **ranks
    ),
    "one round": lambda shuffle, **ranks: SingleRoundSampler(range(7), 2, shuffle, **ranks),
}


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_tensors_of_indices_are_the_lists(kind, shuffle, rank):
    for ranks in ({}, {"data_parallel_rank": rank, "data_parallel_size": 3}):
        sampler = SAMPLERS[kind](shuffle, **ranks)
        lists, tensors = [*islice(sampler, 12)], [*islice(sampler.index_tensors(), 12)]
        assert [tensor.tolist() for tensor in tensors] == lists
        assert {tensor.dtype for tensor in tensors} <= {torch.int64}


def test_shortened_epochs_keep_batches_of_similar_length() -> None:
    lengths = np.random.default_rng(0).permutation(103)
    sampler = CyclicSampler(range(103), 4, shuffle=True, lengths=lengths)
    assert sampler.limit_epochs(10) == 40
    spreads = [np.ptp(lengths[batch]) for batch in islice(sampler, 30)]
    assert max(spreads) <= 4  # of all epochs; a batch of random samples spreads over about 60


@pytest.mark.parametrize("api", ["python", "config file"])
def test_kept_batches_of_a_mixture_are_the_same_in_each_epoch(api: str) -> None:
    data = MixedDataset([range(30), range(12)], [0.7, 0.3])
    if api == "python":
        batches = list(islice(EpochSampler(data, 4, limit=2, keeps_batches=True), 6))
    else:
        sampler = CyclicSampler(data, 4, shuffle=True)
        sampler.limit_epochs(2, keeps_batches=True)
        batches = list(islice(sampler, 6))
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3


@pytest.mark.parametrize("kind", [CyclicSampler, EpochSampler])
@pytest.mark.parametrize("length", [23, 24])
def test_micro_batches_of_all_ranks_are_those_that_the_ranks_read(kind: type, length: int) -> None:
    ranks = [
        kind(range(length), 3, shuffle=True, seed=5, data_parallel_rank=rank, data_parallel_size=2) for rank in (0, 1)
    ]
    together = [[*first, *second] for first, second in zip(*(islice(iter(rank), 12) for rank in ranks), strict=True)]
    for rank in ranks:
        assert rank.micro_batches(0, 12) == together
        first = 5 if kind is EpochSampler else 5 * 6  # batches, or samples of all ranks
        assert rank.micro_batches(first, 3) == together[5:8]
        assert next(iter(rank)) == next(islice(iter(rank), 1))  # the sampler itself has not moved

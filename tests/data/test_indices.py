"""The lists of indices that samplers yield know where they lie."""

import pickle
from itertools import islice

import pytest
import torch

from trainwright.data import CyclicSampler, EpochSampler, SingleRoundSampler
from trainwright.data.indices import Rounds, SampleIndices


def places(batch):
    return [(batch.epoch_of(number), index) for number, index in enumerate(batch)]


def test_it_is_a_list_that_keeps_its_place_on_its_way_to_a_worker():
    batch = SampleIndices([4, 0], epoch=2, position=4, epoch_length=5)
    twin = pickle.loads(pickle.dumps(batch))
    assert isinstance(twin, list)
    assert twin == batch == [4, 0]
    assert repr(twin) == "[4, 0]"
    assert places(twin) == [(2, 4), (3, 0)]


def test_a_batch_over_the_ends_of_epochs_gives_each_index_its_own_epoch():
    batches = islice(CyclicSampler(range(2), 5), 2)
    assert [places(batch) for batch in batches] == [
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)],
        [(2, 1), (3, 0), (3, 1), (4, 0), (4, 1)],
    ]


def test_the_places_of_training_do_not_depend_on_the_start_the_batch_size_or_the_ranks():
    def stream(micro, ranks, consumed):
        samplers = [CyclicSampler(range(7), micro, True, consumed, rank, ranks) for rank in range(ranks)]
        steps = islice(zip(*samplers, strict=True), 24 // (micro * ranks))
        return [place for step in steps for batch in step for place in places(batch)]

    whole = stream(1, 1, 0) + stream(1, 1, 24)
    for micro, ranks, consumed in [(4, 1, 0), (2, 2, 0), (1, 4, 13), (3, 2, 21), (8, 1, 24)]:
        assert stream(micro, ranks, consumed) == whole[consumed : consumed + 24]


def test_the_batches_of_an_epoch_are_of_that_epoch():
    sampler = EpochSampler(range(5), 2, drop_last=True)
    sampler.set_batches_done(1)
    batches = list(islice(sampler, 3))
    assert [places(batch) for batch in batches] == [[(0, 2), (0, 3)], [(1, 0), (1, 1)], [(1, 2), (1, 3)]]
    assert [batch.position for batch in batches] == [2, 0, 2]


def test_a_single_round_is_epoch_zero_on_every_pass():
    sampler = SingleRoundSampler(range(5), 2, data_parallel_rank=1, data_parallel_size=2)
    assert [places(batch) for _ in range(2) for batch in sampler] == [[(0, 2), (0, 3)]] * 2


def test_plain_lists_get_their_round_and_lists_with_a_place_keep_it():
    known = SampleIndices([1], epoch=9, position=0, epoch_length=None)
    rounds = Rounds([[0, 1], known, (2,)])
    rounds.round = 3
    batches = list(rounds)
    assert len(rounds) == 3
    assert batches == [[0, 1], [1], [2]]
    assert [(batch.epoch, batch.position) for batch in batches] == [(3, 0), (9, 0), (3, 2)]


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


def test_tensors_of_indices_go_on_where_lists_would():
    sampler = EpochSampler(range(10), 4, shuffle=True)
    whole = [*islice(sampler, 9)]
    sampler.set_batches_done(4)
    assert [tensor.tolist() for tensor in islice(sampler.index_tensors(), 5)] == whole[4:]
    sampler.infinite = False
    sampler.set_batches_done(1)
    rounds = [[tensor.tolist() for tensor in sampler.index_tensors()] for _ in range(2)]
    assert rounds == [whole[1:3], whole[3:6]]

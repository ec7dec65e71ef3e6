"""How many samples a batch has: by the plan of the sampler, the rows of the first tensor, or unknown."""

import logging

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, default_collate

from trainwright.base.errors import ConfigError
from trainwright.data import CyclicSampler, SingleRoundSampler
from trainwright.data.batch_loader import make_loader
from trainwright.data.sample_count import SampleCounter, keeps_samples
from trainwright.data.sampler import EpochSampler


def pairs_of(samples):
    """As TRL's reward collator: two rows for each sample."""
    rows = torch.tensor(samples)
    return {"input_ids": torch.cat([rows, rows]), "margin": rows}


def even_only(samples):
    return torch.tensor([sample for sample in samples if sample % 2 == 0])


def boxes_of(samples):
    """As YOLO's: images, and boxes of all of them."""
    return torch.zeros(len(samples), 3), torch.zeros(sum(samples), 6)


def counts_of(loader):
    counter = SampleCounter(loader)
    return [counter(batch, number) for number, batch in enumerate(loader)]


def our_loader(sampler, collate_fn):
    return make_loader(range(10), sampler, seed=0, num_workers=0, collate_fn=collate_fn, loader_options={})


@pytest.mark.parametrize("collate_fn", [pairs_of, boxes_of, default_collate])
@pytest.mark.parametrize(
    "loader_of",
    [
        lambda collate_fn: our_loader(SingleRoundSampler(range(10), 4), collate_fn),
        lambda collate_fn: DataLoader(range(10), 4, collate_fn=collate_fn),
        lambda collate_fn: DataLoader(
            range(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 4, False), collate_fn=collate_fn
        ),
    ],
    ids=["data set", "DataLoader", "batch sampler"],
)
def test_the_sampler_says_how_many_samples_a_batch_has_whatever_its_tensors_are(loader_of, collate_fn):
    assert counts_of(loader_of(collate_fn)) == [4, 4, 2]


def test_samples_that_the_collate_function_leaves_out_do_not_count():
    assert counts_of(our_loader(SingleRoundSampler(range(10), 4), even_only)) == [2, 2, 1]
    assert counts_of(DataLoader([1, 3, 5, 7, 2, 4], 4, collate_fn=even_only)) == [0, 2]


def test_each_rank_counts_its_own_samples():
    for rank, expected in ((0, [3, 2, 3]), (1, [3, 2, 3])):
        sampler = EpochSampler(range(10), 3, data_parallel_rank=rank, data_parallel_size=2)
        counter = SampleCounter(our_loader(sampler, pairs_of))
        assert [counter(pairs_of([0] * 3), number) for number in range(3)] == expected
    sampler = EpochSampler(range(5), 2, data_parallel_rank=1, data_parallel_size=2)
    assert SampleCounter(our_loader(sampler, None))(torch.zeros(1), 1) == 0, "a padding batch"
    sampler = SingleRoundSampler(range(10), 4, data_parallel_rank=1, data_parallel_size=2)
    assert counts_of(our_loader(sampler, pairs_of)) == [4]
    sampler = CyclicSampler(range(10), 4, data_parallel_rank=1, data_parallel_size=2)
    assert SampleCounter(our_loader(sampler, pairs_of))(pairs_of([1, 2, 3, 4]), 2) == 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), 4, collate_fn=boxes_of),
        DataLoader(range(10), batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], collate_fn=boxes_of),
        [boxes_of([1] * 4), boxes_of([2] * 4), boxes_of([5, 6])],
    ],
    ids=["stream", "own batch sampler", "list"],
)
def test_without_a_plan_the_rows_of_the_first_tensor_count(loader):
    assert counts_of(loader) == [4, 4, 2]


def test_unknown_numbers_of_samples_are_logged_once_and_batches_count_alike(caplog):
    with caplog.at_level(logging.WARNING, "trainwright.data"):
        assert counts_of(["some text", "more text"]) == [1, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "The number of samples of a batch is unknown: str" in caplog.text


@pytest.mark.parametrize("batches", [["some text", torch.zeros(4)], [torch.zeros(4), "some text"]])
def test_a_run_does_not_change_between_known_and_unknown_numbers(batches):
    with pytest.raises(ConfigError, match="cannot be counted as those of the batches before it"):
        counts_of(batches)


def test_only_collate_functions_of_this_library_and_torch_are_known_to_keep_all_samples():
    sampler = SingleRoundSampler(range(10), 4)
    assert keeps_samples(our_loader(sampler, None))
    assert keeps_samples(DataLoader(range(10), 4))
    assert not keeps_samples(our_loader(sampler, even_only))
    assert not keeps_samples(object())

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from trainwright.config.errors import ConfigError
from trainwright.data.cycle import cycle


def test_a_loader_is_begun_again_when_it_ends():
    assert list(islice(cycle([1, 2, 3]), 7)) == [1, 2, 3, 1, 2, 3, 1]


def test_a_sampler_is_told_the_number_of_each_round():
    data = torch.arange(8)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
    batches = list(islice(cycle(DataLoader(data, batch_size=8, sampler=sampler)), 2))
    for epoch, batch in enumerate(batches):
        expected = torch.randperm(8, generator=torch.Generator().manual_seed(3 + epoch))
        assert torch.equal(batch, expected)


def test_a_loader_without_batches_is_an_error_and_no_endless_wait():
    loader = DataLoader(torch.arange(3), batch_size=4, drop_last=True)
    with pytest.raises(ConfigError, match="DataLoader gave no batch"):
        next(cycle(loader))


@pytest.mark.parametrize(
    ("options", "told"),
    [({"num_workers": 1}, True), ({}, False), ({"num_workers": 1, "persistent_workers": True}, False)],
)
def test_workers_that_start_anew_for_each_epoch_are_told_of(options, told, caplog):
    with caplog.at_level("INFO", logger="trainwright.data"):
        loader = DataLoader(torch.arange(3), **options)
        batches = cycle(loader)
        next(batches)
    assert ("persistent_workers=True keeps them" in caplog.text) == told
    del batches, loader

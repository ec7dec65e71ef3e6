import functools
import logging
import os
import random
from itertools import chain

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.toys import Stream
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.config import LazyCall
from trainwright.data import (
    CyclicSampler,
    DataError,
    DistTensorData,
    Instance,
    SingleRoundSampler,
    build_image_test_loader,
    build_image_train_loader,
    build_nlp_test_loader,
    build_nlp_train_loader,
    build_nlp_train_val_test_loader,
    to_batch,
)
from trainwright.data.loaders import DatasetPart, split_ranges, train_val_test_datasets


class Numbers(Dataset):
    def __init__(self, size=10, first=0):
        self.size = size
        self.first = first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        number = self.first + index
        return Instance(
            inputs=DistTensorData(torch.full((2,), float(number))),
            labels=DistTensorData(torch.tensor(number, dtype=torch.int), placement_idx=-1),
        )


class Draws(Dataset):
    """What each of the three global generators gives in the process that reads the sample."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


class CountingCollate:
    def __init__(self, start):
        self.start = start

    def __call__(self, samples):
        return self.start + len(samples)


class Ragged(Numbers):
    def __getitem__(self, index):
        return Instance(inputs=torch.zeros(3 if index == 2 else 4))


def labels(batches):
    return [to_batch(batch)["labels"].tolist() for batch in batches]


def first(loader, count):
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


@pytest.mark.parametrize("build", [build_image_train_loader, build_nlp_train_loader])
def test_the_train_loader_is_endless_shuffled_and_comes_with_two_nones(build):
    loader, validation, test = build(Numbers(), 4, num_workers=0, seed=3)
    assert (validation, test) == (None, None)
    sampler = CyclicSampler(range(10), 4, shuffle=True, seed=3)
    assert labels(first(loader, 7)) == first(sampler, 7)


@pytest.mark.parametrize("build", [build_image_test_loader, build_nlp_test_loader])
def test_the_test_loader_reads_each_sample_once_in_order_on_every_pass(build):
    loader = build([Numbers(5), Numbers(2, first=5)], 3, num_workers=0)
    assert labels(loader) == labels(loader) == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(loader) == 3


def test_one_data_set_is_used_itself_and_several_are_mixed():
    data = Numbers()
    assert build_image_test_loader([data], 2, num_workers=0).dataset is data
    assert isinstance(build_image_test_loader((data, data), 2, num_workers=0).dataset, ConcatDataset)
    mixed = build_image_test_loader([data, Numbers(3)], 2, num_workers=0, dataset_mixer=lambda parts: parts[1])
    assert len(mixed.dataset) == 3

    assert [batch.tolist() for batch in build_image_test_loader(range(5), 2, num_workers=0)] == [[0, 1], [2, 3], [4]]


def _draw_once(worker_id):
    get_worker_info().dataset.drawn = torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])


class DrawnAtStart(Draws):
    def __getitem__(self, index):
        return self.drawn


def test_what_a_users_worker_init_draws_is_a_function_of_seed_and_worker():
    def drawn(seed):
        loader = build_image_test_loader(DrawnAtStart(), 1, num_workers=2, seed=seed, worker_init_fn=_draw_once)
        return torch.cat(first(loader, 2))

    assert torch.equal(drawn(1), drawn(1))
    assert len(torch.cat([drawn(1), drawn(2)]).unique()) == 12


def test_workers_stay_and_are_never_more_than_the_cpus(caplog):
    with caplog.at_level(logging.DEBUG, logger="trainwright.data"):
        loaders = [build_image_test_loader(Numbers(), 4, num_workers=10_007) for _ in range(2)]
    assert [loader.num_workers for loader in loaders] == [os.cpu_count()] * 2
    assert loaders[0].persistent_workers
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert "num_workers=10007" in caplog.text


def test_options_of_torchs_loader_are_passed_on_and_unknown_ones_named():
    assert build_image_test_loader(Numbers(), 4, num_workers=1, prefetch_factor=5).prefetch_factor == 5
    assert len(labels(build_image_test_loader(Numbers(), 4, num_workers=0, prefetch_factor=5, timeout=9))) == 3

    for name in ("pin_memory", "in_order", "persistent_workers"):
        with pytest.raises(ConfigTypeError, match=rf"{name}: got 'maybe' \(str\); it must be True or False"):
            build_image_test_loader(Numbers(), 4, num_workers=0, **{name: "maybe"})
    match = r"'prefetch_facter' is not one of its arguments.*Did you mean 'prefetch_factor'"
    with pytest.raises(ConfigTypeError, match=match):
        build_image_train_loader(Numbers(), 4, prefetch_facter=2)


def test_mixup_and_collate_functions_travel_with_the_loader():
    def mixup(images, labels):
        return images, labels

    loader, _, _ = build_image_train_loader(Numbers(), 4, num_workers=0, mixup_func=mixup, collate_fn=len)
    assert loader.mixup_func is mixup
    assert first(loader, 1) == [4]
    assert build_image_test_loader(Numbers(), 4, num_workers=0).mixup_func is None


@pytest.mark.parametrize(
    "sampler",
    [
        CyclicSampler,
        functools.partial(CyclicSampler, shuffle=False),
        lambda **given: CyclicSampler(**given),
        CyclicSampler(range(10), 3, seed=9),
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]],
        {"_target_": "trainwright.data.CyclicSampler", "shuffle": False},
        LazyCall(CyclicSampler)(shuffle=False),
    ],
)
def test_a_sampler_may_be_a_class_a_function_a_node_or_an_object(sampler):
    loader, _, _ = build_image_train_loader(Numbers(), 3, num_workers=0, sampler=sampler)
    assert labels(first(loader, 4)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]


def test_a_sampler_node_sets_what_the_loader_does_not():
    node = LazyCall(CyclicSampler)(shuffle=True, seed=7)
    loader, _, _ = build_image_train_loader(Numbers(), 3, num_workers=0, sampler=node, seed=1)
    assert loader.batch_sampler.seed == 7
    assert loader.batch_sampler.micro_batch_size == 3

    node = LazyCall(CyclicSampler)(micro_batch_size=5, data_parallel_rank=0)
    with pytest.raises(ConfigError, match="the loader itself sets micro_batch_size, data_parallel_rank"):
        build_image_train_loader(Numbers(), 3, sampler=node)

    with pytest.raises(ConfigTypeError, match=r"'SingleRoundSampler' .*dataset, .*consumed_samples"):
        build_image_train_loader(Numbers(), 3, sampler=SingleRoundSampler)
    with pytest.raises(ConfigTypeError, match=r"sampler: got 5 \(int\)"):
        build_image_train_loader(Numbers(), 3, sampler=5)
    weighted = LazyCall(WeightedRandomSampler)(weights=[1.0, 2.0], num_samples=6)
    for single in (weighted, RandomSampler(Numbers())):
        with pytest.raises(ConfigTypeError, match=r"single indices.*BatchSampler\(\w+\(\.\.\.\), batch_size=3"):
            build_image_train_loader(Numbers(), 3, sampler=single)
    batches = BatchSampler(RandomSampler(Numbers()), batch_size=3, drop_last=True)

    class OfLists(RandomSampler):
        def __iter__(self):
            yield [*super().__iter__()]

    for several in (batches, OfLists(Numbers())):
        assert build_image_train_loader(Numbers(), 3, sampler=several)[0].batch_sampler is several


def test_nodes_of_a_config_are_instantiated_here_where_nobody_did_before():
    cfg = OmegaConf.create(
        {"dataset": [LazyCall(Numbers)(size=4), LazyCall(Numbers)(size=2, first=4)]}, flags={"allow_objects": True}
    )
    assert labels(build_image_test_loader(cfg.dataset, 4, num_workers=0)) == [[0, 1, 2, 3], [4, 5]]
    loader = build_image_test_loader(Numbers(), 4, num_workers=0, collate_fn=LazyCall(CountingCollate)(start=10))
    assert list(loader) == [14, 14, 12]


def test_data_that_cannot_be_read_by_index_are_refused():
    with pytest.raises(ConfigTypeError, match=r"dataset\[1\]: Stream lacks __len__ or __getitem__"):
        build_image_train_loader([range(3), Stream([])], 4)
    with pytest.raises(ConfigError, match="empty list"):
        build_image_train_loader([], 4)
    for num_workers in (-1, True, "4"):
        with pytest.raises(ConfigError, match="num_workers: got"):
            build_image_train_loader(Numbers(), 4, num_workers=num_workers)
    for build in (build_image_train_loader, build_image_test_loader):
        with pytest.raises(DataError, match=f"{build.__name__}: dataset: the data set Numbers is empty"):
            build(Numbers(0), 4)


def test_a_ragged_batch_is_explained_from_workers_too():
    fact = r"field 'inputs': sample 2 of the batch has shape \(3,\); sample 0 has \(4,\)"
    with pytest.raises(DataError, match=fact):
        list(build_image_test_loader(Ragged(), 4, num_workers=0))
    with pytest.raises(DataError, match=fact):
        list(build_image_test_loader(Ragged(), 4, num_workers=1))


def test_train_val_and_test_come_from_one_cut():
    train, validation, test = build_nlp_train_val_test_loader(
        Numbers(20), [[16, 3, 1]], train_batch_size=4, test_batch_size=2, num_workers=0
    )
    assert sorted(chain.from_iterable(labels(first(train, 4)))) == list(range(16))
    assert labels(validation) == [[16, 17], [18]]
    assert labels(test) == [[19]]

    train, validation, test = build_nlp_train_val_test_loader(
        [Numbers(4), Numbers(4, first=100)],
        [[0, 1, 0]],
        [1, 3],
        [8, 4, 4],
        test_batch_size=8,
        num_workers=0,
    )
    assert train is None
    assert test is None
    assert labels(validation) == [[0, 100, 101, 102]]


@pytest.mark.parametrize("rank", [0, 1])
def test_loaders_take_their_share_by_the_rank_of_the_process(monkeypatch, rank):
    for kind in ("data_parallel", "averaging"):
        monkeypatch.setattr(f"trainwright.data.loaders.get_{kind}_rank", lambda: rank)
        monkeypatch.setattr(f"trainwright.data.loaders.get_{kind}_size", lambda: 2)
    train, _, _ = build_image_train_loader(Numbers(), 2, num_workers=0)
    whole = first(CyclicSampler(range(10), 2, shuffle=True), 6)
    assert labels(first(train, 3)) == whole[rank::2]
    assert labels(build_image_test_loader(Numbers(5), 2, num_workers=0)) == [[[0, 1], [4]], [[2, 3]]][rank]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 10, 999, 1000, 1001])
@pytest.mark.parametrize("proportions", [[949, 50, 1], [1, 1, 1], [1, 0, 0], [0.8, 0.1, 0.1], [0, 0, 2]])
def test_ranges_follow_each_other_and_are_the_whole(length, proportions):
    ranges = split_ranges(length, proportions)
    assert [index for part in ranges for index in part] == list(range(length))
    for part, proportion in zip(ranges, proportions, strict=True):
        assert abs(len(part) - length * proportion / sum(proportions)) <= 1  # two cuts, each rounded by a half at most


def test_parts_hold_their_ranges_and_weights_share_out_the_numbers():
    train, val, test = train_val_test_datasets(
        [range(10), range(100, 110)], [[8, 1, 1]], None, None, lambda parts: [x for part in parts for x in part]
    )
    assert train == [*range(8), *range(100, 108)]
    assert (val, test) == ([8, 108], [9, 109])

    train, val, test = train_val_test_datasets(
        [range(10), range(100, 200)],
        [[8, 1, 1], [90, 5, 5]],
        [3, 1],
        [20, 4, None],
        lambda parts: [x for part in parts for x in part],
    )
    assert train == [*range(8), *range(7), *range(100, 105)]  # 15 and 5
    assert val == [8, 190]  # 3 and 1, of which the first data set has one
    assert test == [9, *range(195, 200)]


def test_a_part_without_samples_is_none_and_gives_its_share_to_others():
    train, val, test = train_val_test_datasets([range(10)], [[1, 0, 0]], None, [5, 5, 5], list)
    assert list(train) == [0, 1, 2, 3, 4]
    assert (val, test) == (None, None)

    train, _, _ = train_val_test_datasets(
        [range(4), range(10, 14)], [[0, 1, 0], [1, 0, 0]], [1, 1], [6, 1, 0], lambda parts: parts
    )
    assert list(train) == [10, 11, 12, 13, 10, 11]

    with pytest.raises(IndexError, match="sample 5 of a part of 5"):
        DatasetPart("abcdef", 2, 3, 5)[5]


def test_all_faults_of_splits_are_said_at_once():
    with pytest.raises(ConfigError) as raised:
        train_val_test_datasets([range(4), range(4), range(4)], [[1, 1], [0, 0, 0]], [1], [1, 2], list)
    message = str(raised.value)
    for fact in (
        "splits: got 2 rows for 3 data sets",
        "splits[0]: got [1, 1]; it must be three proportions",
        "splits[1]: got [0, 0, 0]",
        "weights: got 1 for 3 data sets",
        "train_val_test_num_samples: got [1, 2]",
    ):
        assert f"build_nlp_train_val_test_loader.{fact}" in message

    with pytest.raises(ConfigError, match="train_val_test_num_samples"):
        train_val_test_datasets([range(4), range(4)], [[1, 1, 1]], [1, 2], None, list)

"""A batch is a function of (seed, epoch, indices): not of the workers, the ranks, or where a run was resumed."""

import random
import time
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from tests.data.test_seeding import restore, states
from trainwright.base.errors import ConfigTypeError
from trainwright.data import (
    CyclicSampler,
    DataError,
    build_image_test_loader,
    build_image_train_loader,
    collate,
)
from trainwright.data.batch_loader import BatchReader, make_loader
from trainwright.data.sampler import EpochSampler, SampleIndices
from trainwright.data.seeding import read_state

DRAWS = {
    "nothing": lambda: 0.0,
    "random": random.random,
    "numpy": np.random.random,
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
    "numpy normal": np.random.normal,
    "all": lambda: random.gauss(0, 1) + np.random.normal() + torch.randn(()).item(),
}


class Augmented(Dataset):
    """Samples ``(index, what was drawn)``. With ``every`` = 100, one sample in a hundred draws."""

    def __init__(self, length=11, draw="all", every=1):
        self.length = length
        self.draw = draw
        self.every = every
        self.reads = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads.append(index)
        drawn = DRAWS[self.draw]() if index % self.every == self.every - 1 else 0.0
        return torch.tensor([index, drawn], dtype=torch.float64)


class WholeBatches(Augmented):
    def __getitems__(self, indices):
        noise = torch.rand(())
        return [torch.tensor([index, noise]) for index in indices]


def noisy(samples):
    """A collate function that draws, beside what the samples have drawn."""
    return collate(samples) + random.random() + np.random.random() + torch.rand(())


def train_loader(dataset, batch_size=4, **options):
    return build_image_train_loader(dataset, batch_size, **{"num_workers": 0, "seed": 5, **options})[0]


def take(loader, count):
    return [batch.tolist() for batch in islice(iter(loader), count)]


def by_sample(batches):
    return list(map(tuple, chain.from_iterable(batches)))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("collate_fn", [None, noisy], ids=["", "random collate"])
@pytest.mark.exhaustive(every=4)
def test_the_number_of_workers_changes_nothing(draw, collate_fn):
    batches = [take(train_loader(Augmented(draw=draw), num_workers=n, collate_fn=collate_fn), 8) for n in (0, 1, 2)]
    assert batches[0] == batches[1] == batches[2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_draw_after_batches_without_any_changes_nothing(num_workers):
    rare = train_loader(Augmented(400, every=100), num_workers=num_workers, sampler=CyclicSampler(range(400), 4))
    batches = take(rare, 200)
    # Always seeded, since its first sample draws too.
    often = train_loader(Augmented(400, every=1), sampler=CyclicSampler(range(400), 4))
    expected = {(number, index): drawn for number, (index, drawn) in enumerate(by_sample(take(often, 200)))}
    found = {(number, index): drawn for number, (index, drawn) in enumerate(by_sample(batches)) if drawn}
    assert len(found) == 8  # four in each of two epochs
    assert len(set(found.values())) == 8
    assert found == {place: expected[place] for place in found}


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("consumed", [*range(0, 36, 5), 11, 12, 22])
def test_resuming_anywhere_continues_bit_for_bit(consumed):
    whole = by_sample(take(train_loader(Augmented()), 16))
    for num_workers in (0, 1):
        loader = train_loader(Augmented(), consumed_samples=consumed, num_workers=num_workers)
        assert by_sample(take(loader, 5)) == whole[consumed : consumed + 20]


def test_one_loader_set_back_repeats_itself():
    loader = train_loader(Augmented(), num_workers=2)
    whole = take(loader, 6)
    loader.batch_sampler.set_consumed_samples(8)
    assert take(loader, 4) == whole[2:]


def test_samples_differ_and_their_draws_are_uniform():
    drawn = [value for _, value in by_sample(take(train_loader(Augmented(8)), 20))]
    other = [value for _, value in by_sample(take(train_loader(Augmented(8), seed=6), 20))]
    assert len({*drawn, *other}) == 160

    drawn = torch.tensor([v for _, v in by_sample(take(train_loader(Augmented(500, "numpy"), 50), 40))])
    counts = torch.histc(drawn, bins=10, min=0, max=1)
    assert counts.min() > 147  # 200 expected, standard deviation 13.4
    assert counts.max() < 253


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_an_epoch_are_a_function_of_their_place_too(num_workers):
    def batches(done, count):
        sampler = EpochSampler(range(11), 4, shuffle=True, seed=3)
        sampler.set_batches_done(done)
        loader = make_loader(Augmented(), sampler, seed=5, num_workers=num_workers, collate_fn=noisy, loader_options={})
        return take(loader, count)

    whole = batches(0, 9)
    assert batches(4, 5) == whole[4:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_draws_the_same_on_every_pass(num_workers):
    loader = build_image_test_loader(Augmented(), 4, num_workers=num_workers)
    first, second = (by_sample(take(loader, 9)) for _ in range(2))
    assert first == second == by_sample(take(build_image_test_loader(Augmented(), 3, num_workers=0), 9))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_another_samplers_lists_are_read_under_the_number_of_the_round(num_workers):
    loader = train_loader(Augmented(4), sampler=[[0, 1], [2, 3], [0, 2]], num_workers=num_workers)
    first, second = take(loader, 9), take(loader, 9)
    assert first[2] == [first[0][0], first[1][0]]  # the same sample in the same round
    assert not {value for _, value in by_sample(first)} & {value for _, value in by_sample(second)}
    again = train_loader(Augmented(4), sampler=[(0, 1), torch.tensor([2, 3]), np.array([0, 2])])
    assert [take(again, 9), take(again, 9)] == [first, second]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_that_reads_whole_batches_is_let(num_workers):
    sampler = [[0, 1], [2, 3], [4, 5]]
    batches = take(train_loader(WholeBatches(), sampler=sampler, num_workers=num_workers), 3)
    assert [[row[0] for row in batch] for batch in batches] == sampler
    noise = [{row[1] for row in batch} for batch in batches]
    assert [len(values) for values in noise] == [1, 1, 1]
    assert len(set.union(*noise)) == 3
    assert take(train_loader(WholeBatches(), sampler=sampler), 3) == batches


def test_a_subset_is_read_as_what_it_is_a_subset_of():
    loader = build_image_test_loader(Subset(Subset(Augmented(), range(1, 10)), [0, 2, 4, 6]), 3, num_workers=0)
    other = build_image_test_loader(Subset(Augmented(), [1, 3, 5, 7]), 2, num_workers=0)
    assert by_sample(take(loader, 2)) == by_sample(take(other, 2))
    whole = build_image_test_loader(Subset(WholeBatches(), range(4)), 4, num_workers=0)
    assert len({row[1] for row in take(whole, 1)[0]}) == 1


@pytest.mark.parametrize("draw", ["nothing", "all"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_does_not_move_the_random_numbers_of_training(draw, num_workers):
    random.gauss(0, 1)  # with the second of two normal numbers still to come
    np.random.normal()
    before = states()
    batches = iter(train_loader(Augmented(400, draw, every=7), num_workers=num_workers))
    expected = [(fn(), next(batches))[0] for _ in range(20) for fn in DRAWS.values()]
    restore(before)
    assert [fn() for _ in range(20) for fn in DRAWS.values()] == expected


def test_a_failed_read_does_not_move_them_either():
    class Breaks(Augmented):
        def __getitem__(self, index):
            if index == 9:
                torch.rand(())
                raise ValueError("broken")
            return super().__getitem__(index)

    batches = iter(train_loader(Breaks(12, "nothing"), sampler=CyclicSampler(range(12), 3)))
    before = read_state()
    for _ in range(3):
        next(batches)
    with pytest.raises(ValueError, match="broken"):
        next(batches)
    assert read_state() == before


def test_a_seed_that_the_data_set_sets_itself_holds_and_ends_with_the_sample():
    class Seeds(Augmented):
        def __getitem__(self, index):
            random.seed(index)
            return torch.tensor(random.random())

    before = read_state()
    batches = take(train_loader(Seeds(), sampler=CyclicSampler(range(11), 4)), 6)
    expected = [random.Random(number % 11).random() for number in range(24)]
    assert [*chain.from_iterable(batches)] == torch.tensor(expected).tolist()
    assert read_state() == before


def test_collate_draws_numbers_of_its_own_whatever_the_samples_did_to_the_generators():
    class Seeds(Augmented):
        def __getitem__(self, index):
            torch.manual_seed(0)
            return torch.tensor(index)

    batches = take(train_loader(Seeds(), collate_fn=lambda samples: torch.rand(()) + 0 * len(samples)), 6)
    assert len(set(batches)) == 6


@pytest.mark.parametrize(
    "act",
    [
        lambda: random.getrandbits(32 * 624),  # a whole turn of the generator
        lambda: random.gauss(0, 1),  # which keeps a second number
        lambda: random.seed(0),
        lambda: random.setstate(random.Random(3).getstate()),
        lambda: np.random.bytes(4 * 624),
        lambda: np.random.normal(),
        lambda: np.random.seed(3),
        lambda: np.random.set_state(np.random.RandomState(1).get_state()),
        lambda: torch.randint(2**31, (624,)),
        lambda: torch.randn(()),
        lambda: torch.manual_seed(0),
        lambda: torch.set_rng_state(torch.Generator().manual_seed(3).get_state()),
    ],
)
def test_whatever_one_late_sample_does_to_the_generators_is_undone(act):
    class Late(Augmented):
        def __getitem__(self, index):
            self.reads.append(index)
            if index == 10:
                act()
            return torch.tensor(index)

    data = Late(12, "nothing")
    before = read_state()
    assert list(chain.from_iterable(take(train_loader(data, sampler=CyclicSampler(range(12), 3)), 4))) == [*range(12)]
    assert read_state() == before
    assert data.reads == [*range(12), 9, 10, 11]  # the last batch once more, seeded


def test_each_sample_is_read_once():
    data = Augmented(100, "nothing")
    assert len(take(train_loader(data), 50)) == 50
    assert len(data.reads) == 200
    data = Augmented(100, "all")
    take(train_loader(data), 50)
    assert len(data.reads) == 200
    data = Augmented(100, "all", every=50)
    take(train_loader(data, sampler=CyclicSampler(range(100), 4)), 50)
    assert len(data.reads) == 204  # the batch of the first draw: once more


def failing(index, error, draw="nothing"):
    class Fails(Augmented):
        def __getitem__(self, at):
            if at == index:
                raise error
            return super().__getitem__(at)

    return Fails(12, draw)


def error_of(loader):
    """Type and message. Who keeps the error keeps the frames that it came through, and so the workers."""
    try:
        take(loader, 4)
    except Exception as error:
        return type(error), "\n".join([str(error), *getattr(error, "__notes__", [])])
    pytest.fail("nothing was raised")


@pytest.mark.parametrize("index", [2, 10])
@pytest.mark.usefixtures("forked_workers")
def test_the_sample_that_failed_in_a_worker_is_named(index):
    sampler = CyclicSampler(range(12), 3, consumed_samples=36)
    start = time.perf_counter()
    kind, message = error_of(train_loader(failing(index, ValueError("mine")), sampler=sampler, num_workers=2))
    assert time.perf_counter() - start < 4
    assert kind is ValueError
    assert "ValueError: mine" in message
    assert f"While reading sample {index} of Fails (epoch 3)." in message


def test_a_sample_that_fails_alone_or_in_a_batch_is_named():
    loader = train_loader(failing(1, ValueError("mine")), sampler=CyclicSampler(range(12), 5, consumed_samples=10))
    with pytest.raises(ValueError, match="mine") as raised:
        take(loader, 1)
    assert raised.value.__notes__ == ["While reading sample 1 of Fails (epoch 1)."]

    class Fails(WholeBatches):
        def __getitems__(self, indices):
            raise OSError("gone")

    with pytest.raises(OSError, match="gone") as raised:
        take(train_loader(Fails(), sampler=[[3, 5]]), 1)
    assert raised.value.__notes__ == ["While reading the samples 3, 5 of Fails (epoch 0)."]

    with pytest.raises(DataError, match=r"StopIteration .*sample 7 of Fails \(epoch 0\)"):
        take(train_loader(failing(7, StopIteration()), sampler=CyclicSampler(range(12), 3)), 4)


@pytest.mark.usefixtures("forked_workers")
def test_a_batch_that_cannot_be_made_names_its_samples():
    def refuses(samples):
        raise KeyError("no")

    def message_of(batch_size, num_workers):
        sampler = CyclicSampler(range(100), batch_size)
        loader = train_loader(Augmented(100), sampler=sampler, collate_fn=refuses, num_workers=num_workers)
        kind, message = error_of(loader)
        assert kind is KeyError
        return message

    for num_workers in (0, 1):
        assert "While making a batch of the samples 0, 1, 2 of Augmented (epoch 0)." in message_of(3, num_workers)
    assert "62, 63, … (70 in all) of Augmented" in message_of(70, 0)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.usefixtures("forked_workers")
def test_a_missing_return_and_a_wrong_collate_function_are_named(num_workers):
    def check(samples, collate_fn, kind, fact):
        loader = train_loader(
            [samples], sampler=CyclicSampler(samples, 4), num_workers=num_workers, collate_fn=collate_fn
        )
        found, message = error_of(loader)
        assert found is kind
        assert fact in message

    check([(1, 2), (1, 2), None, (1, 2)], None, DataError, "sample 2 of list is None: does its __getitem__ return")
    check(range(4), lambda samples: None, DataError, "<lambda> returned None: is a return missing?")
    fact = "is called with one argument, the list of samples: missing a required argument: 'labels'"
    check(range(4), lambda inputs, labels: inputs, ConfigTypeError, fact)
    samples = [1, None, 3, 4]
    kept = train_loader([samples], sampler=CyclicSampler(samples, 4), collate_fn=lambda s: [x for x in s if x])
    assert next(iter(kept)) == [1, 3, 4]


def test_without_workers_two_passes_may_go_on_beside_each_other():
    loader = build_image_test_loader(range(6), 2, num_workers=0)
    one, other = iter(loader), iter(loader)
    assert [next(one).tolist(), next(other).tolist(), next(one).tolist()] == [[0, 1], [0, 1], [2, 3]]
    assert [batch.tolist() for batch in other] == [[2, 3], [4, 5]]
    loader.close()
    assert [batch.tolist() for batch in one] == [[4, 5]]
    assert len(take(loader, 9)) == 3


def test_batches_are_pinned_where_that_is_possible(monkeypatch):
    seen = []
    monkeypatch.setattr("trainwright.data.batch_loader.can_pin_memory", lambda: True)
    monkeypatch.setattr("trainwright.data.batch_loader.pinned", lambda batch: seen.append(batch) or batch)
    kept = take(build_image_test_loader(range(4), 2, num_workers=0, pin_memory=False), 2)
    assert not seen
    assert take(build_image_test_loader(range(4), 2, num_workers=0), 2) == kept == [b.tolist() for b in seen]


def _prepare(worker_id):
    info = get_worker_info()
    info.dataset.offset = 100 * (info.id + 1)


class Prepared(Augmented):
    offset = 0

    def __getitem__(self, index):
        return torch.tensor(index + self.offset)


def test_a_users_worker_init_finds_the_data_set_itself():
    loader = build_image_test_loader(Prepared(4), 2, num_workers=2, worker_init_fn=_prepare)
    assert take(loader, 2) == [[100, 101], [202, 203]]


def test_a_whole_batch_that_nobody_leaves_as_it_is() -> None:
    class Whole:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.ones(2)}

        def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
            return {"x": torch.ones(len(indices), 2)}

    with pytest.raises(DataError, match=r"Whole\.__getitems__ .*dict.*data_collator=lambda batch: batch"):
        next(iter(build_image_train_loader(Whole(), 2, num_workers=0)[0]))
    loader, _, _ = build_image_train_loader(Whole(), 2, num_workers=0, collate_fn=lambda batch: batch)
    assert next(iter(loader))["x"].shape == (2, 2)


class Measured(Dataset):
    """Counts the calls of ``__len__``."""

    def __init__(self):
        self.calls, self.epochs = 0, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        self.calls += 1
        return 12

    def __getitem__(self, index):
        return index


def test_the_length_is_asked_once_for_each_epoch():
    data = Measured()
    reader = BatchReader(data, collate, seed=0)
    for batch in islice(CyclicSampler(range(12), 3), 12):
        reader.__getitems__(batch)
    assert (data.epochs, data.calls) == ([0, 1, 2], 2)  # not in the first one


class ByName(Dataset):
    def __len__(self):
        return 2

    def __getitems__(self, names):
        return [{3: 0, "b": 1}[name] for name in names]


def test_names_of_samples_are_not_compared():
    indices = SampleIndices([3, "b"], epoch=1, position=0, epoch_length=2)
    assert BatchReader(ByName(), collate, seed=0).__getitems__(indices).tolist() == [0, 1]

"""States of the three global generators: read, set aside, and put back."""

import random

import numpy as np
import pytest
import torch

from trainwright.data import generators
from trainwright.data.generators import SetAside, read_state, seed_generators, seed_numpy, write_state

DRAWS = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.shuffle": lambda: random.shuffle([1, 2, 3]),
    "numpy": np.random.random,
    "numpy.normal": np.random.normal,
    "torch": lambda: torch.rand(()).item(),
    "torch.normal": lambda: torch.randn(()).item(),
    "torch.perm": lambda: torch.randperm(3).tolist(),
    "random, 624 words": lambda: random.getrandbits(32 * 624),
    "numpy, 624 words": lambda: np.random.bytes(4 * 624),
    "torch, 624 words": lambda: torch.randint(2**31, (624,)).tolist(),
    "random.seed": lambda: random.seed(3),
    "random.setstate": lambda: random.setstate(random.Random(3).getstate()),
    "numpy.seed": lambda: np.random.seed(3),
    "numpy.set_state": lambda: np.random.set_state(np.random.RandomState(3).get_state()),
    "torch.manual_seed": lambda: torch.default_generator.manual_seed(3),
    "torch.set_rng_state": lambda: torch.set_rng_state(torch.Generator().manual_seed(3).get_state()),
}


@pytest.fixture(autouse=True)
def _kept_generators():
    state = read_state()
    yield
    write_state(state)


def _keep_second_normal_numbers():
    for name in ("random.gauss", "numpy.normal", "torch.normal"):
        DRAWS[name]()


# How the generators come to be where they are when they are set aside.
BEGINNINGS = {
    "numpy as it was seeded": lambda: seed_numpy(7),
    "numpy after a draw": lambda: (seed_numpy(7), np.random.random()),
    "numpy at the end of its words": lambda: (seed_numpy(7), np.random.bytes(4 * 624)),
    "numpy seeded by the user": lambda: np.random.seed(8),
    "second normal numbers": lambda: (seed_numpy(7), _keep_second_normal_numbers()),
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("name", [None, *DRAWS])
def test_what_happens_while_they_are_set_aside_is_noticed_and_undone(name, beginning):
    BEGINNINGS[beginning]()
    before = read_state()
    for _ in range(3):
        outside = SetAside()
        if name is not None:
            DRAWS[name]()
        assert outside.has_drawn() == (name is not None)
        outside.put_back()
        drawn = [draw() for draw in DRAWS.values()]
        write_state(before)
        assert drawn == [draw() for draw in DRAWS.values()]
        write_state(before)


# At the end of its words numpy may make the next ones before they are asked for: other words, the same numbers.
@pytest.mark.parametrize("beginning", [name for name in BEGINNINGS if name != "numpy at the end of its words"])
def test_put_back_restores_each_state(beginning):
    BEGINNINGS[beginning]()
    before = read_state()
    SetAside().put_back()
    assert read_state() == before


@pytest.mark.parametrize("name", ["random", "random.gauss", "numpy", "numpy.normal", "torch", "torch.normal"])
def test_a_state_that_is_written_repeats_the_draw(name):
    _keep_second_normal_numbers()
    before = read_state()
    drawn = DRAWS[name]()
    assert read_state() != before
    write_state(before)
    assert read_state() == before
    assert DRAWS[name]() == drawn


def test_numpys_generator_may_be_replaced_meanwhile():
    twister = np.random.get_bit_generator()
    for make in (np.random.MT19937, np.random.PCG64):
        seed_numpy(7)
        outside = SetAside()
        try:
            np.random.set_bit_generator(make(3))
            assert outside.has_drawn()
            outside.put_back()
        finally:
            np.random.set_bit_generator(twister)


def test_another_kind_of_generator_behind_numpy_random_is_left_alone():
    twister = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        before = read_state()
        outside = SetAside()
        seed_generators(bytes(20))
        first = np.random.random()
        outside.put_back()
        write_state(before)
        assert first == np.random.Generator(np.random.PCG64(3)).random()
    finally:
        np.random.set_bit_generator(twister)
    assert read_state().numpy is not None


def test_seeding_repeats_everything_and_gives_each_generator_numbers_of_its_own():
    def draws(words):
        seed_generators(words)
        return [random.getrandbits(32), int(np.random.randint(2**32)), int(torch.randint(2**32, ()))]

    first = draws(bytes(range(20)))
    assert draws(bytes(range(20))) == first
    assert not {*first} & {*draws(bytes(range(1, 21)))}
    assert len({*draws(bytes(20))}) == 3


def test_seed_numpy_is_numpys_own_seed():
    seed_numpy(7)
    first = np.random.get_state()
    np.random.seed(7)
    assert np.array_equal(first[1], np.random.get_state()[1])
    assert first[2:] == np.random.get_state()[2:]


def test_seeding_leaves_the_generators_of_accelerators_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("touched"))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("touched"))
    seed_generators(bytes(20))


def test_the_number_that_is_written_out_is_the_one_that_numpy_gives():
    np.random.seed(generators._NUMPY_MARK.seed)
    assert np.random.get_bit_generator().random_raw() == generators._NUMPY_MARK.next

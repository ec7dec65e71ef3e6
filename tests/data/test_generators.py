"""States of the three global generators, read and put back."""

import random

import numpy as np
import pytest
import torch

from trainwright.data import generators
from trainwright.data.generators import read_state, seed_generators, write_state

DRAWS = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.shuffle": lambda: random.shuffle([1, 2, 3]),
    "numpy": np.random.random,
    "numpy.normal": np.random.normal,
    "torch": lambda: torch.rand(()).item(),
    "torch.normal": lambda: torch.randn(()).item(),
    "torch.perm": lambda: torch.randperm(3).tolist(),
}


@pytest.fixture(autouse=True)
def _kept_generators():
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@pytest.fixture(params=["memory", "public calls"])
def _way(request, monkeypatch):
    """Both ways to read: the words where they lie, and the public calls where they do not lie as expected."""
    if request.param == "public calls":
        monkeypatch.setattr(generators, "_PYTHON_ADDRESS", None)
        monkeypatch.setattr(generators, "_numpy", generators._Numpy())
        monkeypatch.setattr(generators, "_numpy_address", lambda generator: None)


def test_here_the_words_lie_where_they_are_expected():
    assert generators._PYTHON_ADDRESS is not None
    assert generators._numpy_address(np.random.get_bit_generator()) is not None


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", DRAWS)
def test_any_draw_changes_the_state_and_putting_it_back_repeats_the_draw(name):
    before = read_state()
    assert read_state() == before
    drawn = DRAWS[name]()
    assert read_state() != before
    write_state(before)
    assert read_state() == before
    assert DRAWS[name]() == drawn


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", ["random.gauss", "numpy.normal"])
def test_the_second_of_two_normal_numbers_is_no_less_a_draw(name):
    DRAWS[name]()  # keeps a second number, which the next call takes without touching the words
    before = read_state()
    drawn = DRAWS[name]()
    assert read_state() != before
    write_state(before)
    assert DRAWS[name]() == drawn


@pytest.mark.usefixtures("_way")
def test_a_whole_turn_of_the_twister_is_seen():
    """After 624 words, the place in them is what it was."""
    before = read_state()
    for _ in range(624):
        random.getrandbits(32)
    np.random.bytes(4 * 624)
    after = read_state()
    assert after.python != before.python
    assert after.numpy != before.numpy


def test_both_ways_read_the_same(monkeypatch):
    random.gauss(0, 1)
    np.random.normal()
    in_memory = read_state()
    monkeypatch.setattr(generators, "_PYTHON_ADDRESS", None)
    monkeypatch.setattr(generators, "_numpy", generators._Numpy())
    monkeypatch.setattr(generators, "_numpy_address", lambda generator: None)
    assert read_state() == in_memory


def test_seeding_repeats_everything_and_gives_each_generator_numbers_of_its_own():
    def draws(words):
        seed_generators(words)
        return [random.getrandbits(32), int(np.random.randint(2**32)), int(torch.randint(2**32, ()))]

    first = draws(bytes(range(20)))
    assert draws(bytes(range(20))) == first
    assert not {*first} & {*draws(bytes(range(1, 21)))}
    assert len({*draws(bytes(20))}) == 3


def test_seeding_leaves_the_generators_of_accelerators_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("touched"))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("touched"))
    seed_generators(bytes(20))


def test_another_generator_behind_numpy_random_is_left_alone():
    twister = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        before = read_state()
        seed_generators(bytes(20))
        first = np.random.random()
        write_state(before)
        assert first == np.random.Generator(np.random.PCG64(3)).random()
    finally:
        np.random.set_bit_generator(twister)
    assert read_state().numpy is not None

"""States of the three global generators, read and put back."""

import random

import numpy as np
import pytest
import torch

from trainwright.data import generators
from trainwright.data.generators import is_unmoved, read_state, seed_generators, write_state

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


def _use_public_calls(monkeypatch):
    monkeypatch.setattr(generators, "_python_words", generators._public_python_words)
    monkeypatch.setattr(generators, "_torch_words", generators._public_torch_words)
    monkeypatch.setattr(generators, "_gauss_offset", lambda: None)
    monkeypatch.setattr(generators, "_numpy", generators._Numpy())
    monkeypatch.setattr(generators, "_last", None)


@pytest.fixture(params=["memory", "public calls"])
def _way(request, monkeypatch):
    """Both ways to read: the words where they lie, and the public calls where they do not lie as expected."""
    if request.param == "public calls":
        _use_public_calls(monkeypatch)


def test_here_the_words_lie_where_they_are_expected():
    read_state()
    assert generators._python_memory() is not None
    assert generators._torch_memory() is not None
    assert generators._numpy._words is not None


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", DRAWS)
def test_any_draw_changes_the_state_and_putting_it_back_repeats_the_draw(name):
    before = read_state()
    assert read_state() == before
    assert is_unmoved(before)
    drawn = DRAWS[name]()
    assert not is_unmoved(before)
    assert read_state() != before
    write_state(before)
    assert is_unmoved(before)
    assert read_state() == before
    assert DRAWS[name]() == drawn


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", ["random.gauss", "numpy.normal", "torch.normal"])
def test_the_second_of_two_normal_numbers_is_no_less_a_draw(name):
    DRAWS[name]()  # keeps a second number, which the next call takes without touching the words
    before = read_state()
    drawn = DRAWS[name]()
    assert not is_unmoved(before)
    assert read_state() != before
    write_state(before)
    assert DRAWS[name]() == drawn


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("turns", [1, 3])
def test_whole_turns_of_the_twister_are_seen(turns):
    """After 624 words, the place in them is what it was."""
    whole_turns = {
        "python": lambda: [random.getrandbits(32) for _ in range(624 * turns)],
        "numpy": lambda: np.random.bytes(4 * 624 * turns),
        "torch": lambda: torch.randint(2**31, (624 * turns,)),
    }
    for name, draw in whole_turns.items():
        before = read_state()
        draw()
        assert not is_unmoved(before), name
        assert getattr(read_state(), name) != getattr(before, name)


MOVES = {
    "random.seed": lambda: random.seed(3),
    "random.setstate": lambda: random.setstate(random.Random(3).getstate()),
    "numpy.seed": lambda: np.random.seed(3),
    "numpy.set_state": lambda: np.random.set_state(np.random.RandomState(3).get_state()),
    "torch.manual_seed": lambda: torch.manual_seed(3),
    "torch.set_rng_state": lambda: torch.set_rng_state(torch.Generator().manual_seed(3).get_state()),
}


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", MOVES)
def test_a_generator_that_is_seeded_or_set_has_moved(name):
    before = read_state()
    MOVES[name]()
    assert not is_unmoved(before)
    after = read_state()
    assert after != before
    MOVES[name]()
    assert is_unmoved(after)
    write_state(before)
    assert is_unmoved(before)


@pytest.mark.usefixtures("_way")
def test_a_kept_number_that_is_exchanged_or_forgotten_is_seen():
    np.random.normal()
    before = read_state()
    name, key, place, has_gauss, gauss = np.random.get_state()
    for kept in [(has_gauss, gauss + 1), (0, 0.0)]:
        np.random.set_state((name, key, place, *kept))
        assert not is_unmoved(before)
    write_state(before)
    assert np.random.normal() == gauss


@pytest.mark.usefixtures("_way")
def test_a_torch_state_that_is_set_to_what_it_was_has_not_moved():
    """What is left where a kept number lay is no part of the state."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    before = read_state()
    torch.randn(())
    torch.set_rng_state(state)
    assert is_unmoved(before)
    assert read_state() == before


@pytest.mark.usefixtures("_way")
def test_numpys_generator_may_be_exchanged_meanwhile():
    twister = np.random.get_bit_generator()
    before = read_state()
    try:
        np.random.set_bit_generator(np.random.MT19937(3))
        assert not is_unmoved(before)
        first = read_state()
        np.random.random()
        assert not is_unmoved(first)
    finally:
        np.random.set_bit_generator(twister)
    assert is_unmoved(before)


def test_both_ways_read_the_same(monkeypatch):
    random.gauss(0, 1)
    np.random.normal()
    in_memory = read_state()
    _use_public_calls(monkeypatch)
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

import random

import numpy as np
import pytest
import torch

from trainwright.data.seeding import (
    SavedGenerators,
    permutation,
    seed_everything,
    seed_generators,
)


def states():
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore(states):
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_a_permutation_is_a_function_of_seed_and_epoch():
    assert torch.equal(permutation(100, 5, 2), permutation(100, 5, 2))
    assert not torch.equal(permutation(100, 5, 2), permutation(100, 5, 3))
    assert not torch.equal(permutation(100, 5, 2), permutation(100, 6, 2))

    counts = torch.bincount(torch.stack([permutation(10, 0, epoch)[0] for epoch in range(3000)]), minlength=10)
    assert counts.min() > 235  # 300 expected, standard deviation 16.4
    assert counts.max() < 365


def test_all_three_generators_follow_the_seed():
    def draws(seed):
        seed_everything(seed)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    first, other = draws(2**63 + 5), draws(3)
    assert draws(2**63 + 5) == first
    assert all(a != b for a, b in zip(first, other, strict=True))


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


def _keep_second_normal_numbers():
    for name in ("random.gauss", "numpy.normal", "torch.normal"):
        DRAWS[name]()


# How the generators come to be where they are when they are set aside.
BEGINNINGS = {
    "as they were seeded": lambda: seed_everything(7),
    "after a draw": lambda: (seed_everything(7), np.random.random(), random.random()),
    "at the end of their words": lambda: (seed_everything(7), np.random.bytes(4 * 624), random.getrandbits(32 * 624)),
    "seeded by the user": lambda: (np.random.seed(8), random.seed(8)),
    "second normal numbers": lambda: (seed_everything(7), _keep_second_normal_numbers()),
}


@pytest.mark.exhaustive(every=8)
@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("name", [None, *DRAWS])
def test_what_happens_while_they_are_set_aside_is_noticed_and_undone(name, beginning):
    BEGINNINGS[beginning]()
    before = states()
    for _ in range(3):
        outside = SavedGenerators()
        if name is not None:
            DRAWS[name]()
        assert outside.has_drawn() == (name is not None)
        outside.restore()
        drawn = [draw() for draw in DRAWS.values()]
        restore(before)
        assert drawn == [draw() for draw in DRAWS.values()]
        restore(before)


def test_seeding_repeats_everything_and_gives_each_generator_numbers_of_its_own():
    def draws(key):
        seed_generators(key, "sample")
        return [random.getrandbits(32), int(np.random.randint(2**32)), int(torch.randint(2**32, ()))]

    first = draws(bytes(range(8)))
    assert draws(bytes(range(8))) == first
    assert not {*first} & {*draws(bytes(range(1, 9)))}
    assert len({*draws(bytes(8))}) == 3


def test_seeding_is_numpys_own_and_leaves_accelerators_alone(monkeypatch):
    seed_everything(7)
    first, of_python = np.random.get_state(), random.getstate()
    np.random.seed(7)
    assert np.array_equal(first[1], np.random.get_state()[1])
    assert first[2:] == np.random.get_state()[2:]
    assert of_python == random.Random(7).getstate()

    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("touched"))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("touched"))
    seed_generators(bytes(8), "")

import random

import numpy as np
import pytest
import torch

from trainwright.data.seeding import (
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

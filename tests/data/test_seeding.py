import random

import numpy as np
import pytest
import torch

from trainwright.data.seeding import mixed_seed, permutation, seed_everything_in_this_process


def test_neighbouring_inputs_give_seeds_that_share_nothing():
    seeds = {mixed_seed(seed, *path) for seed in range(50) for path in [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]}
    assert len(seeds) == 300
    flipped = [(mixed_seed(seed, 0) ^ mixed_seed(seed + 1, 0)).bit_count() for seed in range(200)]
    assert 28 < sum(flipped) / len(flipped) < 36  # half of 64 bits, give or take four standard errors and more


def test_a_large_seed_is_not_mistaken_for_a_longer_path():
    assert mixed_seed(2**32, 0) != mixed_seed(0, 1, 0)


def test_a_permutation_is_a_function_of_seed_and_epoch():
    assert torch.equal(permutation(100, 5, 2), permutation(100, 5, 2))
    assert not torch.equal(permutation(100, 5, 2), permutation(100, 5, 3))
    assert not torch.equal(permutation(100, 5, 2), permutation(100, 6, 2))


def test_first_places_of_a_permutation_are_uniform_over_epochs():
    counts = torch.bincount(torch.stack([permutation(10, 0, epoch)[0] for epoch in range(3000)]), minlength=10)
    assert counts.min() > 235  # 300 expected, standard deviation 16.4
    assert counts.max() < 365


@pytest.fixture
def _kept_generators():
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@pytest.mark.usefixtures("_kept_generators")
def test_all_three_generators_follow_the_seed():
    def draws(seed):
        seed_everything_in_this_process(seed)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    first, other = draws(2**63 + 5), draws(3)
    assert draws(2**63 + 5) == first
    assert all(a != b for a, b in zip(first, other, strict=True))

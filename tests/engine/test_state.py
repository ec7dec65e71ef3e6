"""The state of a run: generators are restored exactly; a resume knows what has changed."""

import random

import numpy as np
import pytest
import torch

from trainwright.data.seeding import seed_everything
from trainwright.engine.state import random_state, set_random_state


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.randn()), torch.rand(()).item()


def test_the_same_seed_draws_the_same_numbers() -> None:
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert draw() != first


def test_a_state_that_is_set_again_continues_there() -> None:
    seed_everything(3)
    draw()  # an odd number of normal draws: half of a pair is kept in the state
    state = random_state()
    expected = [draw() for _ in range(3)]
    seed_everything(9)
    set_random_state(state)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("is_used", [False, True])
def test_the_generator_of_a_gpu_is_saved_only_if_this_process_uses_the_gpu(
    is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read its state would begin to use the GPU: half a gigabyte of it."""
    there = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: there[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", there.append)
    state = random_state()
    assert ("cuda" in state) is is_used
    set_random_state({**state, "cuda": torch.tensor([9], dtype=torch.uint8)})  # of a run on a GPU
    assert [int(one) for one in there] == ([7, 9] if is_used else [7])

"""Random seeds as pure functions of (seed, place), and the three global generators that data sets draw from.

The generators are ``random``, ``numpy.random`` and torch's on the CPU. Before a batch is read, their states are saved
(`SavedGenerators`). If they are the same afterwards, nothing was drawn.

The states of Python's and numpy's are slow to read (`_Watched`). Usually no code draws from these in the training
process between two batches, so their seeds are kept: one draw checks that the generator is still at its seed, a second
one that nothing was drawn while the batch was read, and seeding it again undoes both.
"""

import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

# First number of the path: one per use, so that no two uses ever share a stream.
ORDER_STREAM = 0
WORKER_STREAM = 1
LOADER_STREAM = 2
SAMPLE_STREAM = 3


def mixed_seed(seed: int, *path: int) -> int:
    """A 64-bit seed for ``path`` under ``seed``: neighbouring inputs give unrelated seeds.

    ``seed + epoch`` would not do: epoch 1 of seed 0 would be epoch 0 of seed 1.
    """
    return int(np.random.SeedSequence(seed, spawn_key=path).generate_state(1, np.uint64)[0])


def permutation(length: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of ``range(length)`` in one epoch: int64, drawn without touching the global generators."""
    generator = torch.Generator("cpu").manual_seed(mixed_seed(seed, ORDER_STREAM, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


def stream_key(seed: int, *path: int) -> bytes:
    """The key for `seed_generators`, of 8 bytes."""
    return mixed_seed(seed, *path).to_bytes(8)


def seed_generators(key: bytes, place: str) -> None:
    """Seed the three generators by a function of key and place, without touching those of accelerators.

    Ten times as fast as `mixed_seed`. Each generator gets its own bytes: numpy and torch would draw the same numbers
    from one seed.
    """
    words = hashlib.blake2b(place.encode(), digest_size=20, key=key).digest()
    random.seed(int.from_bytes(words[:8]))
    np.random.seed(int.from_bytes(words[8:12]))
    torch.default_generator.manual_seed(int.from_bytes(words[12:20]))


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators (all devices) of this process."""
    python, numpy = _watched()
    python.seed(seed)
    numpy.seed(seed % 2**32)  # the legacy generator, which is the one that transforms draw from, takes 32 bits
    torch.manual_seed(seed)


def read_state() -> tuple[Any, ...]:
    """The state of the three generators: equal states give equal numbers. Draws nothing. Takes 40 us."""
    _, words, *rest = np.random.get_state()
    of_numpy = np.asarray(words).tobytes(), *rest
    return random.getstate(), *of_numpy, torch.default_generator.get_state().numpy().tobytes()


class SavedGenerators:
    """Saves the states of the three generators.

    ``restore`` restores the saved states. Before that, ``has_drawn`` returns, once, whether numbers were drawn since.
    """

    __slots__ = ("_torch", "_watched")

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._watched: list[tuple[_Watched, _Seed, Any]] = []
        for one in _watched():
            known = one.known
            if known is not None and one.draw() == known.first:
                self._watched.append((one, known, None))
            else:
                self._watched.append(one.set_aside())

    def has_drawn(self) -> bool:
        """Whether a generator was drawn from, seeded, or set."""
        for one, known, _ in self._watched:
            if one.draw() != known.second:
                return True
        return not torch.equal(torch.default_generator.get_state(), self._torch)

    def restore(self) -> None:
        torch.default_generator.set_state(self._torch)
        for one, known, state in self._watched:
            if state is None:
                one.set_seed(known.seed)
            else:
                one.set_state(state)


@contextmanager
def kept_generators(*, in_checkpoints: bool = False) -> Iterator[None]:
    """The generators have the same state afterwards; ``in_checkpoints``: also in those that are saved inside."""
    global _state_afterwards
    state, before = rng_state(), _state_afterwards
    if in_checkpoints:
        _state_afterwards = before or state
    try:
        yield
    finally:
        _state_afterwards = before
        set_random_state(state)


def random_state() -> dict[str, Any]:
    """The state of all generators of this process for a checkpoint; within ``kept_generators`` that of before."""
    return _state_afterwards or rng_state()


def rng_state() -> dict[str, Any]:
    """The state of all generators of this process now: numbers and tensors."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    for name, module in _accelerators().items():
        state[name] = module.get_rng_state()
    return state


def _accelerators() -> dict[str, Any]:
    """The modules of accelerators that this process uses: a run on the CPU leaves a GPU alone."""
    modules: dict[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu}
    return {name: module for name, module in modules.items() if module.is_initialized()}


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state from :func:`random_state` or :func:`rng_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for name, module in _accelerators().items():
        if name in state:
            module.set_rng_state(state[name])


def is_generator(value: Any) -> bool:
    """Whether it is a random generator of torch, Python or numpy."""
    return isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState)


def generator_state(one: Any) -> Any:
    """Its state: numbers, text and tensors."""
    if isinstance(one, torch.Generator):
        return one.get_state()
    if isinstance(one, random.Random):
        return [*one.getstate()]
    if isinstance(one, np.random.RandomState):
        return _plain(one.get_state(legacy=False))
    return _plain(one.bit_generator.state)


def set_generator_state(one: Any, state: Any) -> None:
    """Continue the generator at a state from :func:`generator_state`."""
    if isinstance(one, torch.Generator):
        one.set_state(state)
    elif isinstance(one, random.Random):
        version, words, gauss = state
        one.setstate((version, tuple(words), gauss))
    elif isinstance(one, np.random.RandomState):
        one.set_state({**state, "state": {**state["state"], "key": np.array(state["state"]["key"], np.uint32)}})
    else:
        one.bit_generator.state = state


def _plain(state: Any) -> Any:
    """The state of a bit generator of numpy with lists in place of arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


class _Seed(NamedTuple):
    """A seed, and the first two numbers that a generator gives after it."""

    seed: int
    first: int
    second: int


class _Watched:
    """Python's or numpy's global generator, watched by the number that it gives next.

    Reading and comparing its state takes 30 to 100 us.

    Args:
        step_back: returns a state with the latest number undrawn.
    """

    def __init__(
        self,
        set_seed: Callable[[int], object],
        draw: Callable[[], int],
        get_state: Callable[[], Any],
        set_state: Callable[[Any], object],
        step_back: Callable[[Any], Any],
    ) -> None:
        self.set_seed, self.draw, self.set_state = set_seed, draw, set_state
        self._get_state, self._step_back = get_state, step_back
        state = get_state()
        self._mark = self._numbers_of(0x7A3C59E1)  # any seed
        set_state(state)
        self.known: _Seed | None = None  # the seed that was set last, if nothing is known to have been drawn since

    def _numbers_of(self, seed: int) -> _Seed:
        self.set_seed(seed)
        return _Seed(seed, self.draw(), self.draw())

    def seed(self, seed: int) -> None:
        """Set the seed, which is remembered."""
        self.known = self._numbers_of(seed)
        self.set_seed(seed)

    def set_aside(self) -> "tuple[_Watched, _Seed, Any]":
        """Read the state, before the number that a look at a ``known`` seed has drawn, and set another seed.

        Returns that seed, whose first number is drawn, and the state.
        """
        if self.known is not None:
            self.known = None
            self.set_state(self._step_back(self._get_state()))
        state = self._get_state()
        self.set_seed(self._mark.seed)
        self.draw()
        return self, self._mark, state


@functools.cache
def _watched() -> tuple[_Watched, _Watched]:
    """Python's generator and numpy's. Built at first use: numpy.random is not imported before."""
    return (
        _Watched(
            random.seed,
            functools.partial(random.getrandbits, 32),
            random.getstate,
            random.setstate,
            lambda state: (state[0], (*state[1][:-1], state[1][-1] - 1), state[2]),
        ),
        _Watched(
            np.random.seed,
            np.random.get_bit_generator().random_raw,  # type: ignore[attr-defined]  # public, and not in numpy's type stubs
            np.random.get_state,
            np.random.set_state,
            lambda state: (*state[:2], state[2] - 1, *state[3:]),
        ),
    )


_state_afterwards: dict[str, Any] | None = None

"""Random seeds as pure functions of (seed, place), and the three global generators that data sets draw from.

The generators are ``random``, ``numpy.random`` and torch's on the CPU. Before a batch is read, their states are saved
and replaced by known states (`SavedGenerators`). If each generator then returns the number that follows its known
state, nothing was drawn. That takes about 20 us per batch and uses only public functions.

Only numpy's state is slow to read and to write (30 us each). Usually no code draws from numpy in the training process,
and its generator still has the state that `seed_everything` set: one draw checks that, and seeding again restores it.
"""

import hashlib
import random
from collections.abc import Iterator
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
    if _has_twister():
        np.random.seed(int.from_bytes(words[8:12]))
    torch.default_generator.manual_seed(int.from_bytes(words[12:20]))


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators (all devices) of this process."""
    random.seed(seed)
    seed_numpy(seed % 2**32)  # the legacy generator, which is the one that transforms draw from, takes 32 bits
    torch.manual_seed(seed)


def seed_numpy(seed: int) -> None:
    """``np.random.seed(seed)``, which is remembered."""
    global _numpy_seed
    np.random.seed(seed)
    _numpy_seed = _Seed(seed, _numpy_generator().random_raw())
    np.random.seed(seed)


def read_state() -> tuple[Any, ...]:
    """The state of the three generators: equal states give equal numbers. Draws nothing. Takes 40 us."""
    words, rest = b"", []
    if _has_twister():
        _, key, *rest = np.random.get_state()
        words = np.asarray(key).tobytes()
    return random.getstate(), words, *rest, torch.default_generator.get_state().numpy().tobytes()


class SavedGenerators:
    """Saves the states of the three generators and replaces them by known states.

    ``restore`` restores the saved states. Before that, ``has_drawn`` returns, once, whether numbers were drawn since.
    """

    __slots__ = ("_numpy", "_numpy_mark", "_python", "_torch")

    def __init__(self) -> None:
        self._python = random.getstate()
        random.setstate(_PYTHON_MARK)
        self._torch = torch.default_generator.get_state()
        torch.default_generator.set_state(_TORCH_MARK)
        self._numpy: Any = None
        self._numpy_mark = _reset_numpy_to_its_seed()
        if self._numpy_mark is None and _has_twister():
            self._numpy, self._numpy_mark = np.random.get_state(), _NUMPY_MARK
            np.random.seed(_MARK)

    def has_drawn(self) -> bool:
        """Whether a generator was drawn from, seeded, or set."""
        return (
            random.getrandbits(64) != _PYTHON_NEXT
            or not torch.equal(torch.default_generator.get_state(), _TORCH_MARK)
            or self._has_drawn_from_numpy()
        )

    def restore(self) -> None:
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        if self._numpy_mark is None or not _has_twister():
            return
        if self._numpy is None:
            np.random.seed(self._numpy_mark.seed)
        else:
            np.random.set_state(self._numpy)

    def _has_drawn_from_numpy(self) -> bool:
        if self._numpy_mark is None:  # another kind of generator is left alone
            return False
        return not _has_twister() or _numpy_generator().random_raw() != self._numpy_mark.next


@contextmanager
def kept_generators() -> Iterator[None]:
    """The three generators have the same state afterwards."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def random_state() -> dict[str, Any]:
    """The state of all generators of this process: numbers and tensors. See also ``unchanged_afterwards``."""
    if _state_afterwards is not None:
        return _state_afterwards
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


@contextmanager
def unchanged_afterwards() -> Iterator[None]:
    """``random_state`` returns the present state inside, for a checkpoint; the caller restores it afterwards."""
    global _state_afterwards
    before, _state_afterwards = _state_afterwards, random_state()
    try:
        yield
    finally:
        _state_afterwards = before


class _Seed(NamedTuple):
    """A seed of numpy's generator, and the first number that the generator gives after it."""

    seed: int
    next: int


def _reset_numpy_to_its_seed() -> _Seed | None:
    """The seed of numpy's generator if nothing was drawn since it was set; otherwise None, with its state unchanged."""
    global _numpy_seed
    seed = _numpy_seed
    if seed is None or not _has_twister():
        return None
    if _numpy_generator().random_raw() == seed.next:
        np.random.seed(seed.seed)
        return seed
    _numpy_seed = None
    state = np.random.get_state(legacy=False)
    state["state"]["pos"] -= 1  # the number that was drawn here: the next one again
    np.random.set_state(state)
    return None


def _numpy_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, and not in numpy's type stubs


def _has_twister() -> bool:
    """Whether ``numpy.random`` has its usual kind of generator: only this one can be seeded again."""
    return isinstance(_numpy_generator(), np.random.MT19937)


_numpy_seed: _Seed | None = None
_state_afterwards: dict[str, Any] | None = None
_MARK = 0x7A3C59E1  # any seed
_NUMPY_MARK = _Seed(_MARK, 2034890414)  # written out, so that numpy.random is not imported for it
_PYTHON_MARK = random.Random(_MARK).getstate()
_PYTHON_NEXT = random.Random(_MARK).getrandbits(64)
_TORCH_MARK = torch.Generator().manual_seed(_MARK).get_state()

"""The three global generators that data sets draw from: ``random``, ``numpy.random`` and torch's on the CPU.

Before a batch is read, their states are saved and replaced by known states. If each generator then returns the number
that follows its known state, nothing was drawn. That takes about 20 us per batch and uses only public functions.

Only numpy's state is slow to read and to write (30 us each). Usually no code draws from numpy in the training process,
and its generator still has the state that `seed_numpy` set: one draw checks that, and seeding again restores it.
"""

import random
from typing import Any, NamedTuple

import numpy as np
import torch

_MARK = 0x7A3C59E1  # any seed


class NumpyState(NamedTuple):
    """The words of the generator, the place in them, and every second normal number, which numpy keeps."""

    words: bytes
    place: int
    has_gauss: int
    gauss: float


class _Seed(NamedTuple):
    """A seed of numpy's generator, and the first number that the generator gives after it."""

    seed: int
    next: int


class State(NamedTuple):
    """The state of all three generators. Equal states give equal numbers."""

    python: tuple[Any, ...]
    numpy: NumpyState | None  # None: ``numpy.random`` was given a generator that cannot be seeded again
    torch: bytes


def read_state() -> State:
    """The state of the three generators. Draws nothing. Takes 40 us."""
    return State(random.getstate(), _numpy_state(), torch.default_generator.get_state().numpy().tobytes())


def write_state(state: State) -> None:
    """Set the three generators to a state that was read."""
    random.setstate(state.python)
    _set_numpy_state(state.numpy)
    torch.default_generator.set_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))


def seed_numpy(seed: int) -> None:
    """``np.random.seed(seed)``, which is remembered."""
    global _numpy_seed
    np.random.seed(seed)
    _numpy_seed = _Seed(seed, _numpy_generator().random_raw())
    np.random.seed(seed)


def seed_generators(words: bytes) -> None:
    """Seed the three generators from 20 bytes, without touching those of accelerators.

    Each has bytes of its own: numpy and torch would draw the same numbers from one seed.
    """
    random.seed(int.from_bytes(words[:8]))
    if _has_twister():
        np.random.seed(int.from_bytes(words[8:12]))
    torch.default_generator.manual_seed(int.from_bytes(words[12:20]))


class SetAside:
    """The states of the three generators, which are put to known states when this is made.

    ``put_back`` restores them. Before that, ``has_drawn`` returns, once, whether numbers were drawn since.
    """

    __slots__ = ("_numpy", "_numpy_mark", "_python", "_torch")

    def __init__(self) -> None:
        self._python = random.getstate()
        random.setstate(_PYTHON_MARK)
        self._torch = torch.default_generator.get_state()
        torch.default_generator.set_state(_TORCH_MARK)
        self._numpy: NumpyState | None = None
        self._numpy_mark = _put_numpy_to_its_seed()
        if self._numpy_mark is None and _has_twister():
            self._numpy, self._numpy_mark = _numpy_state(), _NUMPY_MARK
            np.random.seed(_MARK)

    def has_drawn(self) -> bool:
        """Whether a generator was drawn from, seeded, or set."""
        return (
            random.getrandbits(64) != _PYTHON_NEXT
            or not torch.equal(torch.default_generator.get_state(), _TORCH_MARK)
            or self._has_drawn_from_numpy()
        )

    def put_back(self) -> None:
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        if self._numpy is not None:
            _set_numpy_state(self._numpy)
        elif self._numpy_mark is not None and _has_twister():
            np.random.seed(self._numpy_mark.seed)

    def _has_drawn_from_numpy(self) -> bool:
        if self._numpy_mark is None:  # another kind of generator is left alone
            return False
        return not _has_twister() or _numpy_generator().random_raw() != self._numpy_mark.next


def _put_numpy_to_its_seed() -> _Seed | None:
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
    return isinstance(_numpy_generator(), np.random.MT19937)


def _numpy_state() -> NumpyState | None:
    if not _has_twister():
        return None
    _, key, place, has_gauss, gauss = np.random.get_state()
    return NumpyState(np.asarray(key, np.uint32).tobytes(), int(place), int(has_gauss), float(gauss))


def _set_numpy_state(state: NumpyState | None) -> None:
    if state is not None and _has_twister():
        words = np.frombuffer(state.words, np.uint32)
        np.random.set_state(("MT19937", words, state.place, state.has_gauss, state.gauss))


_numpy_seed: _Seed | None = None
_NUMPY_MARK = _Seed(_MARK, 2034890414)  # written out, so that numpy.random is not imported for it
_PYTHON_MARK = random.Random(_MARK).getstate()
_PYTHON_NEXT = random.Random(_MARK).getrandbits(64)
_TORCH_MARK = torch.Generator().manual_seed(_MARK).get_state()

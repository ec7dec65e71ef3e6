"""The three global generators that data sets draw from: ``random``, ``numpy.random`` and torch's on the CPU.

Their states are read twice for each batch, so that must cost next to nothing. The public calls take 7 us
(``random.getstate``) and 23 us (``numpy.random.get_state``); the words of a Mersenne twister, copied from where they
lie, 0.3 us. Where they do not lie as expected, which is tried out first, the public calls are made.
"""

import ctypes
import random
import sys
from typing import NamedTuple

import numpy as np
import torch

_NUM_WORDS = 624
_NUM_BYTES = 4 * (_NUM_WORDS + 1)  # the words and the place of the next one, each 32 bits

_PYTHON: random.Random = random.getstate.__self__  # type: ignore[attr-defined]  # whose methods random's functions are


class NumpyState(NamedTuple):
    """The words and the place in them, and what numpy keeps of every second normal number."""

    words: bytes
    has_gauss: int
    gauss: float


class State(NamedTuple):
    """Of all three generators. Equal states give equal numbers."""

    python: tuple[bytes, float | None]
    numpy: NumpyState | None
    torch: bytes


def read_state() -> State:
    """The state of the three generators. Draws nothing."""
    return State(_python_state(), _numpy.state(), torch.default_generator.get_state().numpy().tobytes())


def write_state(state: State) -> None:
    """Put the three generators back to a state that was read."""
    words, gauss_next = state.python
    index, *key = np.frombuffer(words, np.uint32).tolist()
    random.setstate((3, (*key, index), gauss_next))
    _numpy.put_back(state.numpy)
    torch.default_generator.set_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))


def seed_generators(words: bytes) -> None:
    """Seed the three generators from 20 bytes, without touching those of accelerators.

    Each has bytes of its own: numpy and torch would draw the same numbers from one seed.
    """
    random.seed(int.from_bytes(words[:8]))
    if _numpy.is_twister():
        np.random.seed(int.from_bytes(words[8:12]))
    torch.default_generator.manual_seed(int.from_bytes(words[12:20]))


def _python_state() -> tuple[bytes, float | None]:
    if _PYTHON_ADDRESS is not None:
        return ctypes.string_at(_PYTHON_ADDRESS, _NUM_BYTES), _PYTHON.gauss_next  # type: ignore[attr-defined]
    _, (*words, index), gauss_next = random.getstate()
    return np.array([index, *words], np.uint32).tobytes(), gauss_next


def _python_address(generator: random.Random) -> int | None:
    """Where the place and the words of a ``random.Random`` lie: in CPython, right behind the head of the object."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + _NUM_BYTES:
        return None
    address = id(generator) + object.__basicsize__
    _, (*words, index), _ = generator.getstate()
    as_expected = np.array([index, *words], np.uint32).tobytes()
    return address if ctypes.string_at(address, _NUM_BYTES) == as_expected else None


_PYTHON_ADDRESS = _python_address(_PYTHON)


class _Numpy:
    """The generator behind ``numpy.random``'s functions."""

    def __init__(self) -> None:
        self._generator: object = None
        self._address: int | None = None
        self._last: NumpyState | None = None

    def is_twister(self) -> bool:
        """False where someone has given ``numpy.random`` another generator, which then cannot be seeded anew."""
        return isinstance(_numpy_generator(), np.random.MT19937)

    def state(self) -> NumpyState | None:
        generator = _numpy_generator()
        if generator is not self._generator:
            self._generator, self._address, self._last = generator, _numpy_address(generator), None
        if self._address is None:
            return _full_numpy_state() if self.is_twister() else None
        last = self._last
        if last is None or last.has_gauss or ctypes.string_at(self._address, _NUM_BYTES) != last.words:
            # A normal number is kept only by drawing two, which changes the words: as long as these are the same and
            # nothing was kept, nothing is.
            last = self._last = _full_numpy_state()
        return last

    def put_back(self, state: NumpyState | None) -> None:
        if state is not None:
            words = np.frombuffer(state.words, np.uint32)
            np.random.set_state(("MT19937", words[:-1], int(words[-1]), state.has_gauss, state.gauss))
            self._last = state


def _numpy_generator() -> object:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, and not in numpy's type stubs


def _full_numpy_state() -> NumpyState:
    _, key, index, has_gauss, gauss = np.random.get_state()
    words = np.array([*key, index], np.uint32).tobytes()
    return NumpyState(words, int(has_gauss), float(gauss))


def _numpy_address(generator: object) -> int | None:
    if not isinstance(generator, np.random.MT19937):
        return None
    address = int(generator.ctypes.state_address)
    return address if ctypes.string_at(address, _NUM_BYTES) == _full_numpy_state().words else None


_numpy = _Numpy()

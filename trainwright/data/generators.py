"""The three global generators that data sets draw from: ``random``, ``numpy.random`` and torch's on the CPU.

Whether they have moved is asked twice for each batch, so that must cost next to nothing. The public calls take 7 us
(``random.getstate``), 23 us (``numpy.random.get_state``) and 1.2 us (torch's ``get_state``); all words of a Mersenne
twister, copied from where they lie, 0.05 us. Where they do not lie as expected, which is tried out first, the public
calls are made.
"""

import ctypes
import random
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

_NUM_WORDS = 624
_NUM_BYTES = 4 * (_NUM_WORDS + 1)  # the words and the place of the next one, each 32 bits

# Of torch's generator: 20 bytes (seed, words left, whether seeded, the place of the next word), the words, and what is
# kept of every second normal number, as a float and as a double, each with whether it is there.
_TORCH_HEAD = 20
_TORCH_BYTES = _TORCH_HEAD + 4 * _NUM_WORDS + 4 + 8 + 16
_TORCH_LARGEST = 80 + _TORCH_BYTES  # with what lies before: how much may be looked at

ReadBytes = Callable[[], bytes]

_PYTHON: random.Random = random.getstate.__self__  # type: ignore[attr-defined]  # whose methods random's functions are


class NumpyState(NamedTuple):
    """The words and the place in them, and what numpy keeps of every second normal number."""

    words: bytes
    has_gauss: int
    gauss: float


class TorchState:
    """What torch takes to be put back, and the bytes where it keeps that, which hold remains of former numbers too."""

    __slots__ = ("full", "words")

    def __init__(self) -> None:
        self.words, self.full = _torch_words(), torch.default_generator.get_state()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchState) and torch.equal(self.full, other.full)

    __hash__ = None  # type: ignore[assignment]  # as of anything that is equal by what a tensor holds


class State(NamedTuple):
    """Of all three generators. Equal states give equal numbers."""

    python: tuple[bytes, float | None]
    numpy: NumpyState | None
    torch: TorchState


_last: State | None = None  # the one read last: mostly it still holds


def read_state() -> State:
    """The state of the three generators. Draws nothing."""
    global _last
    if _last is None or _torch_words() != _last.torch.words or not is_unmoved(_last):
        _last = State(_python_state(), _numpy.state(), TorchState())
    return _last


def is_unmoved(state: State) -> bool:
    """Whether the three generators are as in ``state``: as ``read_state() == state``, for less."""
    words, gauss_next = state.python
    return (
        (_torch_words() == state.torch.words or TorchState() == state.torch)
        and _python_words() == words
        and _PYTHON.gauss_next == gauss_next  # type: ignore[attr-defined]
        and _numpy.is_at(state.numpy)
    )


def write_state(state: State) -> None:
    """Put the three generators back to a state that was read."""
    words, gauss_next = state.python
    index, *key = np.frombuffer(words, np.uint32).tolist()
    random.setstate((3, (*key, index), gauss_next))
    _numpy.put_back(state.numpy)
    torch.default_generator.set_state(state.torch.full)


def seed_generators(words: bytes) -> None:
    """Seed the three generators from 20 bytes, without touching those of accelerators.

    Each has bytes of its own: numpy and torch would draw the same numbers from one seed.
    """
    random.seed(int.from_bytes(words[:8]))
    if _numpy.is_twister():
        np.random.seed(int.from_bytes(words[8:12]))
    torch.default_generator.manual_seed(int.from_bytes(words[12:20]))


def _memory(address: int, size: int) -> ReadBytes:
    """What copies the bytes that lie there: a method of C, which costs no Python call."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B").tobytes


# Python's.


def _python_state() -> tuple[bytes, float | None]:
    return _python_words(), _PYTHON.gauss_next  # type: ignore[attr-defined]


def _public_python_words() -> bytes:
    _, (*words, index), _ = _PYTHON.getstate()
    return np.array([index, *words], np.uint32).tobytes()


def _python_memory() -> ReadBytes | None:
    """In CPython place and words of a ``random.Random`` lie right behind the head of the object."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + _NUM_BYTES:
        return None
    read = _memory(id(_PYTHON) + object.__basicsize__, _NUM_BYTES)
    return read if read() == _public_python_words() else None


_python_words: ReadBytes = _python_memory() or _public_python_words


# Numpy's, whose ``numpy.random`` is loaded when it is first used.


def _numpy_generator() -> object:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, and not in numpy's type stubs


class _Numpy:
    """The generator behind ``numpy.random``'s functions, which may be exchanged."""

    def __init__(self) -> None:
        self._generator: object = None
        self._words: ReadBytes | None = None  # None: public calls are made
        self._has_gauss, self._gauss = ctypes.c_int(), ctypes.c_double()

    def is_twister(self) -> bool:
        """False where someone has given ``numpy.random`` another generator, which then cannot be seeded anew."""
        return isinstance(_numpy_generator(), np.random.MT19937)

    def state(self) -> NumpyState | None:
        generator = _numpy_generator()
        if generator is not self._generator:
            self._generator = generator
            self._find(generator)
        if self._words is None:
            return _public_numpy_state() if self.is_twister() else None
        return NumpyState(self._words(), self._has_gauss.value, self._gauss.value)

    def is_at(self, state: NumpyState | None) -> bool:
        if self._words is None or state is None or _numpy_generator() is not self._generator:
            return self.state() == state
        return (
            self._words() == state.words
            and self._has_gauss.value == state.has_gauss
            and self._gauss.value == state.gauss
        )

    def put_back(self, state: NumpyState | None) -> None:
        if state is not None:
            words = np.frombuffer(state.words, np.uint32)
            np.random.set_state(("MT19937", words[:-1], int(words[-1]), state.has_gauss, state.gauss))

    def _find(self, generator: object) -> None:
        self._words = None
        offset = _gauss_offset()
        if offset is not None and isinstance(generator, np.random.MT19937):
            words = _memory(int(generator.ctypes.state_address), _NUM_BYTES)
            kept_at = id(np.random.get_state.__self__) + offset  # type: ignore[attr-defined]  # the one RandomState
            self._has_gauss = ctypes.c_int.from_address(kept_at)
            self._gauss = ctypes.c_double.from_address(kept_at + 8)
            if NumpyState(words(), self._has_gauss.value, self._gauss.value) == _public_numpy_state():
                self._words = words


def _public_numpy_state() -> NumpyState:
    _, key, index, has_gauss, gauss = np.random.get_state()
    return NumpyState(np.array([*key, index], np.uint32).tobytes(), int(has_gauss), float(gauss))


def _gauss_offset() -> int | None:
    """Where in a RandomState lie whether a normal number is kept (an int) and, 8 bytes on, that number (a double)."""
    if sys.implementation.name != "cpython":
        return None
    trial = np.random.RandomState(0)
    trial.standard_normal()
    kept = np.float64(trial.get_state(legacy=False)["gauss"]).tobytes()
    offset = ctypes.string_at(id(trial), np.random.RandomState.__basicsize__).find(kept) - 8
    if offset < object.__basicsize__:
        return None
    has_gauss = ctypes.c_int.from_address(id(trial) + offset)
    was_there = has_gauss.value
    trial.standard_normal()
    return offset if (was_there, has_gauss.value) == (1, 0) else None


_numpy = _Numpy()


# Torch's.


def _public_torch_words() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _torch_memory() -> ReadBytes | None:
    """Tried out on a generator of its own, whether all that changes with a draw is seen."""
    trial = torch.Generator()
    offset = _torch_offset(trial)
    if offset is None or offset != _torch_offset(torch.default_generator):
        return None
    read = _memory(_torch_address(trial) + offset, _TORCH_BYTES)
    seen = [read()]
    for _ in range(3):  # two numbers, one of them kept; the one that was kept; again two
        torch.randn((), generator=trial, device="cpu")
        seen.append(read())
    found = _memory(_torch_address(torch.default_generator) + offset, _TORCH_BYTES)
    return found if len({*seen}) == len(seen) else None


def _torch_address(generator: torch.Generator) -> int:
    """What torch says of where its generator lies; 0: nothing."""
    address = getattr(generator, "_cdata", 0)
    return address if isinstance(address, int) else 0


def _torch_offset(generator: torch.Generator) -> int | None:
    """How far behind that address the bytes begin."""
    address = _torch_address(generator)
    if not address or sys.byteorder != "little":
        return None
    full = generator.get_state().numpy()[24 : 24 + 8 * _NUM_WORDS]  # each word in 8 bytes
    words = full.view(np.uint64).astype(np.uint32).tobytes()
    offset = ctypes.string_at(address, _TORCH_LARGEST).find(words) - _TORCH_HEAD
    return offset if 0 < offset <= _TORCH_LARGEST - _TORCH_BYTES else None


_torch_words: ReadBytes = _torch_memory() or _public_torch_words

"""Checks whether a private part of torch still does what it is used for."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

logger = logging.getLogger("trainwright.torch")


def real_tensors() -> AbstractContextManager[Any]:
    """A context in which tensors have data, in the simulation of an estimate too."""
    return _disable_current_modes()


def fault_of(probe: Callable[[], object]) -> str | None:
    """The error of ``probe()`` in one line; None if it raises none."""
    try:
        with real_tensors(), torch.inference_mode(False), torch.enable_grad():
            probe()
    except Exception as error:  # of any type: the changes of a later release are unknown
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return None


def is_usable(what: str, probe: Callable[[], object]) -> bool:
    """Whether ``probe()`` raises no error. If it does, a log line says that ``what`` uses the public API."""
    fault = fault_of(probe)
    if fault is not None:
        logger.info("torch %s: using the public API for %s (%s).", torch.__version__, what, fault)
    return fault is None


def check_close(what: str, found: Iterable[float], expected: Iterable[float]) -> None:
    """Raise ArithmeticError if two sequences of numbers differ by more than rounding in float32."""
    pairs = [*zip(found, expected, strict=True)]
    if not all(abs(a - b) <= 1e-5 * max(1.0, abs(b)) for a, b in pairs):
        raise ArithmeticError(f"{what} gives {[a for a, _ in pairs]}, expected {[b for _, b in pairs]}")

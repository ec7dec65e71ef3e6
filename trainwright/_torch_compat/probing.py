"""Whether a private part of torch still does what it is used for."""

import logging
from collections.abc import Callable, Iterable

import torch

logger = logging.getLogger("trainwright.torch")


def fault_of(probe: Callable[[], object]) -> str | None:
    """Why ``probe()`` fails, in one line; None where it ends without an error."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            probe()
    except Exception as error:  # of any kind: what torch changes is not known beforehand
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return None


def is_usable(what: str, probe: Callable[[], object]) -> bool:
    """Whether ``probe()`` ends without an error. If not, a log line says that ``what`` goes the public way."""
    fault = fault_of(probe)
    if fault is not None:
        logger.info("torch %s: the public way is taken for %s (%s).", torch.__version__, what, fault)
    return fault is None


def check_close(what: str, found: Iterable[float], expected: Iterable[float]) -> None:
    """Raise ArithmeticError where two rows of numbers differ by more than rounding in float32 explains."""
    pairs = [*zip(found, expected, strict=True)]
    if not all(abs(a - b) <= 1e-5 * max(1.0, abs(b)) for a, b in pairs):
        raise ArithmeticError(f"{what} gives {[a for a, _ in pairs]}, expected {[b for _, b in pairs]}")

"""Whether one of torch's profilers records in this thread: a second one would end it, and crash when it is written."""

import functools
from typing import Any

import torch

from trainwright._torch_compat.probing import is_usable


def is_profiling() -> bool:
    """Whether a profiler records; False if this torch does not say."""
    return _is_usable() and _of_torch()


def _of_torch() -> bool:
    autograd: Any = torch.autograd
    found: bool = autograd._profiler_enabled()
    return found


@functools.cache
def _is_usable() -> bool:
    return is_usable("the state of the profiler", probe)


def probe() -> None:
    """Only the type: a profiler that is started to try it prints lines, which start with USDT, on every process."""
    found = _of_torch()
    assert isinstance(found, bool), f"the state of the profiler is {found!r}"

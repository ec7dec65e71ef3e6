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
    """Outside of a profiler and within one."""
    was_on = _of_torch()
    assert isinstance(was_on, bool), f"the state of the profiler is {was_on!r}"
    if was_on:
        return
    with torch.autograd.profiler.profile(use_kineto=False):
        assert _of_torch(), "a profiler that records is not found"
    assert not _of_torch(), "a profiler that has ended is found"

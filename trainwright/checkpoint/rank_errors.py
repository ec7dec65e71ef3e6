"""Errors across ranks: an error on one rank is raised on all, so that no rank waits for one that has stopped."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from trainwright.parallel import dist


@contextmanager
def raised_together() -> Iterator[None]:
    """A block that every rank enters. The ranks synchronize at its end; the first rank's error is raised on all."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if dist.get_world_size() > 1:
        errors = dist.all_gather_object(None if error is None else _portable(error))
        first = next((rank for rank, other in enumerate(errors) if other is not None), None)
        if first is not None and first != dist.get_rank():
            error = errors[first]
    if error is not None:
        raise error


def _portable(error: Exception) -> Exception:
    """The error if it can be pickled, otherwise a RuntimeError with the same message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickling may run arbitrary code of the error's class
        return RuntimeError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    return error

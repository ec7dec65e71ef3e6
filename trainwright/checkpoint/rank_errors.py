"""Agreement: what fails on one rank is raised on all of them, so that none waits for a rank that has gone."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from trainwright.parallel import dist


@contextmanager
def raised_together() -> Iterator[None]:
    """A block that every rank enters; the first rank's error is raised on all. The ranks meet at its end."""
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
    """The error itself where it survives the way to another process, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a foreign error's own code raises
        return RuntimeError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    return error

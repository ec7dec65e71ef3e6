"""Which checkpoint a resume goes on from: the newest that is good, and never a silent fresh start."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.folder import POINTER_NAME, read_pointer
from trainwright.checkpoint.order import order_of, resume_order
from trainwright.config.errors import MissingFileError

T = TypeVar("T")
logger = logging.getLogger("trainwright.checkpoint")


def resume_candidates(save_dir: Path) -> list[Path]:
    """What a resume tries, in this order: the newest complete one, then from the latest saved to the first.

    The newest is what ``last_checkpoint`` names, or one that a killed run has completed and not named there any more.
    A pointer that names nothing is listed too: where there was a checkpoint, a fresh start needs the user's word.
    """
    try:
        name = read_pointer(save_dir)
        Path(save_dir, name or "").is_dir()
    except (CheckpointError, OSError):  # the second: it is a folder, may not be read, or has a name too long for any
        return [save_dir / POINTER_NAME, *(entry.path for entry in order_of(save_dir))]
    return [entry.path for entry in order_of(save_dir)] if name is None else resume_order(save_dir, name)


def first_good(
    save_dir: Path, candidates: list[Path], read: Callable[[Path], T], *, warn: bool = True
) -> tuple[Path, T]:
    """The first candidate that ``read`` reads; one warning, if ``warn``, says what was wrong with those before it.

    Raises:
        CheckpointError: there is none. The message says why for each.
    """
    faults = []
    for path in candidates:
        try:
            _check_candidate(path)
            content = read(path)
        except (CheckpointError, MissingFileError, OSError) as error:
            faults.append(str(error))
            continue
        if faults and warn:
            logger.warning("%s", "\n".join([*faults, f"Resuming from {path} instead."]))
        return path, content
    advice = "To start anew, give another folder or move these away."
    raise CheckpointError("\n".join([f"{save_dir}: there are checkpoints, but none is good.", *faults, advice]))


def _check_candidate(path: Path) -> None:
    if path.name == POINTER_NAME:
        name = read_pointer(path.parent)  # raises what is wrong with the pointer, mostly
        raise CheckpointError(f"{path}: holds {(name or '')[:100]!r}, which no file can be called.")
    if not path.is_dir():
        raise CheckpointError(f"{path}: {POINTER_NAME} names it, but it is not there.")

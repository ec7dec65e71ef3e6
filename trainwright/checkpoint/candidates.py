"""Which checkpoint a resume loads: the newest valid one, and never a silent fresh start."""

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
    """The checkpoints that a resume tries, in order: the newest complete one, then the others, latest first.

    The newest is the one that ``last_checkpoint`` names, or a later one that a killed run completed but did not name
    there. A pointer to a missing checkpoint is listed too: the user has to request a fresh start explicitly.
    """
    try:
        name = read_pointer(save_dir)
        Path(save_dir, name or "").is_dir()
    except (CheckpointError, OSError):  # OSError: it is a folder, is not readable, or holds a name that is too long
        return [save_dir / POINTER_NAME, *(entry.path for entry in order_of(save_dir))]
    return [entry.path for entry in order_of(save_dir)] if name is None else resume_order(save_dir, name)


def first_good(
    save_dir: Path, candidates: list[Path], read: Callable[[Path], T], *, warn: bool = True
) -> tuple[Path, T]:
    """The first candidate that ``read`` accepts; with ``warn``, one warning lists the errors of the earlier ones.

    Raises:
        CheckpointError: ``read`` accepts none. The message gives the reason for each.
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
    advice = "To start from the beginning, use another folder or move these checkpoints away."
    raise CheckpointError("\n".join([f"{save_dir}: none of the checkpoints is valid.", *faults, advice]))


def _check_candidate(path: Path) -> None:
    if path.name == POINTER_NAME:
        name = read_pointer(path.parent)  # usually raises the error of the pointer
        raise CheckpointError(f"{path}: contains {(name or '')[:100]!r}, which is not a possible file name.")
    if not path.is_dir():
        raise CheckpointError(f"{path}: {POINTER_NAME} names it, but it does not exist.")

"""Which checkpoint a resume goes on from: the newest that is good, and never a silent fresh start."""

import logging
from pathlib import Path

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.folder import POINTER_NAME, read_pointer
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.order import order_of, resume_order
from trainwright.checkpoint.verify import verify
from trainwright.config.errors import MissingFileError

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


def newest_good(save_dir: Path) -> tuple[Path, Manifest]:
    """The first candidate that passes verification; one warning says what was wrong with those before it.

    Raises:
        CheckpointError: none does. The message says why for each.
    """
    faults = []
    for path in resume_candidates(save_dir):
        try:
            manifest = _verify_candidate(path)
        except (CheckpointError, MissingFileError, OSError) as error:
            faults.append(str(error))
            continue
        if faults:
            logger.warning("%s", "\n".join([*faults, f"Resuming from {path} instead."]))
        return path, manifest
    advice = "To start anew, give another folder or move these away."
    raise CheckpointError("\n".join([f"{save_dir}: there are checkpoints, but none is good.", *faults, advice]))


def _verify_candidate(path: Path) -> Manifest:
    if path.name == POINTER_NAME:
        name = read_pointer(path.parent)  # raises what is wrong with the pointer, mostly
        raise CheckpointError(f"{path}: holds {(name or '')[:100]!r}, which no file can be called.")
    if not path.is_dir():
        raise CheckpointError(f"{path}: {POINTER_NAME} names it, but it is not there.")
    return verify(path)

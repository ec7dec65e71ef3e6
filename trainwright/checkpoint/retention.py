"""Retention: how many step checkpoints stay. Never touched: the one to resume from, and what a link points at."""

import os
import re
from pathlib import Path

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import PathLike, remove_folder
from trainwright.checkpoint.folder import checkpoint_folders, link_targets, read_pointer
from trainwright.checkpoint.manifest import read_manifest


def keep_newest(save_dir: PathLike, prefix: str, max_to_keep: int) -> list[str]:
    """Delete the step checkpoints ``<prefix>_<digits>`` beyond the ``max_to_keep`` last saved; returns their names.

    With an empty prefix they are called ``<digits>``.

    Call it after a save has returned: what is counted is on disk. It reads the folder each time, so it goes on where
    an earlier run stopped. A protected checkpoint stays in addition, and folders without a readable manifest stay too.

    Raises:
        CheckpointError: ``max_to_keep`` is no count, or ``last_checkpoint`` cannot be read.
    """
    if type(max_to_keep) is not int or max_to_keep < 1:
        raise CheckpointError(f"max_to_keep: got {max_to_keep!r}; it must be an int >= 1.")
    folder = Path(os.path.abspath(save_dir))
    steps = [path for path in checkpoint_folders(folder) if _is_whole_step(path, prefix)]
    # Links may lie beside the folder too, as epoch_3 beside checkpoints/ does.
    protected = link_targets(folder) | link_targets(folder.parent)
    if last := read_pointer(folder):
        protected.add((folder / last).resolve())
    removed = []
    for path in steps[max_to_keep:]:
        if path.resolve() not in protected:
            remove_folder(path)
            removed.append(path.name)
    return removed


def _is_whole_step(path: Path, prefix: str) -> bool:
    if not re.fullmatch(rf"{re.escape(prefix)}_\d+" if prefix else r"\d+", path.name):
        return False
    try:
        read_manifest(path)
    except (CheckpointError, OSError):
        return False
    return True

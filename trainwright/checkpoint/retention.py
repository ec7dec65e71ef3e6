"""Retention: delete earlier step checkpoints, except the one to resume from and targets of links."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import PathLike, real_path, remove_folder
from trainwright.checkpoint.folder import link_targets, order_of, read_pointer


def keep_newest(save_dir: PathLike, prefix: str, max_to_keep: int, *, links: Iterable[Path] = ()) -> list[str]:
    """Delete the step checkpoints ``<prefix>_<digits>`` beyond the ``max_to_keep`` newest; returns their names.

    With an empty prefix the names are ``<digits>``. The order follows the sequence of saves and the iterations, not
    the clock. Superseded checkpoints are deleted first. ``links`` to a deleted checkpoint are deleted before it.

    Call it after a save has committed: only checkpoints on disk count. It reads the folder at each call, so it also
    counts checkpoints of earlier runs. Protected checkpoints are kept in addition to ``max_to_keep``; folders without
    a readable manifest are kept too.

    Raises:
        CheckpointError: ``max_to_keep`` is not a positive int, or ``last_checkpoint`` cannot be read.
    """
    if type(max_to_keep) is not int or max_to_keep < 1:
        raise CheckpointError(f"max_to_keep: got {max_to_keep!r}; it must be an int >= 1.")
    folder = Path(os.path.abspath(save_dir))
    order = order_of(folder)
    newest_first = sorted([*order.resumable, *order.others], key=lambda entry: entry.rank, reverse=True)
    readable = [entry.path for entry in (*newest_first, *order.superseded)]
    steps = [path for path in readable if re.fullmatch(rf"{re.escape(prefix)}_\d+" if prefix else r"\d+", path.name)]
    excess = {real_path(path) for path in steps[max_to_keep:]}
    for link in links:
        if link.is_symlink() and real_path(link) in excess:
            link.unlink()
    # Links may also be in the parent folder: epoch_3 is next to checkpoints/.
    protected = link_targets(folder) | link_targets(folder.parent)
    if last := read_pointer(folder):
        protected.add(real_path(folder / last))
    removed = []
    for path in steps[max_to_keep:]:
        if real_path(path) not in protected:
            remove_folder(path)
            removed.append(path.name)
    return removed

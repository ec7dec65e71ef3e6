"""Retention: how many step checkpoints stay. Never touched: the one to resume from, and what a link points at."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import PathLike, real_path, remove_folder
from trainwright.checkpoint.folder import link_targets, read_pointer
from trainwright.checkpoint.order import order_of


def keep_newest(save_dir: PathLike, prefix: str, max_to_keep: int, *, links: Iterable[Path] = ()) -> list[str]:
    """Delete the step checkpoints ``<prefix>_<digits>`` beyond the ``max_to_keep`` newest; returns their names.

    With an empty prefix they are called ``<digits>``. Which are the newest is a matter of the order in which they were
    saved and of their iterations; what the clock was plays no part. Those that a resume from an older one has
    superseded go first. ``links`` that point at one to be deleted are deleted before it.

    Call it after a save has returned: what is counted is on disk. It reads the folder each time, so it goes on where
    an earlier run stopped. A protected checkpoint stays in addition, and folders without a readable manifest stay too.

    Raises:
        CheckpointError: ``max_to_keep`` is no count, or ``last_checkpoint`` cannot be read.
    """
    if type(max_to_keep) is not int or max_to_keep < 1:
        raise CheckpointError(f"max_to_keep: got {max_to_keep!r}; it must be an int >= 1.")
    folder = Path(os.path.abspath(save_dir))
    order = order_of(folder)
    newest_first = sorted([*order.resumable, *order.others], key=lambda entry: entry.rank, reverse=True)
    readable = [entry.path for entry in (*newest_first, *order.superseded)]
    steps = [path for path in readable if re.fullmatch(rf"{re.escape(prefix)}_\d+" if prefix else r"\d+", path.name)]
    old = {real_path(path) for path in steps[max_to_keep:]}
    for link in links:
        if link.is_symlink() and real_path(link) in old:
            link.unlink()
    # Links may lie beside the folder too, as epoch_3 beside checkpoints/ does.
    protected = link_targets(folder) | link_targets(folder.parent)
    if last := read_pointer(folder):
        protected.add(real_path(folder / last))
    removed = []
    for path in steps[max_to_keep:]:
        if real_path(path) not in protected:
            remove_folder(path)
            removed.append(path.name)
    return removed

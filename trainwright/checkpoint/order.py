"""The order of the checkpoints in a folder: by save sequence and iteration, never by the clock.

A run that resumes from an older checkpoint saves smaller iterations than those already in the folder. From its first
save on, the larger ones are superseded: a resume loads one of them only if no other checkpoint is readable.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import atomic_write, real_path
from trainwright.checkpoint.folder import checkpoint_folders, link_targets, write_pointer
from trainwright.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint folder; ``manifest`` is None where it cannot be read."""

    path: Path
    manifest: Manifest | None

    @property
    def iteration(self) -> int:
        """-1 for a checkpoint without one."""
        return -1 if self.manifest is None or self.manifest.iteration is None else self.manifest.iteration

    @property
    def rank(self) -> tuple[int, int]:
        """Increases with each save. Checkpoints without a sequence (older versions) are ordered by iteration."""
        return (-1 if self.manifest is None else self.manifest.sequence, self.iteration)


@dataclass(frozen=True, slots=True)
class Order:
    """The checkpoints of a folder, each list from the last saved to the first.

    Attributes:
        resumable: saved with ``tag_last=True``.
        others: saved with ``tag_last=False``, such as ``model_best``, and hidden ones without a link.
        superseded: resumable or not, with a later iteration than a resumable one that was saved after it.
        unreadable: without a readable manifest.
    """

    resumable: list[Saved]
    others: list[Saved]
    superseded: list[Saved]
    unreadable: list[Saved]

    def __iter__(self) -> Iterator[Saved]:
        return chain(self.resumable, self.others, self.superseded, self.unreadable)


def order_of(save_dir: Path) -> Order:
    """Read the manifests of all checkpoints in ``save_dir``."""
    saved = [Saved(path, _manifest(path)) for path in checkpoint_folders(save_dir)]
    saved.sort(key=lambda entry: (entry.rank, entry.path.name), reverse=True)
    linked = link_targets(save_dir)
    order = Order([], [], [], [])
    smallest = math.inf  # iteration of the resumable ones that were saved later
    for entry in saved:
        if entry.manifest is None:
            order.unreadable.append(entry)
        elif entry.iteration > smallest:
            order.superseded.append(entry)
        elif _is_resumable(entry.path, entry.manifest, linked):
            order.resumable.append(entry)
            smallest = smallest if entry.manifest.iteration is None else entry.iteration
        else:
            order.others.append(entry)
    return order


def resume_order(save_dir: Path, last: str) -> list[Path]:
    """The checkpoints that a resume tries if ``last_checkpoint`` names ``last``, in order.

    ``last`` is first, unless a run was killed after it had saved a checkpoint and before it updated
    ``last_checkpoint``: then the newer checkpoint exists and names ``last`` as its previous one.
    """
    order = order_of(save_dir)
    path = save_dir / last
    tagged = next((entry for entry in order if real_path(entry.path) == real_path(path)), Saved(path, None))
    # If the newest names another one, the user has put an older name into the file, which then comes first.
    newer = list(takewhile(lambda entry: _follows(entry, last) and entry.rank > tagged.rank, order.resumable))
    rest = [entry for entry in order if entry not in newer and entry is not tagged]
    # If the user has made an older one the last, later ones are tried only after all others.
    if os.path.exists(path):
        rest.sort(key=lambda entry: _is_later(entry, tagged))
    return [*(entry.path for entry in newer), path, *(entry.path for entry in rest)]


def make_last(save_dir: Path, name: str) -> None:
    """Make ``name`` the checkpoint to resume from, whatever was saved after it."""
    for entry in order_of(save_dir).resumable:
        if _follows(entry, name) and entry.manifest is not None and real_path(entry.path) != real_path(save_dir / name):
            # Otherwise it looks like the newer checkpoint of a killed run.
            manifest = replace(entry.manifest, previous=None)
            atomic_write(entry.path / MANIFEST_NAME, manifest.to_bytes())
    write_pointer(save_dir, name)


def next_sequence(save_dir: Path) -> int:
    """The sequence of a checkpoint that is saved now."""
    return 1 + max((entry.rank[0] for entry in order_of(save_dir)), default=0)


def _is_resumable(path: Path, manifest: Manifest, linked: set[Path]) -> bool:
    # A hidden folder has a link, unless the run was killed before it created the link.
    return manifest.tag_last and (not path.name.startswith(".") or real_path(path) in linked)


def _follows(entry: Saved, last: str) -> bool:
    return entry.manifest is not None and entry.manifest.previous == last


def _is_later(entry: Saved, tagged: Saved) -> bool:
    prefix, number = _split(tagged.path.name)
    other_prefix, other = _split(entry.path.name)
    if prefix == other_prefix and number >= 0:  # compare names first: the manifest of ``tagged`` may be damaged
        return other > number
    return tagged.manifest is not None and entry.rank > tagged.rank


def _split(name: str) -> tuple[str, int]:
    """A checkpoint's name without its number, and the number."""
    digits = re.search(r"[0-9]*$", name)
    assert digits is not None, "an empty match is one"
    return name[: digits.start()], int(digits[0] or -1)


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except (CheckpointError, OSError):
        return None

"""A folder of checkpoints: their names, the order in which they were saved, and which one a resume loads.

A name is a real folder, or for one that is saved again (``model_best``, ``model_final``) a relative link to a hidden
folder ``.<name>-<iteration>``. ``last_checkpoint`` holds the name to resume from.

The order follows save sequence and iteration, never the clock. A run that resumes from an older checkpoint saves
smaller iterations than those already in the folder. From its first save on, the larger ones are superseded: a resume
loads one of them only if no other checkpoint is readable.
"""

import logging
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import TypeVar

from trainwright.base.errors import MissingFileError
from trainwright.base.files import (
    PathLike,
    atomic_write,
    has_links,
    is_about_access,
    is_temporary,
    read_regular,
    real_path,
    remove_folder,
)
from trainwright.checkpoint.errors import CheckpointError, NewerFormatError
from trainwright.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest

logger = logging.getLogger("trainwright.checkpoint")
WEIGHTS_NAME = "model.safetensors"
POINTER_NAME = "last_checkpoint"
_PAUSE_S = 1.0  # before a second try
T = TypeVar("T")


def numbered_name(iteration: int, prefix: str = "model") -> str:
    """The name of the checkpoint of an iteration, counted from 0."""
    return f"{prefix}_{iteration:07d}"


def check_name(name: str) -> None:
    """Check a checkpoint's name: it must stay inside the folder and differ from the folder's own entries."""
    is_plain = bool(name) and name[0] != "." and not set(name) & set("/\\\0") and name != POINTER_NAME
    if not is_plain or name.encode(errors="replace").decode() != name:  # a lone surrogate cannot be encoded
        raise CheckpointError(
            f"checkpoint name: got {name!r}; it must be one plain name such as 'model_0000009', without path "
            f"separators, not starting with a dot, and not {POINTER_NAME!r}."
        )


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, complete or not."""
    # Not Path.exists, which raises for folders without permission, such as lost+found.
    return os.path.exists(path / MANIFEST_NAME) or os.path.exists(path / WEIGHTS_NAME)


def checkpoint_folders(save_dir: Path) -> list[Path]:
    """The real checkpoint folders in ``save_dir``, hidden ones included."""
    if not save_dir.is_dir():
        return []
    entries = [path for path in sorted(save_dir.iterdir()) if not is_temporary(path.name) and not path.is_symlink()]
    return [path for path in entries if is_checkpoint(path)]


def checkpoint_names(save_dir: Path) -> list[str]:
    """The names in ``save_dir`` under which a checkpoint can be loaded, links included."""
    if not save_dir.is_dir():
        return []
    return sorted(path.name for path in save_dir.iterdir() if path.name[0] != "." and is_checkpoint(path))


def links_in(folder: Path) -> list[Path]:
    """The symbolic links in ``folder``."""
    return [path for path in folder.iterdir() if path.is_symlink()] if folder.is_dir() else []


def link_targets(folder: Path) -> set[Path]:
    """The resolved targets of the links in ``folder``."""
    return {real_path(link) for link in links_in(folder)}


def read_pointer(save_dir: Path) -> str | None:
    """The name in ``last_checkpoint``; None if there is no such file."""
    try:
        name = read_regular(save_dir / POINTER_NAME).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    try:
        check_name(name)
    except CheckpointError:
        raise CheckpointError(
            f"{save_dir / POINTER_NAME}: contains {name[:100]!r}, which is not a checkpoint name."
        ) from None
    return name


def write_pointer(save_dir: Path, name: str) -> None:
    """Make ``name`` the checkpoint that a resume starts from."""
    atomic_write(save_dir / POINTER_NAME, name.encode())


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint folder; ``manifest`` is None where it cannot be read, now (``error``) or at all."""

    path: Path
    manifest: Manifest | None
    error: OSError | None = None

    @property
    def iteration(self) -> int:
        """-1 for a checkpoint without one."""
        return -1 if self.manifest is None or self.manifest.iteration is None else self.manifest.iteration

    @property
    def sequence(self) -> int:
        """Increases with each save."""
        return -1 if self.manifest is None else self.manifest.sequence


@dataclass(frozen=True, slots=True)
class Order:
    """The checkpoints of a folder, each list from the last saved to the first."""

    resumable: list[Saved]  # saved with ``tag_last=True``
    others: list[Saved]  # saved with ``tag_last=False``, such as ``model_best``, and hidden ones without a link
    superseded: list[Saved]  # resumable or not, with a later iteration than a resumable one that was saved after it
    unreadable: list[Saved]  # without a readable manifest

    def __iter__(self) -> Iterator[Saved]:
        return chain(self.resumable, self.others, self.superseded, self.unreadable)


def order_of(save_dir: Path) -> Order:
    """Read the manifests of all checkpoints in ``save_dir``."""
    saved = [_saved(path) for path in checkpoint_folders(save_dir)]
    saved.sort(key=lambda entry: (entry.sequence, entry.path.name), reverse=True)
    linked = link_targets(save_dir)
    order = Order([], [], [], [])
    smallest = math.inf  # iteration of the resumable ones that were saved later
    for entry in saved:
        if entry.manifest is None:
            order.unreadable.append(entry)
        elif entry.iteration > smallest:
            order.superseded.append(entry)
        # A hidden folder has a link, unless the run was killed before it created the link.
        elif entry.manifest.tag_last and (entry.path.name[0] != "." or real_path(entry.path) in linked):
            order.resumable.append(entry)
            smallest = smallest if entry.manifest.iteration is None else entry.iteration
        else:
            order.others.append(entry)
    return order


def make_last(save_dir: Path, name: str) -> None:
    """Make ``name`` the checkpoint to resume from, whatever was saved after it."""
    for entry in order_of(save_dir).resumable:
        if _follows(entry, name) and entry.manifest is not None and real_path(entry.path) != real_path(save_dir / name):
            # Otherwise it looks like the newer checkpoint of a killed run.
            manifest = replace(entry.manifest, previous=None)
            atomic_write(entry.path / MANIFEST_NAME, manifest.to_bytes())
    write_pointer(save_dir, name)


def newest_sequence(save_dir: Path, known: dict[tuple[int, ...], int] | None = None) -> int:
    """The sequence of the checkpoint that was saved last; 0 if there is none.

    ``known``: the sequences that earlier calls have read, by the file of the manifest, which is not changed in place.

    Raises:
        OSError: a manifest cannot be read now: that checkpoint may be the last.
    """
    found, known = [0], {} if known is None else known
    for folder in checkpoint_folders(save_dir):
        file = manifest_identity(folder)
        if file is None or file not in known:
            entry = _saved(folder)
            if entry.error is not None:
                raise entry.error
            if file is None or entry.manifest is None:
                continue
            known[file] = entry.sequence
        found.append(known[file])
    return max(found)


def manifest_identity(folder: Path) -> tuple[int, ...] | None:
    """The file of the manifest and its version; None if it cannot be read."""
    try:
        status = (folder / MANIFEST_NAME).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def resume_candidates(save_dir: Path) -> list[Path]:
    """The checkpoints that a resume tries, in order: the newest complete one, then the others, latest first.

    Before them come those whose manifest cannot be read now: one of them may be the newest.

    The newest is the one that ``last_checkpoint`` names, unless a run was killed after it had saved a checkpoint and
    before it updated ``last_checkpoint``: then the newer checkpoint exists and names that one as its previous one. A
    pointer to a missing checkpoint is listed too: the user has to request a fresh start explicitly.
    """
    try:
        name = read_pointer(save_dir)
        Path(save_dir, name or "").is_dir()
    except (CheckpointError, OSError):  # OSError: it is a folder, is not readable, or holds a name that is too long
        return [save_dir / POINTER_NAME, *(entry.path for entry in order_of(save_dir))]
    order = order_of(save_dir)
    unknown = [entry for entry in order.unreadable if entry.error is not None]
    order.unreadable[:] = [entry for entry in order.unreadable if entry.error is None]
    if name is None:
        return [entry.path for entry in (*unknown, *order)]
    path = save_dir / name
    tagged = next((entry for entry in order if real_path(entry.path) == real_path(path)), Saved(path, None))
    # If the newest names another one, the user has put an older name into the file, which then comes first.
    newer = list(takewhile(lambda entry: _follows(entry, name) and entry.sequence > tagged.sequence, order.resumable))
    rest = [entry for entry in order if entry not in newer and entry is not tagged]
    # If the user has made an older one the last, later ones are tried only after all others.
    if os.path.exists(path):
        rest.sort(key=lambda entry: _is_later(entry, tagged))
    return [*(entry.path for entry in (*unknown, *newer)), path, *(entry.path for entry in rest)]


def first_good(
    save_dir: Path, candidates: list[Path], read: Callable[[Path], T], *, warn: bool = True
) -> tuple[Path, T]:
    """The first candidate that ``read`` accepts; with ``warn``, one warning lists the errors of the earlier ones.

    Raises:
        CheckpointError: all are damaged.
        OSError: one cannot be read now. An older one in its place would lose work, and then delete it.
    """
    faults = []
    for path in candidates:
        try:
            content = _read(path, read, warn=warn)
        except NewerFormatError:  # no fault of the checkpoint: an older one would lose work
            raise
        except (CheckpointError, MissingFileError, OSError) as error:
            if isinstance(error, OSError) and is_about_access(error):
                error.add_note(
                    f"{path} is not known to be damaged, so the run does not continue from an older checkpoint. Try"
                    " again when it can be read; to continue from another one, move this one away."
                )
                raise
            faults.append(str(error))
            continue
        if faults and warn:
            logger.warning("%s", "\n".join([*faults, f"Resuming from {path} instead."]))
        return path, content
    advice = "To start from the beginning, use another folder or move these checkpoints away."
    raise CheckpointError("\n".join([f"{save_dir}: none of the checkpoints is valid.", *faults, advice]))


def _read(path: Path, read: Callable[[Path], T], *, warn: bool) -> T:
    try:
        _check_candidate(path)
        return read(path)
    except OSError as error:
        if not is_about_access(error):
            raise
        if warn:
            logger.warning("%s. Trying once more.", error)
    time.sleep(_PAUSE_S)
    _check_candidate(path)
    return read(path)


def _check_candidate(path: Path) -> None:
    if path.name == POINTER_NAME:
        name = read_pointer(path.parent)  # usually raises the error of the pointer
        raise CheckpointError(f"{path}: contains {(name or '')[:100]!r}, which is not a possible file name.")
    if not path.is_dir():
        raise CheckpointError(f"{path}: {POINTER_NAME} names it, but it does not exist.")


def _follows(entry: Saved, last: str) -> bool:
    return entry.manifest is not None and entry.manifest.previous == last


def _is_later(entry: Saved, tagged: Saved) -> bool:
    prefix, number = _split(tagged.path.name)
    other_prefix, other = _split(entry.path.name)
    if prefix == other_prefix and number >= 0:  # compare names first: the manifest of ``tagged`` may be damaged
        return other > number
    return tagged.manifest is not None and entry.sequence > tagged.sequence


def _split(name: str) -> tuple[str, int]:
    """A checkpoint's name without its number, and the number."""
    prefix = re.sub(r"[0-9]+$", "", name)
    return prefix, int(name[len(prefix) :] or -1)


def _saved(path: Path) -> Saved:
    try:
        return Saved(path, read_manifest(path))
    except CheckpointError:
        return Saved(path, None)
    except OSError as error:
        return Saved(path, None, error if is_about_access(error) else None)


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
    steps = _newest_first(folder, prefix)
    excess = {read_regular(path / MANIFEST_NAME) for path in steps[max_to_keep:]}
    for link in links if excess else ():
        if is_checkpoint(link) and read_regular(link / MANIFEST_NAME) in excess:
            if link.is_symlink():
                link.unlink()
            elif not has_links(link.parent):
                remove_folder(link)
    return _delete_unprotected(folder, steps[max_to_keep:])


def keep_named(save_dir: PathLike, prefix: str, names: Collection[str]) -> list[str]:
    """Delete the checkpoints ``<prefix>_<digits>`` except for those in ``names``; returns the deleted names.

    Protected checkpoints and folders without a readable manifest are kept, as by :func:`keep_newest`.
    """
    folder = Path(os.path.abspath(save_dir))
    return _delete_unprotected(folder, [path for path in _newest_first(folder, prefix) if path.name not in names])


def _newest_first(folder: Path, prefix: str) -> list[Path]:
    """The readable step checkpoints of a prefix, superseded ones last."""
    order = order_of(folder)
    newest_first = sorted([*order.resumable, *order.others], key=lambda entry: entry.sequence, reverse=True)
    readable = [entry.path for entry in (*newest_first, *order.superseded)]
    return [path for path in readable if re.fullmatch(rf"{re.escape(prefix)}_\d+" if prefix else r"\d+", path.name)]


def _delete_unprotected(folder: Path, paths: Iterable[Path]) -> list[str]:
    # Links may also be in the parent folder: epoch_3 is next to checkpoints/.
    protected = link_targets(folder) | link_targets(folder.parent)
    if last := read_pointer(folder):
        protected.add(real_path(folder / last))
    removed = []
    for path in paths:
        if real_path(path) not in protected:
            remove_folder(path)
            removed.append(path.name)
    return removed

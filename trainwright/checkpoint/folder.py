"""A folder of checkpoints on disk: which there are, and how a new one gets its name.

A name is a real folder. One that is meant to be saved again (``model_best``, ``model_final``) is a relative link onto
a hidden folder ``.<name>-<iteration>`` that never changes; saving again writes a new one and swaps the link.
"""

import itertools
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import (
    Writer,
    atomic_write,
    commit_folder,
    is_temporary,
    locked,
    read_regular,
    real_path,
    remove_folder,
    replace_link,
    swap_folders,
    temporary_sibling,
)
from trainwright.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, measure

logger = logging.getLogger("trainwright.checkpoint")

WEIGHTS_NAME = "model.safetensors"
POINTER_NAME = "last_checkpoint"
_COPY_BYTES = 8 * 2**20
_HIDDEN = re.compile(r"\..+-(\d{7,}|none)(-\d+)?", re.DOTALL)  # .<name>-<iteration>, numbered if that is taken


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that this process has written: its folder and its manifest."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """A file of a committed checkpoint, as a writer that copies it into another checkpoint."""

    source: Committed
    name: str

    def __call__(self, file: BinaryIO) -> None:
        with open(self.source.folder / self.name, "rb") as source:
            while block := source.read(_COPY_BYTES):
                file.write(block)


def check_name(name: str) -> None:
    """Check a checkpoint's name: it must stay inside the folder and differ from the folder's own entries.

    Raises:
        CheckpointError: the name is not allowed; the message says which names are.
    """
    if (
        not name
        or name.startswith(".")
        or not _is_encodable(name)
        or any(mark in name for mark in "/\\\0")
        or name == POINTER_NAME
    ):
        raise CheckpointError(
            f"checkpoint name: got {name!r}; it must be one plain name such as 'model_0000009', without path "
            f"separators, not starting with a dot, and not {POINTER_NAME!r}."
        )


def _is_encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a character
        return False
    return True


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


def link_targets(folder: Path) -> set[Path]:
    """The resolved targets of the links in ``folder``."""
    return {real_path(link) for link in _links(folder)}


def read_pointer(save_dir: Path) -> str | None:
    """The name in ``last_checkpoint``; None if there is no such file.

    Raises:
        CheckpointError: the file does not hold a checkpoint name.
    """
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


def write_checkpoint(
    path: Path, writers: Mapping[str, Writer], manifest: Manifest, *, before: Committed | None
) -> Committed:
    """Write a checkpoint to ``path`` atomically: readers never see a partial checkpoint.

    Args:
        manifest: the values of the manifest except for its files.
        before: a checkpoint of the same iteration; files equal to its files become hard links to them.

    Raises:
        CheckpointError: ``path`` exists and is not a checkpoint.
        OSError: writing failed; existing checkpoints are unchanged.
    """
    if path.exists() and not (path.is_dir() and (is_checkpoint(path) or path.is_symlink() or not any(path.iterdir()))):
        raise CheckpointError(f"{path}: exists and is not a checkpoint; save under another name.")
    entries = {name: _entry_of(writer) for name, writer in writers.items()} if before else {}
    if before and entries == before.manifest.files and is_checkpoint(before.folder):
        if real_path(path) == before.folder:
            return before
        if _is_link_name(path) and before.manifest.tag_last >= manifest.tag_last:
            replace_link(path, before.folder)
            return before
    is_real_folder = path.is_dir() and not path.is_symlink()
    as_link = _is_link_name(path) and not is_real_folder
    folder = _hidden_sibling(path, manifest.iteration) if as_link or is_real_folder else path
    try:
        manifest = _commit(folder, writers, manifest, entries, before)
        if as_link:
            replace_link(path, folder)
        elif is_real_folder:
            links = [link for link in _links(path.parent) if real_path(link) == real_path(path)]
            swap_folders(folder, path)
            for link in links:  # model_best keeps its content when its step is saved again
                replace_link(link, folder)
    except BaseException:
        if folder != path:
            remove_unlinked(path.parent)
        raise
    return Committed(real_path(folder if as_link else path), manifest)


def remove_unlinked(save_dir: Path) -> None:
    """Delete the hidden checkpoints that no link points to. A failure logs a warning; the next call retries."""
    if not save_dir.is_dir():
        return
    linked = link_targets(save_dir)
    for path in list(save_dir.iterdir()):
        # Another process may be writing a temporary entry.
        is_hidden = _HIDDEN.fullmatch(path.name) and not is_temporary(path.name)
        if is_hidden and is_checkpoint(path) and real_path(path) not in linked:
            try:
                remove_folder(path)
            except OSError as error:
                logger.warning("%s: could not be deleted (%s).", path, error)


def _commit(
    folder: Path,
    writers: Mapping[str, Writer],
    manifest: Manifest,
    entries: Mapping[str, FileEntry],
    before: Committed | None,
) -> Manifest:
    temporary = temporary_sibling(folder)
    written: dict[str, FileEntry] = {}
    try:
        with locked(folder.parent):
            os.mkdir(temporary)
            for name, writer in writers.items():
                if "/" in name:
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                is_same = before is not None and entries[name] == before.manifest.files.get(name)
                if before is not None and is_same and _link(before.folder, temporary, name):
                    written[name] = entries[name]
                    continue
                with open(temporary / name, "xb") as file:
                    written[name] = measure(writer, file)
            manifest = replace(manifest, files=written)
            with open(temporary / MANIFEST_NAME, "xb") as file:
                file.write(manifest.to_bytes())
            commit_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return manifest


def _entry_of(writer: Writer) -> FileEntry:
    if isinstance(writer, CommittedFile):
        return writer.source.manifest.files[writer.name]
    return measure(writer)


def _link(source: Path, target: Path, name: str) -> bool:
    """Hard-link a file of a committed checkpoint into a new one. Returns False if the filesystem cannot."""
    try:
        os.link(source / name, target / name)
    except OSError:
        return False
    return True


def _is_link_name(path: Path) -> bool:
    return path.is_symlink() or path.name.endswith(("best", "final"))


def _hidden_sibling(path: Path, iteration: int | None) -> Path:
    base = f".{path.name}-{'none' if iteration is None else f'{iteration:07d}'}"
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(candidate for name in names if not (candidate := path.with_name(name)).exists())


def _links(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_symlink()] if folder.is_dir() else []

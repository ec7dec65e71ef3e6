"""Writing a sharded checkpoint: each process its own files, in one temporary folder that rank 0 commits.

It runs in the writer thread of every process. An error of any of them is raised in all, and nothing is committed.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import (
    Writer,
    atomic_write,
    locked,
    named,
    real_path,
    sync_folder,
    temporary_sibling,
)
from trainwright.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, measure, read_manifest
from trainwright.checkpoint.saving import (
    Committed,
    CommittedFile,
    check_replaceable,
    committed_alike,
    link_file,
    placed,
)
from trainwright.checkpoint.share import Share, merged
from trainwright.checkpoint.state_files import bytes_writer
from trainwright.checkpoint.verify import file_faults
from trainwright.config.errors import MissingFileError
from trainwright.parallel import dist

T = TypeVar("T")


class Ranks:
    """Exchanges between the writer threads of all processes, on a process group of their own.

    Every process must create it, and call its methods in the same order.
    """

    def __init__(self) -> None:
        self._group = dist.new_cpu_group()

    def first(self, work: Callable[[], T]) -> T:
        """What ``work()`` returns on rank 0, on every rank. Its error is raised on every rank."""
        results: list[Any] = self.each(work if dist.is_main_process() else lambda: None)
        result: T = results[0]
        return result

    def each(self, work: Callable[[], T]) -> list[T]:
        """What ``work()`` returns on every rank, by rank. An error of any rank is raised on every rank."""
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        seen = dist.all_gather_object((result, None if error is None else dist.portable(error)), self._group)
        for rank, (_, other) in enumerate(seen):
            if other is not None:
                raise other if error is None or rank != dist.get_rank() else error
        return [value for value, _ in seen]


def write_share(
    ranks: Ranks,
    share: Share,
    path: Path,
    new_manifest: Callable[[], Manifest],
    before: Committed | None,
    finish: Callable[[], object],
) -> Committed:
    """Write a checkpoint to ``path`` together with all other processes.

    Args:
        new_manifest: called on rank 0; the manifest without its files.
        before: a checkpoint of the same iteration; files equal to its files become hard links to them.
        finish: called on rank 0 when the checkpoint is committed.

    Raises:
        OSError: a process could not write its files, or does not see the folder of rank 0.
    """
    with ExitStack() as stack:

        def begin() -> tuple[str, Manifest]:
            path.parent.mkdir(parents=True, exist_ok=True)
            check_replaceable(path)
            manifest = new_manifest()
            stack.enter_context(locked(path.parent))
            temporary = temporary_sibling(path)
            os.mkdir(temporary)
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            return temporary.name, manifest

        name, manifest = ranks.first(begin)
        temporary = path.with_name(name)
        parts = ranks.each(lambda: (_write_files(temporary, path, share.files, before), share.trees))

        def commit() -> Committed:
            states = {
                name: [trees[name] for _, trees in parts if name in trees] for _, trees in parts for name in trees
            }
            texts = {
                f"{name}.json": bytes_writer(json.dumps(merged(trees), separators=(",", ":")).encode())
                for name, trees in states.items()
            }
            entries = _write_files(temporary, path, texts, before)
            for files, _ in parts:
                entries |= files
            committed = _commit(path, temporary, replace(manifest, files=entries), before)
            finish()
            return committed

        return ranks.first(commit)


def _commit(path: Path, temporary: Path, manifest: Manifest, before: Committed | None) -> Committed:
    if before and (same := committed_alike(path, manifest, before)) is not None:
        return same
    with placed(path, manifest.iteration) as folder:
        atomic_write(temporary / MANIFEST_NAME, manifest.to_bytes())
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    return Committed(real_path(path), manifest)


def _write_files(
    temporary: Path, path: Path, files: Mapping[str, Writer], before: Committed | None
) -> dict[str, FileEntry]:
    """Write and sync the files of one process."""
    entries: dict[str, FileEntry] = {}
    try:
        for name, writer in files.items():
            if "/" in name:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            known = None if before is None else before.manifest.files.get(name)
            is_same = before is not None and known is not None and _entry(writer) == known
            if before and known and is_same and link_file(before.folder, temporary, name):
                entries[name] = known
                continue
            with open(temporary / name, "xb") as file:
                entries[name] = measure(writer, file)
                file.flush()
                os.fsync(file.fileno())
        for folder in {(temporary / name).parent for name in files}:
            sync_folder(folder)
    except OSError as error:
        known_error = named(error, path)
        known_error.add_note(f"Rank {dist.get_rank()} on {socket.gethostname()} could not write its share.")
        raise known_error from error
    return entries


def _entry(writer: Writer) -> FileEntry:
    return writer.source.manifest.files[writer.name] if isinstance(writer, CommittedFile) else measure(writer)


def check_is_shared(folder: Path) -> None:
    """Check that every process sees the same ``folder``. Every process must call it.

    Raises:
        CheckpointError: a process does not see a file that rank 0 has created in it. Raised on every process.
    """
    with ExitStack() as stack:
        with dist.raised_together():
            created = None
            if dist.is_main_process():
                folder.mkdir(parents=True, exist_ok=True)
                token = temporary_sibling(folder / "seen-by-all")
                token.touch()
                stack.callback(token.unlink, missing_ok=True)
                created = token.name
        name, host = dist.broadcast_object((created, socket.gethostname()))
        with dist.raised_together():
            # A listing: network filesystems may remember for a while that a single name did not exist.
            if not folder.is_dir() or name not in os.listdir(folder):
                raise CheckpointError(
                    f"{folder}: rank {dist.get_rank()} on {socket.gethostname()} does not see the files of rank 0 on"
                    f" {host}. Every process of a sharded run writes its share there: use a folder that all hosts"
                    " share."
                )


def verify_together(folder: Path) -> Manifest:
    """`verify` with the files spread over the processes. Every process must call it.

    Raises:
        CheckpointError: a file is missing or damaged. Raised on every process, with the faults that all have found.
    """
    with dist.raised_together():
        found = None
        if dist.is_main_process():
            if not folder.is_dir():
                raise MissingFileError(f"{folder}: no such checkpoint folder.")
            found = read_manifest(folder)
    manifest = dist.broadcast_object(found)
    assert manifest is not None, "rank 0 has read it, or every rank has raised"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = dict([*manifest.files.items()][rank::world_size])
    seen = dist.all_gather_object(file_faults(folder, replace(manifest, files=own))[0])
    if faults := [fault for of_rank in seen for fault in of_rank]:
        raise CheckpointError("\n".join([f"{folder}: is damaged.", *(f"  {fault}" for fault in faults)]))
    return manifest

"""Writing checkpoints: staged in memory and committed by a background thread, or written synchronously.

A checkpoint is committed as one folder. A name that is saved again (``model_best``, ``model_final``) is a relative link
to a hidden folder ``.<name>-<iteration>``, which never changes: saving again writes a new one and swaps the link.
"""

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO
from weakref import WeakSet

from trainwright.base import dist
from trainwright.base.files import (
    Writer,
    commit_folder,
    hard_link,
    has_links,
    is_temporary,
    is_used_by_others,
    locked,
    make_folders,
    named,
    real_path,
    remove_folder,
    remove_stale,
    replace_link,
    swap_folders,
    sync_folder,
    temporary_sibling,
)
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.folder import (
    is_checkpoint,
    link_targets,
    links_in,
    manifest_identity,
    newest_sequence,
    order_of,
    read_pointer,
    write_pointer,
)
from trainwright.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, measure
from trainwright.checkpoint.sharded_saving import Exchange, Place, Share, Stage, files_of_all
from trainwright.checkpoint.shards import PIPELINE, Blocks
from trainwright.checkpoint.staging import StagingArea

logger = logging.getLogger("trainwright.checkpoint")

_COPY_BYTES = 8 * 2**20
_PAUSE_S = 1.0  # before a second try
SHARED = Place()
_HIDDEN = re.compile(r"\..+-(\d{7,}|none)(-\d+)?", re.DOTALL)  # .<name>-<iteration>, numbered if that is taken
_writers: WeakSet["CheckpointWriter"] = WeakSet()


def wait_for_saves() -> None:
    """Wait for every save in flight of this process: a checkpoint to be read may still be written."""
    for writer in list(_writers):
        writer.background.wait()


def _forget_in_child() -> None:
    """A forked process has none of the threads; the parent process completes the saves in flight."""
    for writer in list(_writers):
        writer.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class CheckpointWriter:
    """Writes the checkpoints of one folder, on the rank that saves. One save is in flight at a time."""

    def __init__(self, save_dir: str) -> None:
        self._folder = Path(save_dir)
        self.reset()
        self._last_committed: Committed | None = None
        self._known: int | None = 0  # the sequence of the newest checkpoint; None: the folder could not be read
        self._sequences: dict[tuple[int, ...], int] = {}  # of the checkpoints that have been read, by their manifest
        self._is_cleaned = self._has_warned = False
        _writers.add(self)
        if save_dir:
            self.look()

    def reset(self) -> None:
        """Discard the thread and the staging memory."""
        self.background = Background()
        self._staging = StagingArea()
        self._staged_iteration: int | None = None  # of the staged content

    def stage(self, files: Mapping[str, Writer], iteration: int | None) -> Mapping[str, Writer]:
        """A copy of ``files`` in staging memory, which training does not change; waits for a save in flight.

        It does not wait if that save is of the same iteration and no tensor has changed since: then both share the
        memory.
        """
        is_same = self.background.is_busy() and iteration is not None and iteration == self._staged_iteration
        if is_same and (alike := self._staging.staged_alike(files)) is not None:
            return alike
        self.finish()
        self._staged_iteration = None
        staged = self._staging.stage(files)
        self._staged_iteration = iteration
        return staged

    def with_last(
        self, files: Mapping[str, Writer], iteration: int | None, names: Collection[str]
    ) -> dict[str, Writer]:
        """``files``, with the files in ``names`` taken from the last checkpoint if it has the same iteration."""
        self.finish()
        last = self._last_of(iteration)
        if last is None:
            return dict(files)
        kept = {name for name in files if name in names and name in last.manifest.files}
        return {name: CommittedFile(last, name) if name in kept else write for name, write in files.items()}

    def submit(self, write: Callable[[], object]) -> None:
        """Queue ``write``, which writes staged files, in the background."""

        def wait_and_write() -> None:
            self._staging.wait_for_arrivals()
            write()

        self.background.submit(wait_and_write)

    def finish(self) -> None:
        """Wait for the saves in flight, and raise the error of a failed one."""
        self.background.wait()
        self.background.raise_failure()

    def release(self) -> None:
        """Wait for the saves in flight, and release their thread and memory; the next save allocates both again."""
        self.background.close()
        self._staging, self._staged_iteration = StagingArea(), None

    def look(self) -> None:
        """Know the checkpoints that are there now."""
        try:
            self._known = newest_sequence(self._folder, self._sequences)
        except OSError:  # a save, a resume or `unknown` reports it
            self._known = None

    def unknown(self) -> Path | None:
        """The newest checkpoint to resume from, if another object or process has saved it."""
        if self._known is None:
            self._known = newest_sequence(self._folder, self._sequences)
        known = self.newest_known()
        newest = next(iter(order_of(self._folder).resumable), None)
        return newest.path if newest is not None and newest.sequence > known else None

    def newest_known(self) -> int:
        """The sequence of the newest checkpoint that was there at the start, or that this object has saved."""
        return max(self._known or 0, self._last_committed.manifest.sequence if self._last_committed else 0)

    def log_failure(self) -> None:
        """Log an error that no call has raised. At interpreter exit the thread has already ended."""
        try:
            self.finish()
        except Exception as error:
            logger.error("%s", "\n  ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))

    def write(
        self,
        name: str,
        share: Share,
        iteration: int | None,
        *,
        ranks: Exchange,
        layout: Mapping[str, int] | None,
        tag_last: bool,
        on_commit: Callable[[], object] | None,
        mirrored: "Callable[[Committed], object] | None" = None,
        place: Place = SHARED,
    ) -> None:
        """Commit a checkpoint: write its folder, update the pointer, call ``on_commit``. After an error, try once more.

        Then call ``mirrored``, which starts to copy the checkpoint.

        Each of ``ranks`` calls this, those of a sharded run in their background threads.
        """
        folder, before = self._folder, self._last_of(iteration)
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        manifest = Manifest({}, iteration, dist.get_world_size(), now, tag_last=tag_last, layout=layout)

        def commit() -> None:
            with self._errors_of(name, place):
                tag = partial(write_pointer, folder, name) if tag_last else None
                self._last_committed = write_checkpoint(
                    folder / name, share, ranks, manifest, before, prepare=self._prepared, then=tag, place=place
                )

        _twice(commit)
        if self._last_committed is not None and (file := manifest_identity(self._last_committed.folder)) is not None:
            self._sequences[file] = self._last_committed.manifest.sequence
        if place.is_shared:
            _twice(lambda: ranks.first(lambda: self._call(on_commit, name)))
        else:
            _twice(lambda: ranks.each(lambda: self._call(on_commit if place.is_first else None, name)))
        if mirrored is not None and self._last_committed is not None:
            mirrored(self._last_committed)

    def _last_of(self, iteration: int | None) -> "Committed | None":
        """The last checkpoint, if it is of the same iteration."""
        last = self._last_committed
        return None if last is None or iteration is None or last.manifest.iteration != iteration else last

    def _prepared(self, manifest: Manifest) -> Manifest:
        """Prepare the folder for a new checkpoint; returns its manifest with its place among the others."""
        from trainwright.events.writers.rows import sync_files  # imported only by processes that write

        sync_files()  # the checkpoint records which metrics are written
        make_folders(self._folder)
        self.remove_stale()
        try:
            previous = read_pointer(self._folder)
        except (CheckpointError, OSError):
            previous = None
        newest = newest_sequence(self._folder, self._sequences)
        self._warn_of_others(newest)
        return replace(manifest, sequence=newest + 1, previous=previous)

    def _warn_of_others(self, newest: int) -> None:
        """Warn once if another process saves here: on a file system without locks, two trainings can start."""
        known = [one.newest_known() for one in _writers if one._folder == self._folder]
        if newest > max(known) and not self._has_warned and self._known is not None:
            self._has_warned = True
            logger.warning(
                "%s: another process saves checkpoints here. Two trainings in one folder replace and delete the"
                " checkpoints of each other: stop one of them, and set another folder for it.",
                self._folder,
            )

    @contextlib.contextmanager
    def _errors_of(self, name: str, place: Place) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            known = named(error, self._folder / name)
            notes = [] if known is error else getattr(error, "__notes__", [])
            for note in (*notes, f"Saving {name!r} failed; earlier checkpoints are unchanged."):
                known.add_note(note)
            raise known from None
        finally:
            if dist.is_main_process() or (not place.is_shared and place.is_first):
                remove_unlinked(self._folder)

    def _call(self, on_commit: Callable[[], object] | None, name: str) -> str:
        if on_commit is not None:
            try:
                on_commit()
            except Exception as error:
                error.add_note(f"{self._folder / name} is saved; on_commit, which is called after that, failed.")
                raise
        return name

    def remove_stale(self) -> None:
        """Delete temporary files of killed runs, until there are none of other processes. A failure logs a warning."""
        if self._is_cleaned:
            return
        self._is_cleaned = True
        try:
            remove_stale(self._folder)
            # A process that has just been killed may not have ended yet.
            self._is_cleaned = not is_used_by_others(self._folder)
        except OSError as error:
            logger.warning("%s: temporary files of an earlier run could not be deleted (%s).", self._folder, error)


def _twice(work: Callable[[], object]) -> object:
    """Call ``work``, and after an error of the system once more. All ranks have the same error, so they agree."""
    try:
        return work()
    except OSError as error:
        if dist.is_main_process():
            logger.warning("%s. Trying once more.", error)
    time.sleep(_PAUSE_S)
    return work()


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that this process has written: its folder and its manifest, on other ranks with their files only.

    ``own``: the files that this process has written.
    """

    folder: Path
    manifest: Manifest
    own: frozenset[str]


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """A file of a committed checkpoint, as a writer that copies it into another checkpoint."""

    source: Committed
    name: str

    def __call__(self, file: BinaryIO) -> None:
        with open(self.source.folder / self.name, "rb") as source:
            shutil.copyfileobj(source, file, _COPY_BYTES)


def write_checkpoint(
    path: Path,
    share: Share,
    ranks: Exchange,
    manifest: Manifest,
    before: Committed | None,
    *,
    prepare: Callable[[Manifest], Manifest],
    then: Callable[[], object] | None = None,
    place: Place = SHARED,
) -> Committed:
    """Write a checkpoint to ``path`` atomically: readers never see a partial checkpoint.

    Each of ``ranks`` writes its share into one temporary folder, which the first one commits. If one of them cannot, or
    does not see the folder of rank 0, all raise the error.

    Args:
        manifest: without its files.
        prepare: called by the first rank; prepares the folder, and completes the manifest.
        then: called by the first rank when the checkpoint is there.
        before: a checkpoint of the same iteration; files equal to its files become hard links to them.
        place: if the ranks share no folder, the first one of each folder commits its own, with the same manifest.
    """
    own, made = dict[str, FileEntry](), list[Committed]()  # made: on the first rank
    linked = set[str]()  # files that are in another checkpoint, and so on the disk
    is_shared = manifest.layout is not None
    with contextlib.ExitStack() as stack:

        def begin() -> str:
            nonlocal manifest
            _check_replaceable(path)
            manifest = prepare(manifest)
            stack.enter_context(locked(path.parent))
            temporary = temporary_sibling(path)
            os.mkdir(temporary)
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            return temporary.name

        temporary = path.with_name(ranks.first(begin))

        def write() -> tuple[dict[str, FileEntry], Blocks, tuple[int, bytes] | None]:
            nonlocal own
            if not place.is_shared:
                make_folders(path.parent)
                temporary.mkdir(exist_ok=True)
                stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            stage = None
            if share.stage is not None:
                share.stage.write(temporary)
                stage_file = share.stage.path(temporary, share.stage.number)
                stage = None if place.is_shared else (share.stage.number, stage_file.read_bytes())
            own = _write_files(temporary, share.files, before, linked, is_shared=is_shared)
            return own, share.blocks, stage

        parts = ranks.each(write)

        def commit() -> str:
            entries = {name: entry for files, _, _ in parts for name, entry in files.items()}
            of_others = {name for files, _, _ in parts[1:] for name in files}
            for number, content in (stage for _, _, stage in parts if stage is not None):
                Stage.path(temporary, number).write_bytes(content)
            if manifest.layout is not None:
                of_all = files_of_all(temporary, [blocks for _, blocks, _ in parts], manifest.layout.get(PIPELINE, 1))
                entries |= _write_files(temporary, of_all, before, linked, is_shared=True)
            complete = replace(manifest, files=entries)
            committed = None if before is None else _committed_alike(path, complete, before)
            if committed is None:
                with _placed(path, manifest.iteration) as folder:
                    (temporary / MANIFEST_NAME).write_bytes(complete.to_bytes())
                    commit_folder(temporary, folder, complete.files if is_shared else linked)
                committed = Committed(real_path(path), complete, frozenset(entries.keys() - of_others))
            if then is not None:
                then()
            made.append(committed)
            return committed.folder.name

        folder = path.with_name(ranks.first(commit))
        if not place.is_shared:
            copy = partial(_commit_parts, path, temporary, before, manifest, then)
            folder = _committed_by_each(path, ranks, place, made[0] if made else None, before, copy)
        return made[0] if made else Committed(folder, replace(manifest, files=own), frozenset(own))


def _check_replaceable(path: Path) -> None:
    is_checkpoint_or_empty = path.is_dir() and (is_checkpoint(path) or path.is_symlink() or not any(path.iterdir()))
    if path.exists() and not is_checkpoint_or_empty:
        raise CheckpointError(f"{path}: exists and is not a checkpoint; save under another name.")


def _committed_by_each(
    path: Path,
    ranks: Exchange,
    place: Place,
    made: "Committed | None",
    before: Committed | None,
    commit: Callable[[bytes], object],
) -> Path:
    """Commit the parts of each folder as rank 0 has committed its own, ``made``; returns the folder of this rank."""
    is_before = made is not None and made is before
    text = ranks.to_all(b"" if made is None or is_before else made.manifest.to_bytes())
    ranks.each(lambda: commit(text) if place.is_first and made is None else None)
    return real_path(path)


def _commit_parts(
    path: Path,
    temporary: Path,
    before: Committed | None,
    manifest: Manifest,
    then: Callable[[], object] | None,
    text: bytes,
) -> None:
    """Commit the folder of one host. ``text``: of the manifest; empty: ``before`` has the same files."""
    if not text:
        if before is not None and real_path(path) != before.folder and has_links(path.parent):
            replace_link(path, before.folder)
    else:
        for number in range((manifest.layout or {}).get(PIPELINE, 1)):
            Stage.path(temporary, number).unlink(missing_ok=True)
        with _placed(path, manifest.iteration) as folder:
            (temporary / MANIFEST_NAME).write_bytes(text)
            commit_folder(temporary, folder, json.loads(text)["files"])  # synced when they were written
    if then is not None:
        then()


def _committed_alike(path: Path, manifest: Manifest, before: Committed) -> Committed | None:
    """``before`` under the name ``path``, if it has the same files; None if ``path`` needs a folder of its own."""
    if manifest.files == before.manifest.files and is_checkpoint(before.folder):
        if real_path(path) == before.folder:
            return before
        is_link = _is_link_name(path) and has_links(path.parent)
        if is_link and before.manifest.tag_last >= manifest.tag_last:
            replace_link(path, before.folder)
            return before
    return None


@contextlib.contextmanager
def _placed(path: Path, iteration: int | None) -> Iterator[Path]:
    """The folder to commit a new checkpoint to; after the block, ``path`` names it."""
    is_real_folder = path.is_dir() and not path.is_symlink()
    as_link = _is_link_name(path) and not is_real_folder and has_links(path.parent)
    folder = _hidden_sibling(path, iteration) if as_link or is_real_folder else path
    try:
        yield folder
        if as_link:
            replace_link(path, folder)
        elif is_real_folder:
            links = [link for link in links_in(path.parent) if real_path(link) == real_path(path)]
            swap_folders(folder, path)
            for link in links:  # model_best keeps its content when its step is saved again
                replace_link(link, folder)
    except BaseException:
        if folder != path:
            remove_unlinked(path.parent)
        raise


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


def _write_files(
    folder: Path, writers: Mapping[str, Writer], before: Committed | None, linked: set[str], *, is_shared: bool
) -> dict[str, FileEntry]:
    """Write files into ``folder``; those equal to the files of ``before`` become hard links, if the filesystem can.

    ``linked``: to add the names of those. ``is_shared``: with other processes, perhaps of other hosts. Then they are
    synced here.
    """
    written: dict[str, FileEntry] = {}
    try:
        for name, writer in writers.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            known = None if before is None else before.manifest.files.get(name)
            if before and known and _entry_of(writer) == known and hard_link(before.folder / name, folder / name):
                written[name] = known
                linked.add(name)
                continue
            with open(folder / name, "xb") as file:
                written[name] = measure(writer, file)
                if is_shared:
                    file.flush()
                    os.fsync(file.fileno())
        for inner in {(folder / name).parent for name in writers if is_shared}:
            sync_folder(inner)
    except OSError as error:
        if is_shared:
            error.add_note(f"Rank {dist.get_rank()} on {socket.gethostname()} could not write its share.")
        raise
    return written


def _entry_of(writer: Writer) -> FileEntry:
    """Size and checksum of what ``writer`` writes."""
    return writer.source.manifest.files[writer.name] if isinstance(writer, CommittedFile) else measure(writer)


def _is_link_name(path: Path) -> bool:
    return path.is_symlink() or path.name.endswith(("best", "final"))


def _hidden_sibling(path: Path, iteration: int | None) -> Path:
    base = f".{path.name}-{'none' if iteration is None else f'{iteration:07d}'}"
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(candidate for name in names if not (candidate := path.with_name(name)).exists())


class Background:
    """Runs tasks in a background thread, in order. After a failure, later tasks do not run.

    The thread ends with `close`, or when this object is garbage-collected and its tasks are done. The interpreter
    waits for the tasks before it exits.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._tasks: list[Future[None]] = []
        self.failure: BaseException | None = None
        self._thread: int | None = None

    def submit(self, task: Callable[[], object]) -> None:
        """Queue ``task``. While the interpreter shuts down and starts no threads, it runs synchronously."""
        if self._executor is None:
            # Not a method of this object: the thread would keep a reference to it and never end.
            self._executor = ThreadPoolExecutor(1, "trainwright-save", initializer=_leave_the_processor_to_others)
        self._tasks = [earlier for earlier in self._tasks if not earlier.done()]
        try:
            self._tasks.append(self._executor.submit(self._run, task))
        except RuntimeError:
            self.wait()
            self._run(task)
            self._thread = None

    def is_busy(self) -> bool:
        """Whether a task is running or queued."""
        return any(not task.done() for task in self._tasks)

    def wait(self) -> None:
        """Wait for all tasks; inside a task it returns immediately. It does not raise failures."""
        if threading.get_ident() != self._thread:
            for task in self._tasks:
                task.result()

    def raise_failure(self) -> None:
        """Raise the error of a failed task, once."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for all tasks and end the thread; a later `submit` starts a new one."""
        self.wait()
        if self._executor is not None and threading.get_ident() != self._thread:
            self._executor.shutdown()
            self._executor, self._tasks = None, []

    def _run(self, task: Callable[[], object]) -> None:
        self._thread = threading.get_ident()
        if self.failure is not None:
            return
        try:
            task()
        except BaseException as error:  # any error is raised in the training thread
            self.failure = error


def _leave_the_processor_to_others() -> None:
    """Lower this thread's priority, so that training goes first if CPUs are scarce. Linux has a priority per thread."""
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)

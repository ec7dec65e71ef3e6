"""How files come to disk: staged in memory, then committed beside the training; or at once, while training waits."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from weakref import WeakSet

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import Writer, named, remove_stale
from trainwright.checkpoint.folder import (
    Committed,
    CommittedFile,
    read_pointer,
    remove_unlinked,
    write_checkpoint,
    write_pointer,
)
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.order import next_sequence
from trainwright.checkpoint.staging import StagingArea
from trainwright.parallel import dist


class Background:
    """Runs tasks in a thread of its own, in the order given. After one has failed, those behind it are not run.

    The thread ends with `close`, or when this object is not used any more and its tasks are done. Python does not end
    before the tasks have.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._tasks: list[Future[None]] = []
        self._failure: BaseException | None = None
        self._thread: int | None = None

    def submit(self, task: Callable[[], object]) -> Callable[[], None]:
        """Run ``task`` when those before it are done; returns what waits for it.

        Where Python is about to end and starts no thread any more, it is run here and now.
        """
        if self._executor is None:
            # Not a method of this object: the thread would keep that, and with it itself, for ever.
            self._executor = ThreadPoolExecutor(1, "trainwright-save", initializer=_leave_the_processor_to_others)
        self._tasks = [earlier for earlier in self._tasks if not earlier.done()]
        try:
            submitted = self._executor.submit(self._run, task)
        except RuntimeError:
            self.wait()
            self._run(task)
            self._thread = None
            return lambda: None
        self._tasks.append(submitted)
        return submitted.result

    def is_busy(self) -> bool:
        """Whether a task is running or to be run."""
        return any(not task.done() for task in self._tasks)

    def has_failed(self) -> bool:
        """Whether `raise_failure` would raise. Costs nothing to ask at every step."""
        return self._failure is not None

    def wait(self) -> None:
        """Return when no task is left; at once within a task, which cannot wait for itself. Failures are kept."""
        if threading.get_ident() != self._thread:
            for task in self._tasks:
                task.result()

    def raise_failure(self) -> None:
        """Raise what a task has failed with, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait, and end the thread; a later `submit` starts another one."""
        self.wait()
        if self._executor is not None and threading.get_ident() != self._thread:
            self._executor.shutdown()
            self._executor, self._tasks = None, []

    def _run(self, task: Callable[[], object]) -> None:
        self._thread = threading.get_ident()
        if self._failure is not None:
            return
        try:
            task()
        except BaseException as error:  # whatever it is, the training hears of it
            self._failure = error


def _leave_the_processor_to_others() -> None:
    """The training comes first where there are not enough processors for both. On Linux a thread has its own rank."""
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


logger = logging.getLogger("trainwright.checkpoint")

_writers: WeakSet["CheckpointWriter"] = WeakSet()


def wait_for_saves() -> None:
    """Wait for every save in flight of this process: what is about to be read may be what is being written."""
    for writer in list(_writers):
        writer.wait()


def _forget_in_child() -> None:
    """A forked process has none of the threads: what is in flight is its parent's affair."""
    for writer in list(_writers):
        writer.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class CheckpointWriter:
    """Writes the checkpoints of one folder, in the process that writes. One save is in flight at a time."""

    def __init__(self, save_dir: str) -> None:
        self._folder = Path(save_dir)
        self.begin_anew()
        self._last_committed: Committed | None = None
        self._is_cleaned = False
        _writers.add(self)

    def begin_anew(self) -> None:
        """Without anything in flight or staged."""
        self._background = Background()
        self._staging = StagingArea()
        self._staged_iteration: int | None = None  # of what the staging area holds

    def stage(self, files: Mapping[str, Writer], iteration: int | None) -> Mapping[str, Writer]:
        """``files`` as they are now, from memory that the training does not touch; waits for a save in flight.

        Does not wait where that save is one of the same iteration and nothing has changed since: then both share the
        memory.

        Raises:
            OSError: the save in flight has failed; and what else may have happened to it.
        """
        if self._background.is_busy() and iteration is not None and iteration == self._staged_iteration:
            alike = self._staging.staged_alike(files)
            if alike is not None:
                return alike
        self.settle()
        self._staged_iteration = None
        staged = self._staging.stage(files, beside=self._background.submit)
        self._staged_iteration = iteration
        return staged

    def with_last(
        self, files: Mapping[str, Writer], iteration: int | None, names: Collection[str]
    ) -> dict[str, Writer]:
        """``files`` with those of ``names`` from the last checkpoint, where that is one of this iteration."""
        self.settle()
        last = self._last_committed
        if last is None or iteration is None or last.manifest.iteration != iteration:
            return dict(files)
        kept = {name for name in files if name in names and name in last.manifest.files}
        return {name: CommittedFile(last, name) if name in kept else write for name, write in files.items()}

    def submit(self, write: Callable[[], object]) -> None:
        """Run ``write``, of staged files, in the background, after what is there already."""

        def wait_and_write() -> None:
            self._staging.wait_for_arrivals()
            write()

        self._background.submit(wait_and_write)

    def reserve(self, files: Mapping[str, Writer]) -> None:
        """Get the memory for staging such files, in the background."""
        if not self._background.is_busy():
            self._background.submit(partial(self._staging.reserve, files))

    def settle(self) -> None:
        """Wait for the saves in flight, and raise what has failed."""
        self._background.wait()
        self._background.raise_failure()

    def wait(self) -> None:
        """Wait for the saves in flight."""
        self._background.wait()

    def release(self) -> None:
        """Wait for the saves in flight, and give back their thread and memory; the next save gets both anew."""
        self._background.close()
        self._staging, self._staged_iteration = StagingArea(), None

    def log_failure(self) -> None:
        """Log what has failed and that the program has not asked for. At the end of Python its thread has ended."""
        try:
            self.settle()
        except Exception as error:
            logger.error("%s", "\n  ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))

    def has_failed(self) -> bool:
        """Whether `settle` would raise, as far as is known now."""
        return self._background.has_failed()

    def write(
        self,
        name: str,
        files: Mapping[str, Writer],
        iteration: int | None,
        *,
        tag_last: bool,
        on_commit: Callable[[], object] | None,
    ) -> None:
        """Commit a checkpoint: its folder, then the pointer to it, and then ``on_commit``."""
        from trainwright.events.writers.writer_thread import sync_files  # loaded where anything is written

        sync_files()  # the state in it says how far the metrics are written
        folder = self._folder
        before = self._last_committed
        if before and (iteration is None or before.manifest.iteration != iteration):
            before = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.remove_stale()
            manifest = _new_manifest(folder, iteration, tag_last=tag_last)
            self._last_committed = write_checkpoint(folder / name, files, manifest, before=before)
            if tag_last:
                write_pointer(folder, name)
        except OSError as error:
            known = named(error, folder / name)
            known.add_note(f"Saving {name!r} failed; earlier checkpoints are as they were.")
            raise known from error
        finally:
            remove_unlinked(folder)
        if on_commit is not None:
            try:
                on_commit()
            except Exception as error:
                error.add_note(f"{folder / name} is saved; what failed is on_commit, called after that.")
                raise

    def remove_stale(self) -> None:
        """Once: delete what a killed run has left. Failing at that stops nothing."""
        if self._is_cleaned:
            return
        self._is_cleaned = True
        try:
            remove_stale(self._folder)
        except OSError as error:
            logger.warning("%s: temporary files of an earlier run stay (%s).", self._folder, error)


def _new_manifest(folder: Path, iteration: int | None, *, tag_last: bool) -> Manifest:
    """What the manifest of a checkpoint says that is saved now, besides its files."""
    try:
        previous = read_pointer(folder)
    except (CheckpointError, OSError):
        previous = None
    return Manifest(
        {},
        iteration,
        dist.get_world_size(),
        datetime.now(UTC).isoformat(timespec="microseconds"),
        sequence=next_sequence(folder),
        previous=previous,
        tag_last=tag_last,
    )

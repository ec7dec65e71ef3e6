"""How files come to disk: staged in memory, then committed beside the training; or at once, while training waits."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from weakref import WeakSet

from torch.optim import Optimizer

from trainwright.checkpoint.background import Background
from trainwright.checkpoint.files import Writer, named, remove_stale
from trainwright.checkpoint.folder import Committed, remove_unlinked, write_checkpoint, write_pointer
from trainwright.checkpoint.staging import StagingArea
from trainwright.parallel import dist

logger = logging.getLogger("trainwright.checkpoint")

_writers: WeakSet["CheckpointWriter"] = WeakSet()


def wait_for_saves() -> None:
    """Wait for every save in flight of this process: what is about to be read may be what is being written."""
    for writer in list(_writers):
        writer.wait()


class CheckpointWriter:
    """Writes the checkpoints of one folder, in the process that writes. One save is in flight at a time."""

    def __init__(self, save_dir: str) -> None:
        self._folder = Path(save_dir)
        self._background = Background()
        self._staging = StagingArea()
        self._staged_iteration: int | None = None  # of what the staging area holds
        self._waiting_optimizers: list[Optimizer] = []
        self._last_committed: Committed | None = None
        self._is_cleaned = False
        _writers.add(self)

    def stage(
        self, files: Mapping[str, Writer], iteration: int | None, optimizers: Mapping[str, Optimizer]
    ) -> Mapping[str, Writer]:
        """``files`` as they are now, from memory that the training does not touch; waits for a save in flight.

        Does not wait where that save is one of the same iteration and nothing has changed since: then both share the
        memory. The state of ``optimizers`` is copied in the background: their next step waits for that.

        Raises:
            OSError: the save in flight has failed; and what else may have happened to it.
        """
        if self._background.is_busy() and iteration is not None and iteration == self._staged_iteration:
            alike = self._staging.staged_alike(files)
            if alike is not None:
                return alike
        self.settle()
        self._staged_iteration = iteration
        copied_later = [name for name, optimizer in optimizers.items() if self._lets_wait(optimizer)]
        staged = self._staging.stage(files, may_wait=[f"{name}.safetensors" for name in copied_later])
        self._background.submit(self._staging.copy_the_rest)
        return staged

    def submit(self, write: Callable[[], object]) -> None:
        """Run ``write`` in the background, after what is there already."""
        self._background.submit(write)

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

    def wait_until_staged(self) -> None:
        """Wait until what is in flight has been copied."""
        self._staging.is_copied.wait()

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
        folder = self._folder
        before = self._last_committed
        if before and (iteration is None or before.manifest.iteration != iteration):
            before = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.remove_stale()
            self._last_committed = write_checkpoint(
                folder / name, files, iteration=iteration, world_size=dist.get_world_size(), before=before
            )
            if tag_last:
                write_pointer(folder, name)
        except OSError as error:
            known = named(error, folder / name)
            known.add_note(f"Saving {name!r} failed; earlier checkpoints are as they were.")
            raise known from error
        finally:
            remove_unlinked(folder)
        if on_commit is not None:
            on_commit()

    def remove_stale(self) -> None:
        """Once: delete what a killed run has left. Failing at that stops nothing."""
        if self._is_cleaned:
            return
        self._is_cleaned = True
        try:
            remove_stale(self._folder)
        except OSError as error:
            logger.warning("%s: temporary files of an earlier run stay (%s).", self._folder, error)

    def _lets_wait(self, optimizer: Optimizer) -> bool:
        """Let the optimizer's next steps wait for the copy of its state. False: copy it at once.

        Only its step changes an optimizer's state, and torch's step calls what was registered here; not so that of a
        wrapper with a step of its own.
        """
        if not getattr(type(optimizer).step, "hooked", False):
            return False
        if all(known is not optimizer for known in self._waiting_optimizers):
            self._waiting_optimizers.append(optimizer)
            optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self.wait_until_staged())
        return True

"""The Checkpointer: save a run's whole state under a name, and bring it back, bit for bit.

Saving is three steps: `serialize` turns objects into named files without touching the disk, staging copies their
tensors, and `write_checkpoint` commits them as one folder, in a thread of its own while training goes on. Loading
verifies, reads everything, and only then changes the first object.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.checkpoint.candidates import first_good, resume_candidates
from trainwright.checkpoint.errors import CheckpointError, CheckpointTypeError
from trainwright.checkpoint.files import PathLike, Writer
from trainwright.checkpoint.folder import check_name, checkpoint_names
from trainwright.checkpoint.order import make_last
from trainwright.checkpoint.rank_errors import raised_together
from trainwright.checkpoint.saving import CheckpointWriter, wait_for_saves
from trainwright.checkpoint.state_files import (
    EXTRA,
    MODEL_FILES,
    RESERVED_NAMES,
    Stateful,
    check_state,
    lay_out_as_parameters,
    read_model_state,
    read_state,
    serialize,
    state_names,
)
from trainwright.checkpoint.verify import TRIES, identity, in_terms_of, verify
from trainwright.checkpoint.weights import load_weights, read_weights
from trainwright.config.errors import MissingFileError, did_you_mean
from trainwright.parallel import dist

logger = logging.getLogger("trainwright.checkpoint")


class Checkpointer:
    """Saves and loads a model and everything else with a state.

    All ranks call its methods alike; only rank 0 writes, and what fails on one rank is raised on all.

    Args:
        save_dir: the folder of the checkpoints; "" if nothing will be saved.
        save_to_disk: False makes `save` collect the state and write nothing.
        attachments: gives files that are no state, such as a ``README.md``, to lie in each checkpoint, by name.
        asynchronous: `save` returns when the state is copied in memory, and the copy is written beside the training;
            False returns when it is on disk, and takes no memory for a copy.
        checkpointables: objects with ``state_dict`` and ``load_state_dict``, by name; None is left out.

    Raises:
        CheckpointTypeError: one has no state.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: PathLike = "",
        *,
        save_to_disk: bool = True,
        asynchronous: bool = True,
        attachments: Callable[[], Mapping[str, bytes]] | None = None,
        **checkpointables: Stateful | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise CheckpointTypeError(f"Checkpointer.model: got {type(model).__name__}; it must be a torch.nn.Module.")
        self.model = model
        self.save_dir = str(save_dir)
        self.save_to_disk = save_to_disk
        self.asynchronous = asynchronous
        self.attachments = attachments
        self._writer = CheckpointWriter(self.save_dir)
        weakref.finalize(self, self._writer.log_failure)
        self.checkpointables: dict[str, Stateful] = {}
        for name, checkpointable in checkpointables.items():
            if checkpointable is not None:
                self.add_checkpointable(name, checkpointable)

    def __repr__(self) -> str:
        names = "".join(f", {name}=..." for name in self.checkpointables)
        return f"Checkpointer({type(self.model).__name__}, {self.save_dir!r}, save_to_disk={self.save_to_disk}{names})"

    def add_checkpointable(self, name: str, checkpointable: Stateful) -> None:
        """Save and load one more object from now on.

        Raises:
            CheckpointTypeError: it has no state.
            CheckpointError: the name is taken.
        """
        check_name(name)
        if name in RESERVED_NAMES or name in self.checkpointables:
            raise CheckpointError(f"Checkpointer: the name {name!r} is taken; give {type(checkpointable)} another one.")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(checkpointable, method, None)):
                raise CheckpointTypeError(
                    f"Checkpointer.{name}: got {type(checkpointable)}, which has no {method}(); "
                    "a checkpointable has state_dict() and load_state_dict(state)."
                )
        self.checkpointables[name] = checkpointable

    def save(
        self,
        name: str,
        *,
        tag_last: bool = True,
        on_commit: Callable[[], object] | None = None,
        keep_trained: bool = False,
        **extra: Any,
    ) -> None:
        """Save everything under ``name`` in ``save_dir``; the checkpoint is whole or, after an error, absent.

        It holds what the objects are now, whatever they become while it is written. One save is in flight at a time:
        the next one waits for it, unless nothing has changed since (a second name of the same iteration). If it fails,
        the next `save`, `wait` or `load` raises that. ``model_best``, ``model_final`` and the like are links, swapped
        when they are saved again.

        Args:
            tag_last: make it the one to resume from. ``model_best`` never becomes that.
            keep_trained: save again what has just been saved, with the model and the tensors of optimizers as they were
                then, and everything else as it is now. Their files are linked, not written again.
            on_commit: called when it is on disk, in the thread that writes: to delete older ones, for example.
            extra: what `load` returns. ``iteration`` also goes into the manifest.

        Raises:
            CheckpointError: the name is not allowed.
            CheckpointTypeError: state of a type that a checkpoint cannot hold.
            OSError: the disk is full, read-only ... Earlier checkpoints are untouched.
        """
        write: Callable[[], None] | None = None
        with raised_together():
            check_name(name)
            if not self.save_dir:
                raise CheckpointError("Checkpointer.save: save_dir is empty; say where checkpoints go.")
            _check_iteration(extra)
            attached = self.attachments() if self.attachments is not None and self._is_writer else {}
            files: Mapping[str, Writer] = serialize(self.model, self.checkpointables, extra, attached)
            if self._is_writer:
                iteration = extra.get("iteration")
                if keep_trained:
                    files = self._writer.with_last(files, iteration, self._trained_files())
                if self.asynchronous:
                    files = self._writer.stage(files, iteration)
                tag_last = tag_last and name != "model_best"
                write = partial(self._writer.write, name, files, iteration, tag_last=tag_last, on_commit=on_commit)
        # Nothing is written unless every rank has given its state.
        if self.asynchronous:
            if write is not None:
                self._writer.submit(write)
            return
        with raised_together():
            if write is not None:
                write()

    def load(
        self, path: PathLike, checkpointables: Iterable[str] | None = None, *, strict: bool = False
    ) -> dict[str, Any]:
        """Verify a checkpoint and take the model and the checkpointables from it; returns the extras of `save`.

        Args:
            path: a checkpoint folder, or for weights alone a ``.safetensors``, ``.pt`` or ``.pth`` file; "" is none.
            checkpointables: None loads all and everything must agree; [] loads the weights that fit, and no more.
            strict: every weight must fit, also where weights alone are loaded.

        Raises:
            MissingFileError: ``path`` does not exist.
            CheckpointError: it is damaged, lacks a state, or its weights are those of another model.
        """
        if not str(path):
            logger.debug("No checkpoint is given: the model stays as it is.")
            return {}
        path = Path(path)
        wanted = list(self.checkpointables) if checkpointables is None else list(checkpointables)
        is_weights_only = checkpointables is not None and not wanted
        with raised_together():
            self._writer.settle()
            wait_for_saves()
            for name in wanted:
                if name not in self.checkpointables:
                    hint = did_you_mean(name, self.checkpointables)
                    raise CheckpointError(f"Checkpointer.load: no checkpointable {name!r}. {hint}")
            _check_exists(path)
            is_folder = path.is_dir()
            if not is_folder and is_weights_only:
                load_weights(self.model, read_weights(path), str(path), strict=strict)
            elif not is_folder:
                raise CheckpointError(f"{path}: a file has weights and no other state; give checkpointables=[].")
        if not dist.broadcast_object(is_folder):
            return {}
        return self._load_contents(path, self._read(path, wanted), wanted, strict=strict or not is_weights_only)

    def has_checkpoint(self) -> bool:
        """Whether ``save_dir`` holds something to resume from, whole or not."""
        wait_for_saves()
        return bool(self.save_dir) and bool(resume_candidates(Path(self.save_dir)))

    def get_checkpoint_file(self) -> str:
        """The folder where a resume looks first; "" if there is none."""
        wait_for_saves()
        if not self.save_dir:
            return ""
        return next((str(path) for path in resume_candidates(Path(self.save_dir)) if path.is_dir()), "")

    def resume_or_load(self, path: PathLike, *, resume: bool = True) -> dict[str, Any]:
        """Go on from the newest good checkpoint in ``save_dir``; where there is none, take the weights from ``path``.

        Returns the extras of the checkpoint that the run goes on from; {} for a run that starts anew.

        Raises:
            CheckpointError: there are checkpoints, and none of them is good.
        """
        if not dist.broadcast_object(resume and self.has_checkpoint()):
            self.load(path, checkpointables=[])
            return {}
        if self._is_writer:
            self._writer.remove_stale()
        folder, wanted = Path(self.save_dir), list(self.checkpointables)
        with raised_together():
            self._writer.settle()
            found = resume_candidates(folder) if dist.is_main_process() else []
        candidates, warn = dist.broadcast_object(found), dist.is_main_process()
        chosen, contents = first_good(folder, candidates, lambda path: self._read(path, wanted), warn=warn)
        logger.info("Resuming from %s.", chosen)
        return self._load_contents(chosen, contents, wanted, strict=True)

    def tag_last_checkpoint(self, name: str) -> None:
        """Make the saved checkpoint ``name`` the one to resume from. The next save supersedes what was saved after it.

        Raises:
            MissingFileError: there is none of that name.
        """
        with raised_together():
            check_name(name)
            self._writer.settle()
            if self._is_writer:
                _check_exists(Path(self.save_dir, name))
                make_last(Path(self.save_dir), name)

    def wait(self, *, alone: bool = False) -> None:
        """Return when every checkpoint saved so far is on disk, and raise what failed, on all ranks.

        ``alone``: this rank only, where the others may have failed and would not come.
        """
        if alone:
            self._writer.settle()
            return
        with raised_together():
            self._writer.settle()

    def close(self) -> None:
        """Wait for the saves in flight, end their thread, and free the memory of the copy. Raises nothing: `wait` does.

        A trainer does this at the end of a training. The checkpointer can be used again.
        """
        self._writer.release()

    def has_failed(self) -> bool:
        """Whether a save in the background has failed, which the next `wait` raises. Asks nobody, waits for nothing."""
        return self._writer.has_failed()

    def prepare(self, *, reserve: bool = True) -> None:
        """Find out now what a `save` would refuse, and get the memory that staging takes, in the background.

        ``reserve=False``: not the memory, where nothing is to be saved before the training ends.

        Call it, on all ranks, when the optimizer has made its first step, and with it its state: a state that has no
        place in a checkpoint is then no surprise after hours, and the first `save` is as short as the others.

        Raises:
            CheckpointTypeError: a state of a type that a checkpoint cannot hold.
        """
        with raised_together():
            files = serialize(self.model, self.checkpointables, {})
            if reserve and self.asynchronous and self._is_writer:
                self._writer.reserve(files)

    def _trained_files(self) -> list[str]:
        """Those of the model, and the tensors of optimizers: a schedule may have changed a rate after the last step."""
        optimizers = [name for name, state in self.checkpointables.items() if isinstance(state, Optimizer)]
        return [*MODEL_FILES, *(f"{name}.safetensors" for name in optimizers)]

    @property
    def _is_writer(self) -> bool:
        return self.save_to_disk and dist.is_main_process()

    def _read(self, path: Path, wanted: list[str]) -> "_Contents":
        """Verify and read a checkpoint, all of it from one save. All ranks.

        A name may be given to another checkpoint at any moment, and the folder that it led to be deleted: the link is
        followed once, and what was read is dropped and read again if the name leads elsewhere by then.
        """
        for tries_left in reversed(range(TRIES)):
            folder, before = dist.broadcast_object(identity(path))
            try:
                contents = self._read_once(folder, wanted)
            except Exception as error:  # alike on all ranks
                if not tries_left or dist.broadcast_object(identity(path)) == (folder, before):
                    raise in_terms_of(path, error, folder) from error.__cause__
            else:
                if dist.broadcast_object(identity(path)) == (folder, before):
                    return contents
        raise CheckpointError(f"{path}: is saved again more quickly than it can be read.")

    def _read_once(self, folder: Path, wanted: list[str]) -> "_Contents":
        with raised_together():
            verified = verify(folder) if dist.is_main_process() else None
        manifest = dist.broadcast_object(verified)
        assert manifest is not None, "rank 0 has verified it, or every rank has raised"
        with raised_together():
            held = state_names(manifest)
            extra: dict[str, Any] = read_state(folder, manifest, EXTRA)
            weights = read_model_state(folder, manifest)
            states = {name: read_state(folder, manifest, name) for name in wanted if name in held}
            for name, state in states.items():
                check_state(state, self.checkpointables[name], str(folder / f"{name}.json"))
        return _Contents(held, extra, weights, states)

    def _load_contents(self, path: Path, contents: "_Contents", wanted: list[str], *, strict: bool) -> dict[str, Any]:
        held, weights, states = contents.held, contents.weights, contents.states
        with raised_together():
            missing = [name for name in wanted if name not in held]
            if missing:
                raise CheckpointError(
                    f"{path}: has no state of {', '.join(missing)}; it holds {', '.join(held) or 'only the model'}. "
                    "For the weights alone, load it with checkpointables=[]."
                )
            if strict and len(held) > len(wanted) == len(self.checkpointables) > 0:
                unused = ", ".join(name for name in held if name not in wanted)
                logger.warning("%s: holds state that nothing here takes: %s.", path, unused)
        with raised_together():
            load_weights(self.model, weights, str(path), strict=strict)
            for name in wanted:
                try:
                    target = self.checkpointables[name]
                    with without_compiler():
                        target.load_state_dict(states.pop(name))
                    if isinstance(target, Optimizer):
                        lay_out_as_parameters(target)
                except Exception as error:
                    error.add_note(f"While loading {name!r} from {path}.")
                    raise
        return contents.extra


@dataclass(frozen=True, slots=True)
class _Contents:
    """What was read of one checkpoint: the names of its states, its extras, weights, and the states asked for."""

    held: list[str]
    extra: dict[str, Any]
    weights: dict[str, Any]
    states: dict[str, Any]


def _check_iteration(extra: Mapping[str, Any]) -> None:
    if "iteration" in extra and (type(extra["iteration"]) is not int or extra["iteration"] < 0):
        got = extra["iteration"]
        raise CheckpointError(f"Checkpointer.save: iteration: got {got!r} ({type(got)}); it must be an int >= 0.")


def _check_exists(path: Path) -> None:
    if not path.exists():
        names = checkpoint_names(path.parent)
        hint = did_you_mean(path.name, names) if names else f"There is no checkpoint in '{path.parent}'."
        raise MissingFileError(f"{path}: no such checkpoint. {hint}")

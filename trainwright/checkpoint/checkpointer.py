"""The Checkpointer: save the complete state of a run under a name, and restore it bit for bit.

Saving has three steps: `serialize` turns objects into named files without touching the disk, staging copies their
tensors, and `write_checkpoint` commits them as one folder, in a background thread while training continues. Loading
verifies and reads everything before it changes the first object.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.base import dist
from trainwright.base.dist import raised_together
from trainwright.base.errors import MissingFileError, did_you_mean
from trainwright.base.files import Content, PathLike, Writer
from trainwright.checkpoint.errors import CheckpointError, CheckpointTypeError
from trainwright.checkpoint.folder import (
    WEIGHTS_NAME,
    check_name,
    checkpoint_names,
    first_good,
    make_last,
    resume_candidates,
)
from trainwright.checkpoint.manifest import MANIFEST_NAME
from trainwright.checkpoint.optimizer_state import has_other_order, inner_optimizers, sharing_state
from trainwright.checkpoint.rehearsal import Rehearsal
from trainwright.checkpoint.saving import CheckpointWriter, wait_for_saves
from trainwright.checkpoint.shard_index import state_of
from trainwright.checkpoint.sharded_saving import (
    Exchange,
    Share,
    Sharing,
    check_is_shared,
    is_of_model,
    own_part,
    serialize,
    use_own_rates,
    verify_together,
    weights_of_stage,
    with_rows,
)
from trainwright.checkpoint.shards import PIPELINE
from trainwright.checkpoint.state_files import (
    EXTRA,
    MODEL,
    MODEL_FILES,
    RESERVED_NAMES,
    TRAINING_WEIGHTS,
    Stateful,
    check_state,
    read_model_state,
    read_state,
    read_states_of_ranks,
    state_names,
)
from trainwright.checkpoint.verify import identity, read_unchanged
from trainwright.checkpoint.weights import INDEX_NAME, OLD_WEIGHTS_NAME, load_weights, read_weights
from trainwright.optim.fused import keep_possible_kernels
from trainwright.optim.named import load_state
from trainwright.parallel.faults import meet
from trainwright.parallel.wrappers import model_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainwright.checkpoint.mirror import Mirror, Prune

logger = logging.getLogger("trainwright.checkpoint")


class Checkpointer:
    """Saves and loads a model and other objects with a state.

    All ranks must call its methods; only rank 0 writes, and an error on one rank is raised on all.

    Args:
        save_dir: the folder of the checkpoints; "" if nothing will be saved.
        save_to_disk: with False, `save` collects the state and writes nothing. Rank 0's value counts.
        mesh: torch's mesh of all processes, if the model is sharded over them: then each saves its share. Stages of a
            pipeline differ along its dimension "pp". The trainers need no argument.
        attachments: returns additional files by name, such as a ``README.md``, to store in each checkpoint. A function
            in place of the content is called when the file is written, in the background.
        weights: returns the module whose weights are saved as the model's, if it is not ``model``, such as a
            copy with averaged weights. Weights are always loaded into ``model``.
        only: the names of the weights to save; by default all. A load does not need the others.
        asynchronous: `save` returns when the state is copied in memory; a background thread writes the copy. With
            False it returns when the state is on disk, and needs no memory for a copy.
        mirror: a URL of fsspec (``s3://bucket/run``): each checkpoint is copied there in the background, and
            `resume_or_load` downloads the newest if ``save_dir`` has none that is newer.
        checkpointables: objects with ``state_dict`` and ``load_state_dict``, by name; None is ignored. If one has
            ``before_save()``, that is called on every rank before a save reads the states; an exception prevents it.
            If one has ``ranks_to_load(state, count)``, the value of "rank" in its state belongs to the process alone:
            it is saved for each of them, and loaded as a dict, by rank, for those that this returns.

    Raises:
        CheckpointTypeError: an object has no ``state_dict`` or ``load_state_dict``.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: PathLike = "",
        *,
        save_to_disk: bool = True,
        mesh: "DeviceMesh | None" = None,
        asynchronous: bool = True,
        attachments: Callable[[], Mapping[str, Content]] | None = None,
        weights: Callable[[], nn.Module] | None = None,
        only: Collection[str] | None = None,
        mirror: "str | Mirror | None" = None,
        **checkpointables: Stateful | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise CheckpointTypeError(f"Checkpointer.model: got {type(model).__name__}; it must be a torch.nn.Module.")
        self.model = model
        # Absolute: a program may change its working folder.
        self.save_dir = str(Path(save_dir).absolute()) if save_dir else ""
        self.save_to_disk = save_to_disk
        self.mesh = mesh
        self._sharing: Sharing | None = None
        self.asynchronous = asynchronous
        self.attachments = attachments
        self.only = only
        self._weights = weights  # no function of self by default: a cycle would keep the writer thread alive
        self._writer = CheckpointWriter(self.save_dir)
        if isinstance(mirror, str):
            from trainwright.checkpoint.mirror import Mirror

            mirror = Mirror(mirror, self.save_dir, setting="Checkpointer.mirror")
            mirror.check()
        self.mirror = mirror
        weakref.finalize(self, self._writer.log_failure)
        self.checkpointables: dict[str, Stateful] = {}
        # The checkpoint, with the names of its states, until the next save.
        self.loaded_from: tuple[Path, list[str]] | None = None
        self._warned_of: PathLike = ""
        self._rehearsal: Rehearsal | None = None
        for name, checkpointable in checkpointables.items():
            if checkpointable is not None and name not in self.checkpointables:
                self.add_checkpointable(name, checkpointable)

    def __repr__(self) -> str:
        names = "".join(f", {name}=..." for name in self.checkpointables)
        return f"Checkpointer({type(self.model).__name__}, {self.save_dir!r}, save_to_disk={self.save_to_disk}{names})"

    def in_folder(self, folder: PathLike, *, asynchronous: bool | None = None) -> "Checkpointer":
        """A checkpointer of the same objects in another folder, without the mirror of this one."""
        is_same = bool(folder) and Path(folder).absolute() == Path(self.save_dir)
        return Checkpointer(
            self.model,
            folder,
            save_to_disk=self.save_to_disk,
            mesh=self.mesh,
            asynchronous=self.asynchronous if asynchronous is None else asynchronous,
            attachments=self.attachments,
            weights=self._weights,
            only=self.only,
            mirror=self.mirror if is_same else None,
            **dict[str, Any](self.checkpointables),
        )

    def add_checkpointable(self, name: str, checkpointable: Stateful) -> None:
        """Add an object to all later saves and loads, on all ranks.

        After a load or resume, until the next save, its state in that checkpoint is loaded at once; if there is none,
        one warning says that it starts fresh.

        Raises:
            CheckpointTypeError: it has no ``state_dict`` or ``load_state_dict``.
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
        for inner, optimizer in inner_optimizers(name, checkpointable).items():
            if inner not in self.checkpointables:
                self.add_checkpointable(inner, optimizer)
        if self.loaded_from is None:
            return
        path, held = self.loaded_from
        if name in held:
            self._load_state(path, name, self._read(path, [name]).states[name])
        else:
            logger.warning("%s: has no state of %s, which starts fresh.", path, name)

    def save(
        self,
        name: str,
        *,
        tag_last: bool = True,
        on_commit: Callable[[], object] | None = None,
        prune: "Prune | None" = None,
        keep_trained: bool = False,
        **extra: Any,
    ) -> None:
        """Save everything under ``name`` in ``save_dir``. After an error no partial checkpoint remains.

        It holds the state at the time of the call, even if objects change while it is written. One save is in flight
        at a time: the next one waits for it, unless no tensor has changed since (a second name of the same iteration).
        If it fails, the next `save`, `wait` or `load` raises its error. ``model_best``, ``model_final`` and names that
        end like them are links, which later saves replace.

        Args:
            tag_last: resume from this checkpoint. ``model_best`` is never the one to resume from.
            keep_trained: save the last checkpoint again with the same model and optimizer tensors; everything else has
                its current state. The unchanged files are linked, not written again.
            on_commit: called in the writer thread when the checkpoint is on disk.
            prune: deletes older checkpoints in a folder. Called behind ``on_commit`` with ``save_dir``; with a mirror,
                whatever it deletes in a folder of the same names is deleted there.
            extra: values that `load` returns. ``iteration`` is also stored in the manifest.

        Raises:
            CheckpointError: the name is not allowed.
            CheckpointTypeError: a state holds a type that a checkpoint cannot store.
            OSError: the disk is full or read-only, for example. Earlier checkpoints are unchanged.
        """
        meet("Checkpointer.save")
        self._warn_of_unused()
        self.loaded_from = None
        sharing = self._sharing_now()
        takes_part = self._is_writer or sharing is not None  # in the writing
        numbers = [0, 0]  # of rank 0: whether it writes; bytes of a row
        with raised_together(numbers):
            iteration = self._checked_iteration(name, extra)
            attached = self._attached(sharing)
            self._before_save()
            share = self._share(sharing, extra, attached)
            if keep_trained:
                share = replace(share, files=self._with_trained(share.files, iteration))
            if self.asynchronous and takes_part:
                share = replace(share, files=self._writer.stage(share.files, iteration))
            numbers[:] = self._is_writer, max(map(len, share.rows.values()), default=0)
            rehearse = None
            if self._rehearsal is not None and self._is_writer:
                rehearse = self._rehearsal.begin(self, is_sharded=sharing is not None)
        # Nothing is written unless every rank has collected its state.
        is_written, size = numbers
        if not is_written:
            return
        share = with_rows(share, size, None if sharing is None else sharing.grid)
        tag_last = tag_last and name != "model_best"
        commit = self._commit(name, sharing, tag_last=tag_last, on_commit=on_commit, prune=prune)
        write = partial(self._writer.write, name, share, iteration, **commit)
        if rehearse is not None:
            write = partial(_in_turn, write, partial(rehearse, Path(self.save_dir, name)))
        if self.asynchronous:
            if takes_part:
                self._writer.submit(write)
            return
        with raised_together():
            if takes_part:
                write()

    def load(
        self,
        path: PathLike,
        checkpointables: Iterable[str] | None = None,
        *,
        strict: bool = False,
        partial: bool = True,
    ) -> dict[str, Any]:
        """Verify a checkpoint and load the model and the checkpointables from it; returns the extras of `save`.

        Args:
            path: a checkpoint folder, or for weights only a ``.safetensors``, ``.pt`` or ``.pth`` file or a folder with
                ``model.safetensors`` or its index; with "" nothing is loaded.
            checkpointables: None loads all, and everything must match; [] loads only the weights that fit.
            strict: every weight must fit, even if only weights are loaded.
            partial: without ``strict``, weights may be missing anywhere; False: only those of a new head.

        Raises:
            MissingFileError: ``path`` does not exist.
            CheckpointError: it is damaged, lacks a state, or its weights belong to another model.
        """
        if not str(path):
            logger.debug("Checkpointer.load: the path is empty, nothing is loaded.")
            return {}
        meet("Checkpointer.load")
        path = Path(path)
        wanted = list(self.checkpointables) if checkpointables is None else list(checkpointables)
        is_weights_only = checkpointables is not None and not wanted
        with raised_together():
            self._writer.finish()
            wait_for_saves()
            for name in wanted:
                if name not in self.checkpointables:
                    hint = did_you_mean(name, self.checkpointables)
                    raise CheckpointError(f"Checkpointer.load: no checkpointable {name!r}. {hint}")
            _check_exists(path)
            is_of_run = (path / MANIFEST_NAME).exists() or (path / f"{EXTRA}.json").exists()  # perhaps damaged
            if is_weights_only and not is_of_run:  # perhaps of transformers
                files = [path / WEIGHTS_NAME, path / INDEX_NAME, path / OLD_WEIGHTS_NAME]
                path = next((file for file in files if file.is_file()), path)
            is_folder = path.is_dir()
            if not is_folder and is_weights_only:
                weights = read_weights(path)
                load_weights(self.model, weights, str(path), strict=strict, only=self.only, partial=partial)
            elif not is_folder:
                raise CheckpointError(f"{path}: a file holds only weights and no other state; pass checkpointables=[].")
        if not dist.broadcast_object(is_folder):
            return {}
        strict = strict or not is_weights_only
        return self._load_contents(path, self._read(path, wanted), wanted, strict=strict, partial=partial)

    def has_checkpoint(self) -> bool:
        """Whether ``save_dir`` holds a checkpoint to resume from, valid or not."""
        wait_for_saves()
        return bool(self.save_dir) and bool(resume_candidates(Path(self.save_dir)))

    def get_checkpoint_file(self) -> str:
        """The folder of the first checkpoint that a resume tries; "" if there is none."""
        wait_for_saves()
        if not self.save_dir:
            return ""
        return next((str(path) for path in resume_candidates(Path(self.save_dir)) if path.is_dir()), "")

    def resume_or_load(self, path: PathLike, *, resume: bool = True) -> dict[str, Any]:
        """Resume from the newest valid checkpoint in ``save_dir``; if there is none, load the weights from ``path``.

        Returns the extras of the checkpoint that the run resumes from; {} for a new run.

        Raises:
            CheckpointError: there are checkpoints, and none of them is valid.
        """
        meet("Checkpointer.resume_or_load")
        if resume and self.mirror is not None:
            self._writer.finish()
            self.mirror.fetch()
        if not dist.broadcast_object(resume and self.has_checkpoint()):
            self.load(path, checkpointables=[])
            return {}
        self.check_folder()
        if self._is_writer:
            self._writer.remove_stale()
            self._writer.look()
        folder, wanted = Path(self.save_dir), list(self.checkpointables)
        with raised_together():
            self._writer.finish()
            found = resume_candidates(folder) if dist.is_main_process() else []
        candidates, warn = dist.broadcast_object(found), dist.is_main_process()
        chosen, contents = first_good(folder, candidates, lambda path: self._read(path, wanted), warn=warn)
        logger.info("Resuming from %s.", chosen)
        return self._load_contents(chosen, contents, wanted, strict=True)

    def tag_last_checkpoint(self, name: str) -> None:
        """Make the saved checkpoint ``name`` the one to resume from. The next save supersedes later checkpoints.

        Raises:
            MissingFileError: there is no checkpoint of that name.
        """
        meet("Checkpointer.tag_last_checkpoint")
        with raised_together():
            check_name(name)
            self._writer.finish()
            if self._is_writer:
                _check_exists(Path(self.save_dir, name))
                make_last(Path(self.save_dir), name)

    def wait(self, *, alone: bool = False) -> None:
        """Return when every checkpoint saved so far is on disk, and raise what failed, on all ranks.

        ``alone``: this rank only, where the others may have failed and would not come.
        """
        if not alone:
            meet("Checkpointer.wait")
        with nullcontext() if alone else raised_together():
            self._writer.finish()

    def after_saves(self, call: Callable[[], object]) -> None:
        """Call ``call`` on this rank when the checkpoints saved so far are on disk, in the thread that writes them.

        It is not called if one of them has failed. What it raises is raised as the error of a save.
        """
        if self.asynchronous:
            self._writer.background.submit(call)
        else:
            call()

    def close(self) -> None:
        """Wait for the saves in flight, end their thread, and free the memory of the copy.

        It raises no error of a save; `wait` does. A trainer calls it at the end. The checkpointer can be used again.
        It also waits until the mirror has the newest checkpoint; if that fails, it logs an error.
        """
        self._writer.release()
        if self.mirror is not None:
            self.mirror.finish()

    def has_failed(self) -> bool:
        """Whether a background save of this rank has failed. Does not wait; the next `wait` raises the error."""
        return self._writer.background.failure is not None

    def check_folder(self) -> None:
        """Check that all ranks which write or read a share of a checkpoint see the same folder. Call it on all ranks.

        With a mirror they need not: each host then has the parts of its own ranks.

        Raises:
            CheckpointError: a rank does not see what rank 0 writes there. Raised on all ranks.
        """
        if self._mesh() is not None and self.save_dir and self.mirror is None:
            check_is_shared(Path(self.save_dir))

    def check_newest(self) -> None:
        """Check that no other process has saved here since this object was made. Call it on all ranks.

        Raises:
            CheckpointError: a training would go on from an older state, and delete the newer one.
        """
        self._warn_of_unused()
        with raised_together():
            other = self._writer.unknown() if self.save_dir and self._is_writer else None
            if other is not None:
                raise CheckpointError(
                    f"{other}: saved by another process or trainer after this one was built, which would go on from"
                    " an older state and delete it. Build the trainer again to continue from there, or set another"
                    " output folder."
                )

    def prepare(self) -> None:
        """Check that the state can be saved.

        Call it on all ranks after the first optimizer step, which creates the optimizer's state. A state that cannot
        be saved is then reported at once, not after hours.

        Raises:
            CheckpointTypeError: a state holds a type that a checkpoint cannot store.
        """
        sharing = self._sharing_now()
        with raised_together():
            self._before_save()
            self._share(sharing, {}, {})

    def rehearse(self) -> Rehearsal | None:
        """Rehearse a resume with the next save, and name what would not come back: see :mod:`.rehearsal`.

        Call it before the first step of a training, which gives objects their state. Returns what it finds, on the
        rank that saves.
        """
        self._rehearsal = Rehearsal(self) if self._is_writer else None
        return self._rehearsal

    def _mesh(self) -> "DeviceMesh | None":
        return self.mesh if self.mesh is not None else getattr(dist.mesh_in_use(), "device_mesh", None)

    def _sharing_now(self) -> Sharing | None:
        """How the processes save together; None where rank 0 saves everything. Every process must call it."""
        mesh = self._mesh()
        if mesh is None or self._sharing is None or self._sharing.mesh is not mesh:
            mirrored = Path(self.save_dir) if self.mirror is not None and self.save_dir else None
            self._sharing = None if mesh is None else Sharing.of(mesh, model_state(self.model), mirrored)
        return self._sharing

    def _checked_iteration(self, name: str, extra: Mapping[str, Any]) -> int | None:
        """The iteration of a save; None without one. Raises what forbids the save."""
        check_name(name)
        if not self.save_dir:
            raise CheckpointError("Checkpointer.save: save_dir is empty; set it to the folder for checkpoints.")
        iteration = extra.get("iteration", 0)
        if type(iteration) is not int or iteration < 0:
            got = f"{iteration!r} ({type(iteration)})"
            raise CheckpointError(f"Checkpointer.save: iteration: got {got}; it must be an int >= 0.")
        return extra.get("iteration")

    def _commit(
        self,
        name: str,
        sharing: Sharing | None,
        *,
        tag_last: bool,
        on_commit: Callable[[], object] | None,
        prune: "Prune | None",
    ) -> dict[str, Any]:
        """How the ranks commit a checkpoint together, and what is called when it is on disk."""
        calls = [call for call in (on_commit, prune and partial(prune, Path(self.save_dir))) if call is not None]
        commit: dict[str, Any] = {"tag_last": tag_last, "on_commit": partial(_in_turn, *calls) if calls else None}
        if sharing is None:
            commit |= {"ranks": Exchange(), "layout": None}
        else:
            commit |= {"ranks": sharing.ranks, "layout": sharing.grid.sizes, "place": sharing.place}
        if self.mirror is not None:
            copies = sharing.ranks_of_mirror if sharing is not None and sharing.ranks_of_mirror else Exchange()
            commit["mirrored"] = partial(self.mirror.offer, name=name, tag_last=tag_last, prune=prune, ranks=copies)
        return commit

    def _attached(self, sharing: Sharing | None) -> Mapping[str, Content]:
        """The additional files that this rank writes."""
        if self.attachments is None or not (self._is_writer or sharing is not None):
            return {}
        attached = self.attachments()  # of a sharded model, all processes gather what it holds
        return attached if self._is_writer else {}

    def _warn_of_unused(self) -> None:
        """Warn of states in the loaded checkpoint that nothing has loaded, also none that was added later."""
        path, held = self.loaded_from or ("", [])
        unused = [name for name in held if name not in self.checkpointables]
        if unused and path != self._warned_of and dist.is_main_process():
            logger.warning(
                "%s: holds state that no checkpointable of this run loads: %s. %s", path, ", ".join(unused),
                "Set ema as before: its weights are an average, and the training now continues from that."
                if unused == [TRAINING_WEIGHTS] else "add_checkpointable loads it.",
            )  # fmt: skip
        self._warned_of = path

    def _before_save(self) -> None:
        for one in self.checkpointables.values():
            if hasattr(one, "before_save"):  # it may refuse the save
                one.before_save()

    def _share(self, sharing: Sharing | None, extra: Mapping[str, Any], attached: Mapping[str, Content]) -> Share:
        return serialize(
            self.model if self._weights is None else self._weights(),
            self.checkpointables,
            extra,
            attached,
            self.only,
            grid=None if sharing is None else sharing.grid,
            held_before=() if sharing is None else sharing.held_before,
            names_from=self.model,
        )

    def _with_trained(self, files: Mapping[str, Writer], iteration: int | None) -> Mapping[str, Writer]:
        """``files`` with the tensors of model and optimizers from the last checkpoint."""
        # Not an optimizer's JSON file: its learning rates may have changed after the last step.
        states = {MODEL, *(name for name, item in self.checkpointables.items() if isinstance(item, Optimizer))}
        names = [name for name in files if state_of(name) in states]
        return self._writer.with_last(files, iteration, [*MODEL_FILES, *names])

    @property
    def _is_writer(self) -> bool:
        return self.save_to_disk and dist.is_main_process()

    def _read(self, path: Path, wanted: list[str]) -> "_Contents":
        """Verify and read a checkpoint on all ranks, with all files from the same save."""

        def identify(path: PathLike) -> tuple[Path, object]:
            folder, manifest = identity(path) if dist.is_main_process() else (Path(path), None)
            return dist.broadcast_object((folder, manifest and (manifest.sequence, manifest.saved_at)))

        return read_unchanged(path, lambda folder: self._read_once(folder, wanted), identify=identify)

    def _read_once(self, folder: Path, wanted: list[str]) -> "_Contents":
        with raised_together():
            own = model_state(self.model)
            is_shared = self._mesh() is not None or any(map(is_dtensor, own.values()))
        if self.mirror is not None and self._mesh() is not None:
            self.mirror.complete(folder)
        manifest = verify_together(folder)
        with raised_together():
            held = state_names(manifest)
            extra: dict[str, Any] = read_state(folder, manifest, EXTRA)
            weights = read_model_state(folder, manifest, own)
            states: dict[str, Any] = {}
            for name in (name for name in wanted if name in held):
                target = self.checkpointables[name]
                states[name] = read_state(folder, manifest, name, reads_tensors=not (is_shared and is_of_model(target)))
                check_state(states[name], target, str(folder / f"{name}.json"))
                if hasattr(target, "ranks_to_load"):
                    chosen = partial(target.ranks_to_load, states[name])
                    states[name] = {**states[name], "rank": read_states_of_ranks(folder, manifest, name, chosen)}
        if is_shared:
            weights = weights_of_stage(weights, own, self._mesh())
        return _Contents(held, extra, weights, states, is_shared or manifest.layout is not None)

    def _load_contents(
        self, path: Path, contents: "_Contents", wanted: list[str], *, strict: bool, partial: bool = True
    ) -> dict[str, Any]:
        held, weights, states = contents.held, contents.weights, contents.states
        with raised_together():
            missing = [name for name in wanted if name not in held]
            if missing == [TRAINING_WEIGHTS]:
                raise CheckpointError(
                    f"{path}: has no state of {TRAINING_WEIGHTS}, because it was saved without ema. Leave out ema, or"
                    " start a new run from its weights (init_weights_from, train.load_weight)."
                )
            if missing:
                raise CheckpointError(
                    f"{path}: has no state of {', '.join(missing)}; it holds {', '.join(held) or 'only the model'}. "
                    "To load only the weights, pass checkpointables=[]."
                )
        with raised_together():
            has_other_groups = contents.is_sharded or any(
                has_other_order(states[name], self.checkpointables[name], self.model) for name in wanted
            )
            load_weights(
                self.model, weights, str(path),
                strict=strict, only=self.only, partial=partial, is_resumed=bool(wanted),
            )  # fmt: skip
            for name in wanted:
                self._load_state(path, name, states.pop(name))
            for schedule in (self.checkpointables[name] for name in wanted if has_other_groups):
                if isinstance(schedule, LRScheduler):
                    use_own_rates(schedule)
        is_partial = not weights.keys() >= model_state(self.model).keys()
        if wanted and is_partial and isinstance(self.only, set):
            self.only.update(weights)  # trained before, although they may be frozen now
        if wanted:
            self.loaded_from = path, held
        return contents.extra

    def _load_state(self, path: Path, name: str, state: Any) -> None:
        try:
            target = self.checkpointables[name]
            groups = getattr(target, "param_groups", None)
            others: list[Any] = [
                one for one in self.checkpointables.values() if getattr(one, "param_groups", self) is groups
            ]
            same_state = sharing_state(target) if isinstance(target, Optimizer) else []
            others += [one for one in same_state if one.param_groups is groups]
            mesh = self._mesh()
            is_part = mesh is not None and PIPELINE in (mesh.mesh_dim_names or ())
            state = own_part(state, target, self.model, is_part=is_part)
            with without_compiler():
                load_state(target, state) if isinstance(target, Optimizer) else target.load_state_dict(state)
            if isinstance(target, Optimizer):
                for one in others:  # an optimizer in another one often has the same groups
                    if one.param_groups is not target.param_groups:  # as a read-only property they are the same
                        one.param_groups = target.param_groups
                for one in same_state:
                    one.state = target.state
                keep_possible_kernels(target)
        except Exception as error:
            error.add_note(f"While loading {name!r} from {path}.")
            raise


def _in_turn(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


class _Contents(NamedTuple):
    held: list[str]  # the names of its states
    extra: dict[str, Any]
    weights: dict[str, Any]
    states: dict[str, Any]  # the requested ones
    is_sharded: bool  # here or there


def _check_exists(path: Path) -> None:
    if not path.exists():
        names = checkpoint_names(path.parent)
        hint = did_you_mean(path.name, names) if names else f"There is no checkpoint in '{path.parent}'."
        raise MissingFileError(f"{path}: no such checkpoint. {hint}")

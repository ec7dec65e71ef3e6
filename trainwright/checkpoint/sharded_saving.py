"""Saving a sharded run: each process writes its own files, in one temporary folder that rank 0 commits.

A process saves its parts of the tensors, and its stage's part of the states. Writing runs in the writer thread of every
process. An error of any of them is raised in all, and nothing is committed.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import without_compiler
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
from trainwright.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, read_manifest
from trainwright.checkpoint.optimizer_state import by_name, numbered, with_names
from trainwright.checkpoint.safetensors_file import TensorFile
from trainwright.checkpoint.saving import (
    Committed,
    check_replaceable,
    committed_alike,
    entry_of,
    placed,
    write_files,
)
from trainwright.checkpoint.shard_index import shard_name
from trainwright.checkpoint.shards import Grid, StoredTensor, share_of
from trainwright.checkpoint.state_files import (
    EXTRA,
    MODEL,
    MODEL_EXTRA,
    Stateful,
    bytes_writer,
    completed,
    encode_state,
)
from trainwright.checkpoint.verify import file_faults
from trainwright.checkpoint.weights import split_model_state, unwrap
from trainwright.config.errors import MissingFileError
from trainwright.parallel import dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share:
    """The files that this process writes, and its stage's states, which rank 0 merges and writes."""

    files: Mapping[str, Writer]
    trees: dict[str, Any]  # {state: its encoded form}, on the first process of each stage


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


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the processes of a mesh need to save together."""

    mesh: "DeviceMesh"
    grid: Grid
    held_before: frozenset[str]  # names of weights that an earlier stage of a pipeline has too
    ranks: Ranks

    @classmethod
    def of(cls, mesh: "DeviceMesh", names: Iterable[str]) -> "Sharing":
        """``names``: those of the model's weights in this process. Every process must call this."""
        grid = Grid(mesh)
        all_names = dist.all_gather_object((grid.stage, [*names])) if grid.stages > 1 else []
        held_before = frozenset(name for stage, held in all_names if stage < grid.stage for name in held)
        return cls(mesh, grid, held_before, Ranks())


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
    try:
        entries = write_files(temporary, files, before, lambda name: entry_of(files[name]), syncs=True)
        for folder in {(temporary / name).parent for name in files}:
            sync_folder(folder)
    except OSError as error:
        known_error = named(error, path)
        known_error.add_note(f"Rank {dist.get_rank()} on {socket.gethostname()} could not write its share.")
        raise known_error from error
    return entries


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


def is_of_model(checkpointable: Any) -> bool:
    """Whether its state has a tensor per weight of the model, which is sharded like that weight."""
    return isinstance(checkpointable, Optimizer) or model_tensors_key(checkpointable) is not None


def model_tensors_key(checkpointable: Any) -> str | None:
    """The key of the state under which tensors have the names of the model's weights (`WeightAverage`)."""
    return getattr(checkpointable, "model_tensors", None)


def make_share(
    model: nn.Module,
    checkpointables: Mapping[str, Stateful],
    extra: Mapping[str, Any],
    attached: Mapping[str, bytes],
    only: Collection[str] | None,
    *,
    grid: Grid,
    held_before: Collection[str],
    names_from: nn.Module,
) -> Share:
    """The share of this process. Does not copy tensors.

    Args:
        held_before: the names of weights that an earlier stage of a pipeline has too, and writes.
        names_from: the module whose parameters the optimizers have.

    Raises:
        CheckpointTypeError: a state holds a value that a checkpoint cannot store.
    """
    weights, metadata, model_extra = split_model_state(model, only, is_sharded=True)
    weights = {name: tensor for name, tensor in weights.items() if name not in held_before}
    files: dict[str, Writer | None] = {_file(MODEL, grid): share_of(weights, metadata, grid)}
    trees: dict[str, Any] = {}
    with without_compiler():
        states = {name: checkpointable.state_dict() for name, checkpointable in checkpointables.items()}
    for name, state in [*states.items(), (MODEL_EXTRA, model_extra)]:
        checkpointable = checkpointables.get(name)
        if name == MODEL_EXTRA and not state:
            continue
        if name == MODEL_EXTRA or is_of_model(checkpointable):
            text, tensors = encode_state(_own(state, checkpointable, held_before, names_from), name, is_sharded=True)
            files[_file(name, grid)] = share_of(tensors, {}, grid)
            trees[name] = json.loads(text)
        else:
            text, tensors = encode_state(state, name)
            files |= {
                f"{name}.json": bytes_writer(text),
                f"{name}.safetensors": TensorFile(tensors) if tensors else None,
            }
    files[f"{EXTRA}.json"] = bytes_writer(encode_state(dict(extra), EXTRA)[0])
    files |= {name: bytes_writer(content) for name, content in attached.items()}
    is_own = (lambda name: True) if grid.rank == 0 else {_file(name, grid) for name in (MODEL, *trees)}.__contains__
    return Share(
        {name: writer for name, writer in files.items() if writer is not None and is_own(name)},
        trees if grid.is_first_of_stage else {},
    )


def _file(state: str, grid: Grid) -> str:
    return shard_name(state, grid.rank, grid.world_size)


def _own(state: Any, checkpointable: Any, held_before: Collection[str], names_from: nn.Module) -> Any:
    """A state with the names of weights, without those that an earlier stage writes."""
    if isinstance(checkpointable, Optimizer):
        state = by_name(with_names(state, checkpointable, names_from))
    key = "state" if isinstance(checkpointable, Optimizer) else model_tensors_key(checkpointable)
    if key is None:
        return state
    return {**state, key: {name: value for name, value in state[key].items() if name not in held_before}}


def own_part(state: Any, target: Any, model: nn.Module, *, is_part: bool) -> Any:
    """The state that ``target.load_state_dict`` takes, with this process's parts of its own tensors.

    ``is_part``: the model is a stage of the one in the checkpoint.
    """
    if isinstance(target, Optimizer):
        return numbered(state, target, model, is_part=is_part, read=_read_like if _has_stored(state) else None)
    key = model_tensors_key(target)
    if key is None or not isinstance(state, Mapping) or not isinstance(state.get(key), Mapping):
        return state
    stored = {name: value for name, value in state[key].items() if isinstance(value, StoredTensor)}
    if not stored:
        return state
    own = unwrap(model).state_dict()
    return {**completed({**state, key: None}), key: {n: t.like(own[n]) for n, t in stored.items() if n in own}}


def weights_of_stage(weights: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``weights`` without those that another stage of a pipeline has. Every process must call this."""
    names = dist.all_gather_object([*own])
    elsewhere = {name for held in names for name in held} - own.keys()
    return {name: value for name, value in weights.items() if name not in elsewhere}


def use_own_rates(schedule: Any) -> None:
    """Give a loaded schedule the rates of its own optimizer's groups, where the saved one had other groups."""
    groups = schedule.optimizer.param_groups
    for one in (schedule, *getattr(schedule, "_schedulers", ())):
        if hasattr(one, "base_lrs") and all("initial_lr" in group for group in groups):
            one.base_lrs = [group["initial_lr"] for group in groups]
    schedule._last_lr = [group["lr"] for group in groups]


def _has_stored(state: Any) -> bool:
    states = state.get("state", {}).values() if isinstance(state, Mapping) else ()
    return any(isinstance(value, StoredTensor) for values in states for value in values.values())


def _read_like(value: Any, parameter: Any) -> Any:
    return value.like(parameter) if isinstance(value, StoredTensor) else value


def merged(trees: list[Any]) -> Any:
    """One encoded state from those of the stages: their dicts united; where they differ, the first stage's value.

    >>> merged([{"a": 1, "b": {"x": 1}}, {"a": 2, "b": {"y": 2}}])
    {'a': 1, 'b': {'x': 1, 'y': 2}}
    """
    first = trees[0]
    if not isinstance(first, dict):
        return first
    others = [tree for tree in trees[1:] if isinstance(tree, dict)]
    keys = dict.fromkeys(key for tree in (first, *others) for key in tree)
    return {
        key: (_merged_groups if key == "param_groups" else merged)(
            [tree[key] for tree in (first, *others) if key in tree]
        )
        for key in keys
    }


def _merged_groups(groups_of_stages: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Groups of an optimizer with equal settings are one group, with the parameters of all stages."""
    result = [dict(group) for group in groups_of_stages[0]]
    for group in (group for groups in groups_of_stages[1:] for group in groups):
        same = next((known for known in result if _settings(known) == _settings(group)), None)
        if same is None:
            result.append(dict(group))
        else:
            same["params"] = list(dict.fromkeys([*same["params"], *group["params"]]))
    return result


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}

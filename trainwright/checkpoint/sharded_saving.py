"""What each process writes and reads of a checkpoint: all of it, or its share of a sharded run.

A process of a sharded run saves its parts of the tensors, and its stage's part of the states. Writing runs in the
writer thread of every process. An error of any of them is raised in all, and nothing is committed.
"""

import json
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import Writer, temporary_sibling
from trainwright.checkpoint.manifest import Manifest, read_manifest
from trainwright.checkpoint.optimizer_state import by_name, numbered, with_names
from trainwright.checkpoint.safetensors_file import TensorFile
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
from trainwright.checkpoint.weights import split_model_state
from trainwright.config.errors import MissingFileError
from trainwright.optim.named import parameters_of
from trainwright.parallel import dist
from trainwright.parallel.wrappers import model_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share:
    """The files that this process writes, and its stage's states, which rank 0 merges and writes."""

    files: Mapping[str, Writer]
    trees: dict[str, Any]  # {state: its encoded form}, on the first process of each stage


class Alone:
    """The exchanges of a process that writes everything."""

    def first(self, work: Callable[[], T]) -> T:
        """What ``work()`` returns on rank 0, on every rank. Its error is raised on every rank."""
        return work()

    def each(self, work: Callable[[], T]) -> list[T]:
        """What ``work()`` returns on every rank, by rank. An error of any rank is raised on every rank."""
        return [work()]


class Ranks(Alone):
    """Exchanges between the writer threads of all processes, on a process group of their own.

    Every process must create it, and call its methods in the same order.
    """

    def __init__(self) -> None:
        self._group = dist.new_cpu_group()

    def first(self, work: Callable[[], T]) -> T:
        results: list[Any] = self.each(work if dist.is_main_process() else lambda: None)
        result: T = results[0]
        return result

    def each(self, work: Callable[[], T]) -> list[T]:
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


def serialize(
    model: nn.Module,
    checkpointables: Mapping[str, Stateful],
    extra: Mapping[str, Any],
    attached: Mapping[str, bytes] | None = None,
    only: Collection[str] | None = None,
    *,
    grid: Grid | None = None,
    held_before: Collection[str] = (),
    names_from: nn.Module | None = None,
) -> Share:
    """What this process writes of a checkpoint. Does not copy tensors: a `TensorFile` reads them when it is called.

    Args:
        attached: additional files for people and other programs, without state.
        only: the names of the weights.
        grid: of the processes that write it together; None: this one writes all of it.
        held_before: the names of weights that an earlier stage of a pipeline has too, and writes.
        names_from: the module whose parameters the optimizers have, if ``model`` is an average of it.

    Raises:
        CheckpointTypeError: a state holds a value that a checkpoint cannot store.
    """
    weights, metadata, model_extra = split_model_state(model, only, is_sharded=grid is not None)
    with without_compiler():
        states = {name: checkpointable.state_dict() for name, checkpointable in checkpointables.items()}
    states |= {EXTRA: dict(extra), **({MODEL_EXTRA: model_extra} if model_extra else {})}
    files, shards, trees = dict[str, Writer](), dict[str, Writer](), dict[str, Any]()

    def add_tensors(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, is_split: bool) -> None:
        if grid is None or not is_split:
            files[f"{name}.safetensors"] = TensorFile(tensors, metadata)
        elif (part := share_of(tensors, metadata, grid)) is not None:
            shards[shard_name(name, grid.rank, grid.world_size)] = part

    weights = {name: tensor for name, tensor in weights.items() if name not in held_before}
    add_tensors(MODEL, weights, metadata, is_split=grid is not None)
    for name, state in states.items():
        checkpointable = checkpointables.get(name)
        if isinstance(checkpointable, Optimizer):
            state = with_names(state, checkpointable, model if names_from is None else names_from)
        is_split = grid is not None and (name == MODEL_EXTRA or is_of_model(checkpointable))
        state = _own(state, checkpointable, held_before) if is_split else state
        text, tensors = encode_state(state, name, is_sharded=is_split)
        if is_split:
            trees[name] = json.loads(text)
        else:
            files[f"{name}.json"] = bytes_writer(text)
        if tensors:
            add_tensors(name, tensors, {}, is_split=is_split)
    files |= {name: bytes_writer(content) for name, content in (attached or {}).items()}
    return Share(files, {}) if grid is None else _share_of_grid(grid, files, shards, trees)


def _share_of_grid(grid: Grid, files: dict[str, Writer], shards: dict[str, Writer], trees: dict[str, Any]) -> Share:
    """What one of several processes writes: its shards, and on the first one the files that are not divided."""
    return Share(shards | (files if grid.rank == 0 else {}), trees if grid.is_first_of_stage else {})


def _own(state: Any, checkpointable: Any, held_before: Collection[str]) -> Any:
    """A state with the names of weights, without those that an earlier stage writes."""
    if isinstance(checkpointable, Optimizer):
        state = by_name(state)
    key = "state" if isinstance(checkpointable, Optimizer) else model_tensors_key(checkpointable)
    if key is None:
        return state
    return {**state, key: {name: value for name, value in state[key].items() if name not in held_before}}


def own_part(state: Any, target: Any, model: nn.Module, *, is_part: bool) -> Any:
    """The state that ``target.load_state_dict`` takes, with this process's parts of its own tensors.

    ``is_part``: the model is a stage of the one in the checkpoint.
    """
    if isinstance(target, Optimizer):
        return _with_parts(numbered(state, target, model, is_part=is_part), target)
    key = model_tensors_key(target)
    if key is None or not isinstance(state, Mapping) or not isinstance(state.get(key), Mapping):
        return state
    stored = {name: value for name, value in state[key].items() if isinstance(value, StoredTensor)}
    if not stored:
        return state
    own = model_state(model)
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


def _with_parts(state: Any, optimizer: Optimizer) -> Any:
    """A numbered state with this process's part of each `StoredTensor`."""
    if not isinstance(state, Mapping) or "state" not in state:
        return state
    parameters = dict(enumerate(parameters_of(optimizer)))
    states = {
        number: {k: v.like(parameters.get(number)) if isinstance(v, StoredTensor) else v for k, v in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": states}


def merged_states(parts: list[dict[str, Any]]) -> dict[str, Writer]:
    """The JSON files of the states of all stages."""
    names = dict.fromkeys(name for trees in parts for name in trees)
    trees_of = {name: merged([trees[name] for trees in parts if name in trees]) for name in names}
    return {
        f"{name}.json": bytes_writer(json.dumps(tree, separators=(",", ":")).encode())
        for name, tree in trees_of.items()
    }


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

"""What each process writes and reads of a checkpoint: all of it, or its share of a sharded run.

A process of a sharded run saves its parts of the tensors, and its stage's part of the states. Writing runs in the
writer thread of every process. An error of any of them is raised in all, and nothing is committed.
"""

import functools
import json
import os
import pickle
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.base import dist
from trainwright.base.errors import MissingFileError
from trainwright.base.files import Content, Writer, make_folders, temporary_sibling
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.manifest import Manifest, read_manifest
from trainwright.checkpoint.optimizer_state import by_name, numbered, with_names
from trainwright.checkpoint.safetensors_file import TensorFile
from trainwright.checkpoint.safetensors_header import COPIES, TIED
from trainwright.checkpoint.shard_index import INDEX_NAME, OFFSETS, SHAPES, shard_name
from trainwright.checkpoint.shards import PIPELINE, Blocks, Grid, States, StoredTensor, index_file, share_of
from trainwright.checkpoint.state_files import (
    EXTRA,
    MODEL,
    MODEL_EXTRA,
    OF_RANKS,
    Stateful,
    bytes_writer,
    completed,
    encode_row,
    encode_state,
)
from trainwright.checkpoint.verify import file_faults
from trainwright.checkpoint.weights import split_model_state
from trainwright.optim.named import laid_out_as_parameters, parameters_of
from trainwright.parallel.wrappers import model_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_MIRROR_TIMEOUT = timedelta(days=1)  # of a process that waits until another one has uploaded its parts
_NAME_BYTES = 1024  # of a file name that rank 0 sends, with one before it


@dataclass(frozen=True, slots=True)
class Share:
    """What this process writes of a checkpoint."""

    files: Mapping[str, Writer]
    rows: Mapping[str, bytes]  # {state: what this process alone has of it}
    stage: "Stage | None" = None  # on the first process of each stage
    blocks: Blocks = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """What all processes of a pipeline stage have. Rank 0 merges those of the stages, and writes the result."""

    number: int
    trees: dict[str, Any]  # {state: its encoded form}
    states: States  # the tensors, as in the index
    metadata: dict[str, str]  # of the model's tensors

    @staticmethod
    def path(folder: Path, number: int) -> Path:
        """The file in which rank 0 finds it."""
        return folder / f"stage-{number}"

    def write(self, folder: Path) -> None:
        self.path(folder, self.number).write_text(json.dumps([self.trees, self.states, self.metadata]))


@dataclass(frozen=True, slots=True)
class Place:
    """How this process sees the folder of checkpoints.

    Attributes:
        is_shared: all processes see the same folder. Otherwise each host has the parts of its own processes, and a
            mirror has all of them.
        is_first: rank 0, and of each other folder the first process that sees it.
    """

    is_shared: bool = True
    is_first: bool = False

    @classmethod
    def of(cls, folder: Path) -> "Place":
        """Makes the folder. Every process must call this."""
        if dist.get_world_size() == 1:
            return cls(is_first=True)
        with ExitStack() as stack:
            with dist.raised_together():
                token = temporary_sibling(folder / "seen-by-all")
                if dist.is_main_process():
                    make_folders(folder)
                    token.touch()
                    stack.callback(token.unlink, missing_ok=True)
            name = dist.broadcast_object(token.name)
            # A listing: network filesystems may remember for a while that a single name did not exist.
            sees = folder.is_dir() and name in os.listdir(folder)
            found = dist.all_gather_object((socket.gethostname(), sees))
        rank, own = dist.get_rank(), found[dist.get_rank()]
        return cls(all(one for _, one in found), rank == 0 or (not sees and found.index(own) == rank))


class Exchange:
    """The exchanges of a process that writes everything."""

    def first(self, work: Callable[[], str]) -> str:
        """The file name that ``work()`` returns on rank 0, on every rank. Its error is raised on every rank."""
        return work()

    def each(self, work: Callable[[], T]) -> list[T]:
        """What ``work()`` returns on every rank, by rank, on rank 0. An error of any rank is raised on every rank."""
        return [work()]

    def to_all(self, content: bytes) -> bytes:
        """Rank 0's content on every rank."""
        return content


class RankExchange(Exchange):
    """Exchanges between the writer threads of all processes, on a process group of their own.

    Every process must create it, and call its methods in the same order. ``timeout``: how long one waits for another;
    None: the default of torch.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._group = dist.new_cpu_group(timeout)

    def first(self, work: Callable[[], str]) -> str:
        name, error = _attempted(work if dist.is_main_process() else str)
        line = bytes([error is not None]) + os.fsencode(name or "")
        sent = torch.frombuffer(bytearray(line.ljust(_NAME_BYTES, b"\0")), dtype=torch.uint8)
        torch.distributed.broadcast(sent, 0, self._group)
        if sent[0]:
            self._raise(error)
        return os.fsdecode(sent[1:].numpy().tobytes().rstrip(b"\0"))

    def each(self, work: Callable[[], T]) -> list[T]:
        result, error = _attempted(lambda: pickle.dumps(work()))
        content = result or b""
        is_failed, size = dist.largest(error is not None, len(content), group=self._group)
        if is_failed:
            self._raise(error)
        return [pickle.loads(one) for one in dist.gather_content(content, size, self._group)]

    def to_all(self, content: bytes) -> bytes:
        (size,) = dist.largest(len(content) if dist.is_main_process() else 0, group=self._group)
        if size == 0:
            return b""
        sent = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
        torch.distributed.broadcast(sent, 0, self._group)
        return sent.numpy().tobytes()

    def _raise(self, error: BaseException | None) -> None:
        seen = dist.all_gather_object(None if error is None else dist.portable(error), self._group)
        for rank, other in enumerate(seen):
            if other is not None:
                raise other if error is None or rank != dist.get_rank() else error


def _attempted(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def gathered_rows(content: bytes, size: int) -> list[bytes]:
    """The content of every rank with zeros up to ``size``, by rank, on rank 0; nothing elsewhere."""
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return [row.cpu().numpy().tobytes() for row in dist.gather_bytes(sent, size)]


def with_rows(share: Share, size: int, grid: Grid | None) -> Share:
    """``share`` with the rows of ``size`` bytes in files. Where rank 0 writes alone, all ranks send it theirs."""
    files, blocks = dict(share.files), dict(share.blocks)
    for name, row in share.rows.items():
        state = f"{name}{OF_RANKS}"
        if grid is None:
            rows = gathered_rows(row, size)
            files |= {f"{state}.safetensors": TensorFile({"rows": _as_tensor(rows)})} if rows else {}
            continue
        shape, place = [grid.world_size, size], {"rows": {"saved_offsets": [grid.rank, 0]}}
        metadata = {OFFSETS: json.dumps(place), SHAPES: json.dumps({"rows": shape})}
        part = TensorFile({"rows": _as_tensor([row.ljust(size, b"\0")])}, metadata)
        files[shard_name(state, grid.rank, grid.world_size)] = part
        blocks[OF_RANKS] = (grid.rank, 0), (1, size)
        if grid.rank == 0 and share.stage is not None:
            share.stage.states[state] = {"rows": ("U8", shape, OF_RANKS)}
    return replace(share, files=files, blocks=blocks)


def _as_tensor(rows: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).reshape(len(rows), -1)


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the processes of a mesh need to save together."""

    mesh: "DeviceMesh"
    grid: Grid
    held_before: frozenset[str]  # names of weights that an earlier stage of a pipeline has too
    ranks: RankExchange
    ranks_of_mirror: RankExchange | None  # for its own thread
    place: Place

    @classmethod
    def of(cls, mesh: "DeviceMesh", names: Iterable[str], mirrored: Path | None = None) -> "Sharing":
        """``names``: those of the model's weights in this process. Every process must call this.

        ``mirrored``: the folder of checkpoints, if these have a mirror.
        """
        grid = Grid(mesh)
        before = names_of_stages(mesh, names)[: grid.stage]
        return cls(
            mesh,
            grid,
            frozenset(name for held in before for name in held),
            RankExchange(),
            None if mirrored is None else RankExchange(_MIRROR_TIMEOUT),
            Place() if mirrored is None else Place.of(mirrored),
        )


def names_of_stages(mesh: "DeviceMesh | None", names: Iterable[str]) -> list[list[str]]:
    """``names`` of each stage of this process's pipeline, by stage; none without one. Every process must call this."""
    if mesh is None or PIPELINE not in (mesh.mesh_dim_names or ()):
        return []
    return dist.all_gather_object([*names], mesh.get_group(PIPELINE))


def check_is_shared(folder: Path) -> None:
    """Check that every process sees the same ``folder``. Every process must call it.

    Raises:
        CheckpointError: a process does not see a file that rank 0 has created in it. Raised on every process.
    """
    with ExitStack() as stack:
        with dist.raised_together():
            created = None
            if dist.is_main_process():
                make_folders(folder)
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
        OSError: a file cannot be read now. Raised on every process.
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
    with dist.raised_together():
        faults, _ = file_faults(folder, replace(manifest, files=own))
    if dist.is_any(bool(faults)):
        faults = [fault for of_rank in dist.all_gather_object(faults) for fault in of_rank]
        raise CheckpointError("\n".join([f"{folder}: is damaged.", *(f"  {fault}" for fault in faults)]))
    return manifest


def is_of_model(checkpointable: Any) -> bool:
    """Whether its state has a tensor per weight of the model, which is sharded like that weight."""
    return isinstance(checkpointable, Optimizer) or bool(model_tensor_keys(checkpointable))


def model_tensor_keys(checkpointable: Any) -> tuple[str, ...]:
    """The keys of the state under which tensors have the names of the model's weights (`WeightAverage`)."""
    return getattr(checkpointable, "model_tensors", ())


def serialize(
    model: nn.Module,
    checkpointables: Mapping[str, Stateful],
    extra: Mapping[str, Any],
    attached: Mapping[str, Content] | None = None,
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
    rows, split = _rows_taken_from(states, checkpointables), dict[str, Mapping[str, Tensor]]()

    def add_tensors(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, is_split: bool) -> None:
        if grid is None or not is_split:
            files[f"{name}.safetensors"] = TensorFile(tensors, metadata)
            return
        split[name] = tensors
        if (part := share_of(tensors, metadata, grid)) is not None:
            shards[shard_name(name, grid.rank, grid.world_size)] = part

    weights = {name: tensor for name, tensor in weights.items() if name not in held_before}
    add_tensors(MODEL, weights, metadata, is_split=grid is not None)
    for name, state in states.items():
        checkpointable = checkpointables.get(name)
        if isinstance(checkpointable, Optimizer):
            state = with_names(state, checkpointable, model if names_from is None else names_from)
        is_split = grid is not None and (name == MODEL_EXTRA or is_of_model(checkpointable))
        state = _own(state, checkpointable, held_before) if is_split else state
        known = laid_out_as_parameters(checkpointable) if isinstance(checkpointable, Optimizer) else ()
        text, tensors = encode_state(state, name, is_sharded=is_split, without_layout=known)
        if is_split:
            trees[name] = json.loads(text)
        else:
            files[f"{name}.json"] = bytes_writer(text)
        if tensors:
            add_tensors(name, tensors, {}, is_split=is_split)
    files |= {name: _attachment(content) for name, content in (attached or {}).items()}
    return Share(files, rows) if grid is None else _share_of_grid(grid, files, shards, rows, trees, split, metadata)


def _attachment(content: Content) -> Writer:
    if not callable(content):
        return bytes_writer(content)
    made = functools.cache(content)  # a file is measured and written
    return lambda file: file.write(made())


def _share_of_grid(
    grid: Grid,
    files: dict[str, Writer],
    shards: dict[str, Writer],
    rows: dict[str, bytes],
    trees: dict[str, Any],
    split: Mapping[str, Mapping[str, Tensor]],
    metadata: dict[str, str],
) -> Share:
    """What one of several processes writes: its shards, and on the first one the files that are not divided."""
    stage = Stage(grid.stage, trees, grid.in_index(split), metadata) if grid.is_first_of_stage else None
    return Share(shards | (files if grid.rank == 0 else {}), rows, stage, grid.blocks())


def _rows_taken_from(states: dict[str, Any], checkpointables: Mapping[str, Stateful]) -> dict[str, bytes]:
    """What of the states belongs to this process alone, which ``states`` lacks afterwards."""
    names = [name for name, one in checkpointables.items() if hasattr(one, "ranks_to_load")]
    rows = {name: encode_row(states[name]["rank"], name) for name in names}
    states |= {name: {**states[name], "rank": None} for name in names}
    return rows


def _own(state: Any, checkpointable: Any, held_before: Collection[str]) -> Any:
    """A state with the names of weights, without those that an earlier stage writes."""
    if isinstance(checkpointable, Optimizer):
        state = by_name(state)
    keys = ("state",) if isinstance(checkpointable, Optimizer) else model_tensor_keys(checkpointable)
    own = {key: {name: value for name, value in state[key].items() if name not in held_before} for key in keys}
    return {**state, **own} if own else state


def own_part(state: Any, target: Any, model: nn.Module, *, is_part: bool) -> Any:
    """The state that ``target.load_state_dict`` takes, with this process's parts of its own tensors.

    ``is_part``: the model is a stage of the one in the checkpoint.
    """
    if isinstance(target, Optimizer):
        return _with_parts(numbered(state, target, model, is_part=is_part), target)
    keys = model_tensor_keys(target)
    if not keys or not isinstance(state, Mapping):
        return state
    stored = {
        key: {name: value for name, value in state[key].items() if isinstance(value, StoredTensor)}
        for key in keys
        if isinstance(state.get(key), Mapping)
    }
    if not any(stored.values()):
        return state
    own = model_state(model)
    parts = {key: {n: t.like(own[n]) for n, t in tensors.items() if n in own} for key, tensors in stored.items()}
    return {**completed({**state, **dict.fromkeys(stored)}), **parts}


def weights_of_stage(weights: dict[str, Any], own: Mapping[str, Any], mesh: "DeviceMesh | None") -> dict[str, Any]:
    """``weights`` without those that another stage of a pipeline has. Every process must call this."""
    elsewhere = {name for held in names_of_stages(mesh, own) for name in held} - own.keys()
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


def files_of_all(folder: Path, blocks: Sequence[Blocks], stages: int) -> dict[str, Writer]:
    """The JSON files of the states, and the index, from what all processes and the stages have left in ``folder``.

    Raises:
        CheckpointError: a value of a tensor is in no block, or in several.
    """
    trees, states, metadata = list[dict[str, Any]](), States(), dict[str, dict[str, str]]()
    for path in (Stage.path(folder, number) for number in range(stages)):
        own_trees, own_states, own_metadata = json.loads(path.read_bytes())
        path.unlink()
        trees.append(own_trees)
        for name, tensors in own_states.items():
            states.setdefault(name, {}).update(tensors)
        for key in own_metadata.keys() & {TIED, COPIES}:
            metadata.setdefault(key, {}).update(json.loads(own_metadata[key]))
    found = {
        name: merged([of_stage[name] for of_stage in trees if name in of_stage])
        for name in dict.fromkeys(name for of_stage in trees for name in of_stage)
    }
    texts = {name: json.dumps(tree, separators=(",", ":")).encode() for name, tree in found.items()}
    index = index_file(blocks, states, {key: json.dumps(names) for key, names in metadata.items()})
    return {**{f"{name}.json": bytes_writer(text) for name, text in texts.items()}, INDEX_NAME: index}


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

"""Parts of tensors: which part this process writes, and which parts of the files it reads. No process asks another."""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from trainwright._torch_compat.tensor_chunks import chunk_of, is_dtensor, with_chunk
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, MappedTensors, TensorFile
from trainwright.checkpoint.shard_index import OFFSETS, SHAPES, STATES, Index, IndexEntry, read_index, writer_among

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE = "pp"  # the dimension of a mesh along which processes hold different modules


class Division(NamedTuple):
    """How a tensor is divided."""

    key: str  # equal on the processes of a stage
    offset: tuple[int, ...]  # of this process's block
    shape: tuple[int, ...]
    holders: list[int]  # the processes with an equal block


class Grid:
    """This process's place among all processes, to decide which of several equal parts it writes.

    Processes with the same place along the dimension "pp" have the same modules.
    """

    def __init__(self, mesh: "DeviceMesh") -> None:
        names = mesh.mesh_dim_names or ()
        self.sizes = dict(zip(names, mesh.shape, strict=True))
        self.stages = self.sizes.get(PIPELINE, 1)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise CheckpointError("Checkpointer.mesh: this process is not in it; it must hold all processes.")
        place = dict(zip(names, coordinate, strict=True))
        self.stage = place.get(PIPELINE, 0)
        self.rank, self.world_size = mesh.get_rank(), mesh.mesh.numel()
        stage = mesh.mesh.select(names.index(PIPELINE), self.stage) if PIPELINE in names else mesh.mesh
        self._ranks: list[int] = stage.flatten().tolist()
        # This process writes what all processes of its stage have, apart from tensors.
        self.is_first_of_stage = self.rank == self._ranks[0]
        self._places = dict(zip(self._ranks, itertools.product(*map(range, stage.shape)), strict=True))
        self._divisions: dict[Any, Division] = {}

    def division_of(self, tensor: Any) -> Division:
        """How a tensor is divided over the processes of this stage. Computed once for all tensors of a shape."""
        known = (tensor.device_mesh, tensor.placements, tensor.shape) if is_dtensor(tensor) else tensor.shape
        if known not in self._divisions:
            self._divisions[known] = self._new_division(tensor)
        return self._divisions[known]

    def blocks(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offset and shape of this process's block in each division, by its key."""
        return {one.key: (one.offset, one.shape) for one in self._divisions.values() if math.prod(one.shape)}

    def in_index(self, states: Mapping[str, Mapping[str, Tensor]]) -> "States":
        """The tensors of each state as the index has them."""
        return {
            state: {
                name: (DTYPE_NAMES[t.dtype], tuple(t.shape), self.division_of(t).key) for name, t in tensors.items()
            }
            for state, tensors in states.items()
        }

    def _new_division(self, tensor: Any) -> Division:
        shape = tuple(tensor.shape)
        if not is_dtensor(tensor):
            return Division(self._key(shape), (0,) * len(shape), shape, self._ranks)
        offset, local = chunk_of(tensor)
        mesh: DeviceMesh = tensor.device_mesh
        ranks = mesh.mesh.flatten().tolist()
        steps = [rank - ranks[0] for rank in ranks]  # alike in the meshes of one kind
        key = self._key(shape, tensor.placements, tuple(mesh.shape), steps)
        return Division(key, offset, tuple(local.shape), self._holders(tensor))

    def _key(self, *parts: Any) -> str:
        return f"{self.stage}.{xxhash.xxh3_64_hexdigest(repr(parts).encode())}"

    def _holders(self, tensor: Any) -> list[int]:
        """The processes with the same part of a DTensor as this one."""
        mesh, placements = tensor.device_mesh, tensor.placements
        at = mesh.get_coordinate()
        index = tuple(
            slice(None) if placement.is_replicate() else place for placement, place in zip(placements, at, strict=True)
        )
        spanned = [self._places[rank] for rank in mesh.mesh.flatten().tolist()]
        equal = {self._places[rank] for rank in mesh.mesh[index].flatten().tolist()}
        # The tensor's mesh may span only some dimensions: along the others every process has its own copy.
        fixed = [dim for dim in range(len(spanned[0])) if len({place[dim] for place in spanned}) > 1]
        wanted = {tuple(place[dim] for dim in fixed) for place in equal}
        return [rank for rank in self._ranks if tuple(self._places[rank][dim] for dim in fixed) in wanted]


def share_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], grid: Grid) -> TensorFile | None:
    """The file with the parts that this process writes; None if it writes none."""
    parts: dict[str, Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        division = grid.division_of(tensor)
        if writer_among(division.holders, name) != grid.rank:
            continue
        local = chunk_of(tensor)[1] if is_dtensor(tensor) else tensor
        if local.numel() or not math.prod(tensor.shape):
            parts[name], offsets[name] = local, {"saved_offsets": list(division.offset)}
    if not parts:
        return None
    shapes = {name: list(tensors[name].shape) for name in parts}
    return TensorFile(parts, {**metadata, OFFSETS: json.dumps(offsets), SHAPES: json.dumps(shapes)})


Blocks = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # as of Grid.blocks
States = dict[str, dict[str, tuple[str, Sequence[int], str]]]  # {state: {name: (dtype, shape, key of division)}}


def index_file(blocks: Sequence[Blocks], states: States, metadata: Mapping[str, str]) -> TensorFile:
    """The index of a checkpoint, from the blocks of every process.

    Raises:
        CheckpointError: a value of a tensor is in no block, or in several.
    """
    ranks = defaultdict[str, defaultdict[Any, list[int]]](lambda: defaultdict(list))
    for rank, own in enumerate(blocks):
        for key, (offset, sizes) in own.items():
            ranks[key][(*offset, *sizes)].append(rank)
    tables: dict[str, Tensor] = {}
    for state, tensors in states.items():
        for name, (dtype, shape, key) in tensors.items():
            if key in tables:
                continue
            width = max(map(len, ranks[key].values()), default=1)
            rows = [[*block, *own, *[-1] * (width - len(own))] for block, own in sorted(ranks[key].items())]
            table = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), 2 * len(shape) + width)
            tables[key] = table
            if not IndexEntry(name, (*shape,), dtype, table.detach, str).has_each_value_once():
                raise CheckpointError(f"{state}: {name}: the parts of the processes do not hold each value once.")
    return TensorFile(tables, {**metadata, STATES: json.dumps(states), "world_size": str(len(blocks))})


def with_memory_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The values of a tensor, with its dimensions in this order in memory."""
    inverse = sorted(range(len(order)), key=lambda dim: order[dim])
    return tensor.permute(*order).contiguous().permute(*inverse)


class StoredTensor:
    """A tensor in the files of a checkpoint, which is not read yet."""

    _order: Sequence[int] | None = None  # of its dimensions in memory

    def __init__(self, reader: "ShardReader", name: str, entry: IndexEntry) -> None:
        self.reader, self._name, self.entry = reader, name, entry
        if entry.dtype not in DTYPES:
            file = next((part.file for part in entry.parts((0,) * len(entry.shape), entry.shape)), "")
            raise CheckpointError(
                f"{reader.folder / file}: not a safetensors file that can be read ({name!r} has the dtype"
                f" {entry.dtype!r}, expected one of {', '.join(sorted(DTYPES))})."
            )
        self.shape, self.dtype = torch.Size(entry.shape), DTYPES[entry.dtype]

    def open(self, own: Any) -> None:
        """Open the files that ``like(own)`` reads."""
        offset, shape = (0,) * len(self.shape), tuple(self.shape)
        if is_dtensor(own) and own.shape == self.shape:
            offset, local = chunk_of(own)
            shape = tuple(local.shape)
        for part in self.entry.parts(offset, shape):
            self.reader.open(part.file)

    def like(self, own: Any, *, is_mapped: bool = False) -> Tensor:
        """This process's part as a DTensor like ``own``; the complete tensor if ``own`` is not one of this shape.

        ``is_mapped``: in the memory of the file, if one file has all of it; ``reader.release()`` frees what was used.
        """
        if not is_dtensor(own) or own.shape != self.shape:
            return self.whole(is_mapped=is_mapped)
        offset, local = chunk_of(own)
        return with_chunk(own, self.block(offset, tuple(local.shape), is_mapped=is_mapped))

    def with_memory_order(self, order: Sequence[int]) -> "StoredTensor":
        """The same tensor, whose dimensions will have this order in memory where all of it is read."""
        other = StoredTensor(self.reader, self._name, self.entry)
        other._order = order
        return other

    def whole(self, *, is_mapped: bool = False) -> Tensor:
        """All values, on the CPU."""
        block = self.block((0,) * len(self.shape), tuple(self.shape), is_mapped=is_mapped)
        return block if self._order is None else with_memory_order(block, self._order)

    def meta(self) -> Tensor:
        """A tensor of the same shape and dtype without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    clone = whole

    def numpy(self) -> Any:
        """All values as an array."""
        return self.whole().numpy()

    def block(self, offset: tuple[int, ...], shape: tuple[int, ...], *, is_mapped: bool = False) -> Tensor:
        """The values of a block, from the files with parts of it."""
        parts = [(part.file, part.overlap(offset, shape)) for part in self.entry.parts(offset, shape)]
        found = [(file, *places) for file, places in parts if places is not None]
        if is_mapped and len(found) == 1:
            file, here, _ = found[0]
            return self.reader.tensor(file, self._name)[here]
        block = torch.empty(shape, dtype=self.dtype, device="cpu")
        for file, here, there in found if block.numel() else ():
            block[there].copy_(self.reader.tensor(file, self._name)[here])
            self.reader.release()
        return block


class ShardReader:
    """The tensors of one state in the files of a checkpoint, which are opened at the first use."""

    def __init__(self, folder: Path, state: str | None, files: Collection[str]) -> None:
        """``files``: those of the checkpoint, such as ``manifest.files``; ``state`` None: all have complete tensors."""
        self.folder, self._state, self._files = folder, state, files
        self._open: dict[str, MappedTensors] = {}

    @cached_property
    def index(self) -> Index:
        """Which parts are in which files."""
        return read_index(self.folder, self._state, self._files)

    def stored(self) -> dict[str, StoredTensor]:
        """The tensors by name, tied ones under each of their names."""
        index = self.index
        found = {name: StoredTensor(self, name, entry) for name, entry in index.tensors.items()}
        return {**found, **{name: found[first] for name, first in index.tied.items() if first in found}}

    def tensor(self, file: str, name: str) -> Tensor:
        """A tensor of one file, in whose memory it is."""
        self.open(file)
        return self._open[file].get_tensor(name)

    def release(self) -> None:
        """Free the memory of what was used of the files; it is read again where it is used again."""
        for one in self._open.values():
            one.release()

    def open(self, file: str) -> None:
        """Open a file, which may be deleted from then on."""
        if file not in self._open:
            self._open[file] = MappedTensors(self.folder / file)

"""Parts of tensors: which part this process writes, and which parts of the files it reads. No process asks another."""

import itertools
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright._torch_compat.tensor_chunks import chunk_of, is_dtensor, with_chunk
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.safetensors_file import DTYPES, MappedTensors, TensorFile
from trainwright.checkpoint.shard_index import OFFSETS, SHAPES, Index, IndexEntry, read_index

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE = "pp"  # the dimension of a mesh along which processes hold different modules


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
        self._places = dict(zip(self._ranks, itertools.product(*map(range, stage.shape)), strict=True))
        self._writers: dict[Any, list[int]] = {}

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this process writes what all processes of its stage have, apart from tensors."""
        return self.rank == self._ranks[0]

    def writes(self, name: str, tensor: Tensor) -> bool:
        """Whether this process writes its part of ``tensor``. Equal parts are spread over their processes by name."""
        holders = self._holders(tensor) if is_dtensor(tensor) else self._ranks
        return holders[zlib.crc32(name.encode()) % len(holders)] == self.rank

    def _holders(self, tensor: Any) -> list[int]:
        """The processes with the same part of a DTensor as this one."""
        mesh, placements = tensor.device_mesh, tensor.placements
        key = (mesh, placements)
        if key not in self._writers:
            at = mesh.get_coordinate()
            index = tuple(
                slice(None) if placement.is_replicate() else place
                for placement, place in zip(placements, at, strict=True)
            )
            spanned = [self._places[rank] for rank in mesh.mesh.flatten().tolist()]
            equal = {self._places[rank] for rank in mesh.mesh[index].flatten().tolist()}
            # The tensor's mesh may span only some dimensions: along the others every process has its own copy.
            dims = range(len(spanned[0]))
            fixed = [dim for dim in dims if len({place[dim] for place in spanned}) > 1]
            wanted = {tuple(place[dim] for dim in fixed) for place in equal}
            self._writers[key] = [
                rank for rank in self._ranks if tuple(self._places[rank][dim] for dim in fixed) in wanted
            ]
        return self._writers[key]


def part_of(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """The offset and the values of what this process has of a tensor."""
    return chunk_of(tensor) if is_dtensor(tensor) else ((0,) * tensor.dim(), tensor)


def share_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], grid: Grid) -> TensorFile | None:
    """The file with the parts that this process writes; None if it writes none."""
    parts: dict[str, Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        offset, local = part_of(tensor)
        if grid.writes(name, tensor) and (local.numel() or not math.prod(tensor.shape)):
            parts[name], offsets[name] = local, {"saved_offsets": list(offset)}
    if not parts:
        return None
    shapes = {name: list(tensors[name].shape) for name in parts}
    return TensorFile(parts, {**metadata, OFFSETS: json.dumps(offsets), SHAPES: json.dumps(shapes)})


class StoredTensor:
    """A tensor in the files of a checkpoint, which is not read yet."""

    def __init__(self, reader: "ShardReader", name: str, entry: IndexEntry) -> None:
        self._reader, self._name, self._entry = reader, name, entry
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{reader.path_of(entry)}: not a safetensors file that can be read ({name!r} has the dtype"
                f" {entry.dtype!r}, expected one of {', '.join(sorted(DTYPES))})."
            )
        self.shape, self.dtype = torch.Size(entry.shape), DTYPES[entry.dtype]

    def open(self, own: Any) -> None:
        """Open the files that ``like(own)`` reads."""
        offset, shape = (0,) * len(self.shape), tuple(self.shape)
        if is_dtensor(own) and own.shape == self.shape:
            offset, local = part_of(own)
            shape = tuple(local.shape)
        for part in self._entry.parts:
            if part.overlap(offset, shape) is not None:
                self._reader.open(part.file)

    def like(self, own: Any) -> Tensor:
        """This process's part as a DTensor like ``own``; the complete tensor if ``own`` is not one of this shape."""
        if not is_dtensor(own) or own.shape != self.shape:
            return self.whole()
        offset, local = part_of(own)
        return with_chunk(own, self._block(offset, tuple(local.shape)))

    def whole(self) -> Tensor:
        """All values, on the CPU."""
        return self._block((0,) * len(self.shape), tuple(self.shape))

    def mapped(self) -> Tensor:
        """All values, in the memory of the file if one file has them."""
        part = self._entry.parts[0]
        return self._reader.tensor(part.file, self._name) if part.shape == self.shape else self.whole()

    def meta(self) -> Tensor:
        """A tensor of the same shape and dtype without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    clone = whole

    def numpy(self) -> Any:
        """All values as an array."""
        return self.whole().numpy()

    def _block(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        block = torch.empty(shape, dtype=self.dtype, device="cpu")
        if not block.numel():
            return block
        for part in self._entry.parts:
            if (places := part.overlap(offset, shape)) is not None:
                here, there = places
                block[there].copy_(self._reader.tensor(part.file, self._name)[here])
        return block


class ShardReader:
    """The tensors of one state in the files of a checkpoint, which are opened at the first use."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._folder, self._files = folder, [*files]
        self._open: dict[str, MappedTensors] = {}
        self._latest: MappedTensors | None = None  # whose tensor was read last

    @cached_property
    def index(self) -> Index:
        """What the headers of the files say."""
        return read_index(self._folder, self._files)

    def stored(self) -> dict[str, StoredTensor]:
        """The tensors by name, tied ones under each of their names."""
        index = self.index
        found = {name: StoredTensor(self, name, entry) for name, entry in index.tensors.items()}
        return {**found, **{name: found[first] for name, first in index.tied.items() if first in found}}

    def path_of(self, entry: IndexEntry) -> Path:
        """The first file with values of a tensor."""
        return self._folder / entry.parts[0].file

    def tensor(self, file: str, name: str) -> Tensor:
        """A tensor of one file; its memory is that of the file, and freed where the next one is read."""
        if self._latest is not None:
            self._latest.release()
        self.open(file)
        self._latest = self._open[file]
        return self._latest.get_tensor(name)

    def open(self, file: str) -> None:
        """Open a file, which may be deleted from then on."""
        if file not in self._open:
            self._open[file] = MappedTensors(self._folder / file)

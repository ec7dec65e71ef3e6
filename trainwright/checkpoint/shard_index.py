"""Which part of which tensor is in which file of a checkpoint.

Process 3 of a sharded run of 8 writes ``model-00003-of-00008.safetensors``, with its parts of the tensors. The header
has the offset of each part under the key of torch's distributed checkpoints, whose reader can open the files too.

One more file, ``shards.index``, says where the parts are, so that a process opens only the files that it needs. Tensors
of one shape are divided alike, so it has a table for each layout and not for each tensor. A row is a block: its offset,
its shape, and the processes that have it (-1: none). One of these writes it; which one follows from the tensor's name.
The file has the format of safetensors.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any  # Any: a table is a tensor; torch is loaded only to read one
from zlib import crc32

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.safetensors_header import COPIES, TIED, Header, names_in, read_header

INDEX_NAME = "shards.index"
STATES = "states"  # metadata key of the index: JSON of {state: {name: [dtype, shape, table]}}
OFFSETS = "DCP_SHARDING_INFO"  # metadata key: JSON of {name: {"saved_offsets": [...]}}, as torch writes it
SHAPES = "shapes"  # metadata key: JSON of {name: shape of the complete tensor}
_FILE = re.compile(r"(?P<state>.+?)(-\d{5,}-of-\d{5,})?\.safetensors", re.DOTALL)


def shard_name(state: str, rank: int, world_size: int) -> str:
    """
    >>> shard_name("model", 3, 8)
    'model-00003-of-00008.safetensors'
    """
    return f"{state}-{rank:05d}-of-{world_size:05d}.safetensors"


def state_of(name: str) -> str | None:
    """The state whose tensors are in a file, or a part of them; None for another file.

    >>> state_of("model-00003-of-00008.safetensors"), state_of("model.safetensors"), state_of("model.json")
    ('model', 'model', None)
    """
    match = _FILE.fullmatch(name)
    return None if match is None else match["state"]


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor in a file."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(
        self, offset: Sequence[int], shape: Sequence[int]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Which values of this part belong to another block, and their places in that block; None if there are none."""
        begin = [max(mine, other) for mine, other in zip(self.offset, offset, strict=True)]
        end = [
            min(mine + size, other + length)
            for mine, size, other, length in zip(self.offset, self.shape, offset, shape, strict=True)
        ]
        if any(first >= last for first, last in zip(begin, end, strict=True)):
            return None
        here, there = (
            tuple(slice(first - base, last - base) for first, last, base in zip(begin, end, bases, strict=True))
            for bases in (self.offset, offset)
        )
        return here, there


def writer_among(holders: Sequence[int], name: str) -> int:
    """Which of the processes with an equal part of the tensor ``name`` writes it."""
    return holders[crc32(name.encode()) % len(holders)]


@dataclass(frozen=True)
class IndexEntry:
    """A complete tensor. ``dtype`` is the name in the file format, such as ``BF16``.

    Attributes:
        read_table: returns the blocks of its layout.
        file_of: the file of a process.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read_table: Callable[[], Any]
    file_of: Callable[[int], str]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def _table(self) -> Any:
        return self.read_table()

    def parts(self, offset: Sequence[int], shape: Sequence[int]) -> list[Part]:
        """The parts with values of a block."""
        dim, table = len(self.shape), self._table
        begin, sizes = table[:, :dim], table[:, dim : 2 * dim]
        end = begin.new_tensor([first + size for first, size in zip(offset, shape, strict=True)])
        is_met = ((begin < end) & (begin + sizes > begin.new_tensor(offset))).all(1)
        return [self._part(row) for row in table[is_met].tolist()]

    def has_each_value_once(self) -> bool:
        """Whether the parts hold each value once."""
        parts = [self._part(row) for row in self._table.tolist()]
        ranges = [tuple((b, b + size) for b, size in zip(part.offset, part.shape, strict=True)) for part in parts]
        return self.num_values == 0 or _fills(ranges, self.shape)

    def _part(self, row: list[int]) -> Part:
        dim = len(self.shape)
        holders = [rank for rank in row[2 * dim :] if rank >= 0]
        return Part(self.file_of(writer_among(holders, self.name)), (*row[:dim],), (*row[dim : 2 * dim],))


@dataclass(frozen=True, slots=True)
class Index:
    """The tensors of one state."""

    tensors: dict[str, IndexEntry]
    tied: dict[str, str]  # {name that is in no file: name that holds the same tensor}
    copies: dict[str, str]  # {name of a copy on another pipeline stage: name of the tensor that it repeats}


def read_index(folder: Path, state: str | None, files: Collection[str]) -> Index:
    """The tensors of a state of a checkpoint with these ``files``; None: of files with complete tensors.

    Raises:
        CheckpointError: the index or a header cannot be read, or a tensor is there twice.
    """
    if state is None or f"{state}.safetensors" in files:
        index = Index({}, {}, {})
        for file in files if state is None else [f"{state}.safetensors"]:
            _add_file(index, folder, file)
        return index
    if INDEX_NAME not in files:
        return Index({}, {}, {})
    path = folder / INDEX_NAME
    header = read_header(path)
    try:
        found = _numbers(header.metadata, STATES).get(state, {})
        file_of = partial(shard_name, state, world_size=int(header.metadata["world_size"]))
        opened = cache(partial(_open, path))
        tensors = {}
        for key, (dtype, shape, table) in found.items():
            columns = header.tensors[table].shape[1]
            if not all(type(size) is int and size >= 0 for size in shape) or columns <= 2 * len(shape):
                raise ValueError(f"{key!r} has shape {shape}, and {columns} columns")
            tensors[key] = IndexEntry(key, (*shape,), dtype, partial(_table, opened, table), file_of)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not an index of this library ({type(error).__name__}: {error}).") from error
    if state != "model":
        return Index(tensors, {}, {})
    return Index(tensors, *(names_in(header.metadata, key) for key in (TIED, COPIES)))


def _open(path: Path) -> Any:
    from trainwright.checkpoint.safetensors_file import MappedTensors  # here: loads torch

    return MappedTensors(path)


def _table(opened: Callable[[], Any], name: str) -> Any:
    return opened().get_tensor(name)


def _add_file(index: Index, folder: Path, file: str) -> None:
    header = read_header(folder / file)
    for name, entry in header.tensors.items():
        if name in index.tensors:
            raise CheckpointError(f"{folder / file}: {name!r} is in another file, too.")
        index.tensors[name] = IndexEntry(
            name, entry.shape, entry.dtype, partial(_one_block, entry.shape), lambda _: file
        )
    index.tied.update(names_in(header.metadata, TIED))
    index.copies.update(names_in(header.metadata, COPIES))


def _one_block(shape: Sequence[int]) -> Any:
    from torch import tensor

    return tensor([[*(0 for _ in shape), *shape, 0]], device="cpu")


def is_share(header: Header) -> bool:
    """Whether a file holds only a part of at least one tensor."""
    shapes = _numbers(header.metadata, SHAPES)
    return any(tuple(shape) != header.tensors[name].shape for name, shape in shapes.items() if name in header.tensors)


def _numbers(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    content = json.loads(metadata.get(key, "{}"))
    if not isinstance(content, dict):
        raise TypeError(f"{key} is a {type(content).__name__}")
    return content


def _fills(blocks: list[tuple[tuple[int, int], ...]], shape: tuple[int, ...]) -> bool:
    """Whether blocks, each a range per dimension, hold every place of a shape once. They lie in rows, as shards do."""
    if not shape:
        return len(blocks) == 1
    rows = defaultdict[tuple[int, int], list[tuple[tuple[int, int], ...]]](list)
    for block in blocks:
        rows[block[0]].append(block[1:])
    reached = 0
    for begin, end in sorted(rows):
        if begin != reached or end == begin:
            return False
        reached = end
    return reached == shape[0] and all(_fills(inner, shape[1:]) for inner in rows.values())

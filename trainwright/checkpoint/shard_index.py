"""The index of a sharded checkpoint: which part of a tensor is in which file. Read from file headers, without torch.

Each process writes one file per state, ``model-00003-of-00008.safetensors``, with its parts of the tensors. The header
has the offset of each part under the key of torch's distributed checkpoints, whose reader can open the files too.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.safetensors_header import COPIES, TIED, Header, names_in, read_header

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


def tensor_files(manifest: Manifest, state: str) -> list[str]:
    """The files of a checkpoint with the tensors of a state: one, or one per process."""
    return [name for name in manifest.files if state_of(name) == state]


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


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A complete tensor. ``dtype`` is the name in the file format, such as ``BF16``."""

    shape: tuple[int, ...]
    dtype: str
    parts: list[Part] = field(default_factory=list)

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Index:
    """The tensors of one state."""

    tensors: dict[str, IndexEntry]
    tied: dict[str, str]  # {name that is in no file: name that holds the same tensor}
    copies: dict[str, str]  # {name of a copy on another pipeline stage: name of the tensor that it repeats}


def read_index(folder: Path, files: Iterable[str]) -> Index:
    """The index of the given files, from their headers."""
    index = Index({}, {}, {})
    for file in files:
        header = read_header(folder / file)
        index.tied.update(names_in(header.metadata, TIED))
        index.copies.update(names_in(header.metadata, COPIES))
        try:
            _add(index.tensors, file, header)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{folder / file}: its offsets cannot be read ({error}).") from error
    for name, entry in index.tensors.items():
        if not _is_complete(entry):
            raise CheckpointError(
                f"{folder}: {name}: its {len(entry.parts)} parts do not hold each value of shape {entry.shape} once"
                f" ({', '.join(f'{part.file} from {part.offset}' for part in entry.parts[:4])})."
            )
    return index


def is_share(header: Header) -> bool:
    """Whether a file holds only a part of at least one tensor."""
    shapes = _numbers(header.metadata, SHAPES)
    return any(tuple(shape) != header.tensors[name].shape for name, shape in shapes.items() if name in header.tensors)


def _add(tensors: dict[str, IndexEntry], file: str, header: Header) -> None:
    offsets, shapes = _numbers(header.metadata, OFFSETS), _numbers(header.metadata, SHAPES)
    for name, entry in header.tensors.items():
        offset = tuple(offsets[name]["saved_offsets"]) if offsets else (0,) * len(entry.shape)
        shape = tuple(shapes[name]) if shapes else entry.shape
        if not all(type(number) is int and number >= 0 for number in (*offset, *shape)) or len(offset) != len(shape):
            raise ValueError(f"{name!r} has offset {offset} and shape {shape}")
        known = tensors.setdefault(name, IndexEntry(shape, entry.dtype))
        if (known.shape, known.dtype, len(entry.shape)) != (shape, entry.dtype, len(shape)):
            raise ValueError(f"{name!r} is {entry.dtype} of shape {shape}, in another file {known.dtype} {known.shape}")
        known.parts.append(Part(file, offset, entry.shape))


def _numbers(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    content = json.loads(metadata.get(key, "{}"))
    if not isinstance(content, dict):
        raise TypeError(f"{key} is a {type(content).__name__}")
    return content


def _is_complete(entry: IndexEntry) -> bool:
    if entry.num_values == 0:
        return all(math.prod(part.shape) == 0 for part in entry.parts)
    ranges = [
        tuple((begin, begin + size) for begin, size in zip(part.offset, part.shape, strict=True))
        for part in entry.parts
    ]
    return _fills(ranges, entry.shape)


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

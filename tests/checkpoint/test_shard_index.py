"""Which part of a tensor is in which file, and the faults of such files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.checkpoint import CheckpointError
from trainwright.checkpoint.safetensors_file import TensorFile
from trainwright.checkpoint.shard_index import INDEX_NAME, STATES, read_index, shard_name, state_of
from trainwright.checkpoint.shards import ShardReader, index_file

WHOLE = torch.arange(20.0).view(4, 5)


def put(folder: Path, *parts: tuple[int, int, int, int]) -> list[str]:
    """A file for each part of WHOLE, given as rows from, rows to, columns from, columns to; and the index."""
    names, blocks = [shard_name("model", number, len(parts)) for number in range(len(parts))], []
    for name, (top, bottom, left, right) in zip(names, parts, strict=True):
        with open(folder / name, "wb") as opened:
            TensorFile({"w": WHOLE[top:bottom, left:right]})(opened)
        blocks.append({"halves": ((top, left), (bottom - top, right - left))})
    with open(folder / INDEX_NAME, "wb") as opened:
        index_file(blocks, {"model": {"w": ("F32", (4, 5), "halves")}}, {})(opened)
    return [*names, INDEX_NAME]


GRID = [(0, 3, 0, 2), (0, 3, 2, 5), (3, 4, 0, 2), (3, 4, 2, 5)]


@pytest.mark.parametrize(
    "parts",
    [GRID[:3], [*GRID[:3], (2, 4, 2, 5)], [(0, 3, 0, 2), (0, 3, 1, 5), *GRID[2:]], [(0, 3, 0, 5), (2, 4, 0, 5)], []],
    ids=["a missing part", "overlapping parts", "an overlap", "overlapping rows", "no part"],
)
def test_a_value_that_is_missing_or_there_twice_is_an_error(tmp_path: Path, parts: Any) -> None:
    with pytest.raises(CheckpointError, match=r"model: w: the parts .* do not hold each value once"):
        put(tmp_path, *parts)


@pytest.mark.parametrize("shape", [(4, 5, 1), (4, -5), "ab", 3, None], ids=str)
def test_metadata_that_is_no_shape_is_an_error(tmp_path: Path, shape: Any) -> None:
    states = json.dumps({"model": {"w": ["F32", shape, "halves"]}})
    table = torch.zeros(4, 5, dtype=torch.int64)
    with open(tmp_path / INDEX_NAME, "wb") as opened:
        TensorFile({"halves": table}, {STATES: states, "world_size": "4"})(opened)
    with pytest.raises(CheckpointError, match="not an index of this library"):
        read_index(tmp_path, "model", [INDEX_NAME])


def test_only_files_with_a_needed_part_are_read(tmp_path: Path) -> None:
    names = put(tmp_path, *GRID)
    stored = ShardReader(tmp_path, "model", names).stored()["w"]
    for name in names[1:4]:
        os.unlink(tmp_path / name)
    assert torch.equal(stored.block((1, 0), (2, 2)), WHOLE[1:3, :2])
    with pytest.raises(FileNotFoundError):
        stored.whole()
    names = put(tmp_path, *GRID)
    (tmp_path / names[2]).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=f"{names[2]}: not a safetensors file"):
        ShardReader(tmp_path, "model", names).stored()["w"].whole()


def test_the_state_of_a_file_may_have_a_dash_and_digits_in_its_name() -> None:
    assert state_of("queue-00001-00000-of-00002.safetensors") == "queue-00001"
    assert state_of("queue-00001.safetensors") == "queue-00001"

"""Which part of a tensor is in which file, and the faults of such files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.checkpoint import CheckpointError
from trainwright.checkpoint.safetensors_file import TensorFile
from trainwright.checkpoint.shard_index import OFFSETS, SHAPES, Part, read_index, state_of

WHOLE = torch.arange(20.0).view(4, 5)


def put(folder: Path, *parts: tuple[int, int, int, int], shape: Any = (4, 5)) -> list[str]:
    """A file for each part of WHOLE, given as rows from, rows to, columns from, columns to."""
    names = []
    for number, (top, bottom, left, right) in enumerate(parts):
        names.append(f"model-{number:05d}-of-{len(parts):05d}.safetensors")
        metadata = {OFFSETS: {"w": {"saved_offsets": [top, left]}}, SHAPES: {"w": shape}}
        file = TensorFile({"w": WHOLE[top:bottom, left:right]}, {k: json.dumps(v) for k, v in metadata.items()})
        with open(folder / names[-1], "wb") as opened:
            file(opened)
    return names


GRID = [(0, 3, 0, 2), (0, 3, 2, 5), (3, 4, 0, 2), (3, 4, 2, 5)]


def test_parts_that_lie_in_rows_are_one_tensor(tmp_path: Path) -> None:
    entry = read_index(tmp_path, put(tmp_path, *GRID)).tensors["w"]
    assert (entry.shape, entry.dtype, entry.num_values, len(entry.parts)) == ((4, 5), "F32", 20, 4)


@pytest.mark.parametrize(
    "parts",
    [GRID[:3], [*GRID, GRID[0]], [(0, 3, 0, 2), (0, 3, 1, 5), *GRID[2:]], [(0, 4, 0, 4)], [(0, 3, 0, 5), (2, 4, 0, 5)]],
    ids=["a missing part", "a part twice", "an overlap", "a missing column", "overlapping rows"],
)
def test_a_value_that_is_missing_or_there_twice_is_an_error(tmp_path: Path, parts: Any) -> None:
    with pytest.raises(CheckpointError, match=r"w: .*\(4, 5\)"):
        read_index(tmp_path, put(tmp_path, *parts))


@pytest.mark.parametrize("shape", [(4, 5, 1), (4, -5), "ab", 3, None], ids=str)
def test_metadata_that_is_no_shape_is_an_error(tmp_path: Path, shape: Any) -> None:
    with pytest.raises(CheckpointError, match="its offsets cannot be read"):
        read_index(tmp_path, put(tmp_path, *GRID, shape=shape))


def test_files_that_disagree_about_a_tensor_are_an_error(tmp_path: Path) -> None:
    first, *_ = put(tmp_path, GRID[0])
    (tmp_path / first).rename(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"'w' is F32 of shape \(3, 5\), in another file F32 \(4, 5\)"):
        read_index(tmp_path, ["other", *put(tmp_path, (0, 3, 2, 5), shape=(3, 5))])


def test_the_overlap_of_two_blocks() -> None:
    part = Part("file", (3, 2), (1, 3))
    here, there = part.overlap((2, 0), (2, 4)) or ((), ())
    assert (here, there) == ((slice(0, 1), slice(0, 2)), (slice(1, 2), slice(2, 4)))
    assert part.overlap((0, 0), (3, 5)) is None


def test_the_state_of_a_file_may_have_a_dash_and_digits_in_its_name() -> None:
    assert state_of("queue-00001-00000-of-00002.safetensors") == "queue-00001"
    assert state_of("queue-00001.safetensors") == "queue-00001"

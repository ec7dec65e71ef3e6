"""Tensors that are read from the parts in several files."""

import os
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_shard_index import GRID, WHOLE, put
from trainwright.checkpoint import CheckpointError
from trainwright.checkpoint.shards import ShardReader


def test_only_files_with_a_needed_part_are_read(tmp_path: Path) -> None:
    names = put(tmp_path, *GRID)
    stored = ShardReader(tmp_path, "model", names).stored()["w"]
    for name in names[1:4]:
        os.unlink(tmp_path / name)
    assert torch.equal(stored.block((1, 0), (2, 2)), WHOLE[1:3, :2])
    with pytest.raises(FileNotFoundError):
        stored.whole()


def test_a_damaged_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    names = put(tmp_path, *GRID)
    (tmp_path / names[2]).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=f"{names[2]}: not a safetensors file"):
        ShardReader(tmp_path, "model", names).stored()["w"].whole()

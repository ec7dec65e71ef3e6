"""Tar shards: names, decoding, parts, and positions."""

import gzip
import io
import json
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainwright.base.errors import ConfigError, MissingFileError
from trainwright.data import DataError, StreamLoader, TarShards


def write_shards(folder: Path, sizes: list[int]) -> str:
    """Shards of these sizes; the samples are numbered over all of them."""
    number = 0
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"part-{shard:03d}.tar", "w") as tar:
            for _ in range(size):
                add(tar, f"{number:04d}.cls", str(number).encode())
                add(tar, f"{number:04d}.meta.json", json.dumps({"square": number**2}).encode())
                number += 1
    return str(folder / f"part-{{000..{len(sizes) - 1:03d}}}.tar")


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def label(sample: dict[str, Any]) -> int:
    assert sample["meta.json"]["square"] == sample["cls"] ** 2
    return int(sample["cls"])


def test_samples_are_decoded_by_extension(tmp_path: Path) -> None:
    picture, array = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (3, 2), (9, 8, 7)).save(picture, "PNG")
    np.save(array, np.arange(3))
    long_name = "x" * 150 + "/b.c"  # needs an extended header
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "train/a.png", picture.getvalue())
        add(tar, "train/a.seg.NPY", array.getvalue())
        add(tar, f"{long_name}.txt", "grüße".encode())
        add(tar, f"{long_name}.bin", b"\0\1")
        add(tar, f"{long_name}.twice", b"4")
    first, second = TarShards(tmp_path / "a.tar", decoders={"twice": lambda content: 2 * int(content)})
    assert first["__key__"] == "train/a"
    assert first["png"].size == (3, 2)
    assert first["seg.npy"].tolist() == [0, 1, 2]
    assert (second["c.txt"], second["c.bin"]) == ("grüße", b"\0\1")
    assert second["c.twice"] == 8


def test_every_sample_is_a_position(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, [3, 1, 4])
    for path in list(tmp_path.glob("*.tar")):
        (path.parent / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    for shards in (pattern, str(tmp_path / "*.tar.gz")):
        data = TarShards(shards, label)
        assert list(data) == list(data) == list(range(8))
        for stop in range(1, 9):
            first, later = TarShards(shards, label), TarShards(shards, label)
            assert list(islice(first, stop)) == list(range(stop))
            later.load_state_dict(first.state_dict())
            assert list(later) == list(range(stop, 8))
            assert list(later) == list(range(8))  # the next pass


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize(
    ("settings", "num_ranks"), [({}, 2), ({}, 5), ({"num_workers": 2}, 2), ({"shuffle_buffer": 3}, 5)]
)
@pytest.mark.slow
def test_ranks_and_workers_share_the_samples_and_resume(
    settings: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    data, seen = TarShards(write_shards(tmp_path, [5, 2, 4, 6]), label, shuffle_shards=True), []
    for rank in range(num_ranks):
        ranks = {"data_parallel_rank": rank, "data_parallel_size": num_ranks}
        loader = StreamLoader(data, 2, drop_last=False, infinite=False, **ranks, **settings)
        seen += [value for batch in loader for value in batch.tolist()]
        whole, first, later = (StreamLoader(data, 2, **ranks, **settings) for _ in range(3))
        expected = [batch.tolist() for batch in islice(whole, 9)]
        assert [batch.tolist() for batch in islice(first, 5)] == expected[:5]
        later.load_state_dict(first.state_dict())
        assert [batch.tolist() for batch in islice(later, 4)] == expected[5:]
    assert sorted(seen) == list(range(17))


def test_shards_come_in_another_order_in_each_pass(tmp_path: Path) -> None:
    data = TarShards(write_shards(tmp_path, [2] * 8), label, shuffle_shards=True)
    passes = []
    for epoch in range(3):
        data.set_epoch(epoch)
        passes.append(list(data))
    assert len({tuple(order) for order in passes}) == 3
    assert all(sorted(order) == list(range(16)) for order in passes)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    pattern = write_shards(tmp_path, [2, 2])
    with pytest.raises(MissingFileError, match=r"part-002\.tar \(1 of 3\)"):
        TarShards(pattern.replace("001", "002"))
    with pytest.raises(ConfigError, match="describes no file"):
        TarShards(str(tmp_path / "*.zip"))
    path = tmp_path / "part-001.tar"
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(DataError, match=r"part-001.*cannot be read as a tar file"):
        list(TarShards(pattern, label))
    path.write_bytes(b"no tar file" * 100)
    with pytest.raises(DataError, match=r"part-001.*cannot be read as a tar file"):
        list(TarShards(path))
    with tarfile.open(path, "w") as tar:
        add(tar, "a.cls", b"cat")
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(TarShards(path))
    assert caught.value.__notes__ == [f"While decoding a.cls of {path}."]

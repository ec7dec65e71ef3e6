import gzip
import struct

import numpy as np
import pytest

from trainwright.data import DataError
from trainwright.data.datasets import read_idx, write_idx


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (0, 28, 28)])
@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_written_and_read_is_the_identity(tmp_path, shape, name):
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    write_idx(tmp_path / name, array)
    result = read_idx(tmp_path / name)
    np.testing.assert_array_equal(result, array)
    assert result.flags.writeable
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_the_bytes_are_those_of_the_format(tmp_path):
    write_idx(tmp_path / "x", np.array([[1, 2, 3], [4, 5, 6]], np.uint8))
    assert (tmp_path / "x").read_bytes() == struct.pack(">HBBII6B", 0, 8, 2, 2, 3, 1, 2, 3, 4, 5, 6)


def test_equal_arrays_give_equal_gzipped_files(tmp_path):
    for name in ("a.gz", "b.gz"):
        write_idx(tmp_path / name, np.arange(9, dtype=np.uint8))
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gz", "b.gz"]


WHOLE = struct.pack(">HBBI4B", 0, 8, 1, 4, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "no IDX file"),
        (b"<html>not found</html>", "begins with b'<htm'.*web page"),
        (struct.pack(">HBBI", 0, 0x0D, 1, 4) + bytes(16), "element type 0x0d; only uint8"),
        (WHOLE[:6], "cut off within its header, at 6 of 8 bytes"),
        (WHOLE[:-1], r"11 bytes; shape \(4,\) in its header needs 12"),
        (WHOLE + b"x", r"13 bytes; shape \(4,\)"),
        (gzip.compress(WHOLE, mtime=0)[:-3], "the gzip data are broken"),
        (gzip.compress(WHOLE, mtime=0)[:10] + b"garbage", "the gzip data are broken"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, content, fact):
    path = tmp_path / "labels-idx1"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"labels-idx1: .*{fact}"):
        read_idx(path)


def test_another_number_of_dimensions_is_refused(tmp_path):
    write_idx(tmp_path / "x", np.zeros(4, np.uint8))
    with pytest.raises(DataError, match="1 dimensions; 3 are expected"):
        read_idx(tmp_path / "x", num_dimensions=3)


def test_only_bytes_are_written(tmp_path):
    with pytest.raises(DataError, match=r"got an array of int64.*astype\(np.uint8\)"):
        write_idx(tmp_path / "x", np.zeros(4, np.int64))
    assert not (tmp_path / "x").exists()

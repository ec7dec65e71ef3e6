import errno
import os

import pytest

from trainwright.events.writers.rows import RowFile


def test_a_block_that_cannot_be_written_whole_leaves_no_trace(tmp_path, monkeypatch):
    file = RowFile(tmp_path / "rows")
    file.append(b"first\n")
    real_write = os.write

    def full_disk(descriptor, block):
        if len(block) <= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, block[:4])

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full_disk)
        with pytest.raises(OSError, match="No space"):
            file.append(b"second\n")
    assert file.path.read_bytes() == b"first\n"
    file.append(b"third\n")
    assert file.path.read_bytes() == b"first\nthird\n"
    file.close()
    file.close()


def test_a_failed_replacement_leaves_the_old_file_and_nothing_beside(tmp_path, monkeypatch):
    file = RowFile(tmp_path / "rows")
    file.append(b"first\n")

    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="Input/output"):
            file.replace(b"")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows"]
    assert file.path.read_bytes() == b"first\n"


def test_files_kept_beside_are_numbered(tmp_path):
    file = RowFile(tmp_path / "rows")
    names = []
    for _ in range(3):
        file.append(b"x\n")
        file.close()
        names.append(file.keep_beside().name)
    assert names == ["rows.old", "rows.old.1", "rows.old.2"]
    assert not file.has_content()

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
        names.append(file.rename_to_backup().name)
    assert names == ["rows.old", "rows.old.1", "rows.old.2"]
    assert not file.has_content()


ODD = [
    (os.mkfifo, "a pipe"),
    (os.mkdir, "a folder"),
    (lambda path: path.symlink_to(os.devnull), "a device"),
    (lambda path: path.symlink_to(path.name), "a link in a circle of links"),
]


@pytest.mark.parametrize(
    ("place", "make", "kind"),
    [  # in the place of the file, or of its folder
        *(("rows", *odd) for odd in ODD),
        *((".", *odd) for odd in ODD if odd[1] != "a folder"),
    ],
)
def test_where_something_else_is_in_its_place_nothing_is_written_and_one_warning_says_so(
    tmp_path, caplog, make, kind, place
):
    odd = tmp_path / "logs" / place
    odd.parent.mkdir(exist_ok=True)
    make(odd)
    file = RowFile(tmp_path / "logs" / "rows")
    assert not file.has_content()
    file.append(b"first\n")
    file.replace(b"second\n")
    file.append(b"third\n")
    file.sync()
    file.close()
    (record,) = caplog.records
    assert record.getMessage() == f"{file.path}: not written, because {odd} is {kind}; the run continues without it."

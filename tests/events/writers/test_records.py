"""Files of records, read back by tensorboard, which looks at the checksums."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainwright.events.writers.records import RecordFile, masked_checksum

RECORDS = [b"", b"1", bytes(range(256)), b"a longer one " * 1000]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    file = RecordFile(tmp_path / "events")
    for record in RECORDS:
        file.write(record)
    file.flush()
    reader = PyRecordReader_New(str(tmp_path / "events"))
    read = []
    for _ in RECORDS:
        reader.GetNext()
        read.append(reader.record())
    assert read == RECORDS
    file.close()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 300])
def test_the_checksum_is_tensorboards(length: int) -> None:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    data = np.random.default_rng(length).bytes(length)
    assert masked_checksum(data) == masked_crc32c(data)


def test_known_checksums() -> None:
    """Of RFC 3720, section B.4, turned and shifted."""
    for data, checksum in [(bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)]:
        turned = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
        assert masked_checksum(data) == (turned + 0xA282EAD8) % 2**32


def test_a_training_imports_of_tensorboard_the_messages_alone(tmp_path: Path) -> None:
    program = f"""
import sys
from trainwright.events import EventStorage, TensorBoardWriter
with EventStorage(0) as storage:
    storage.put_scalar("loss", 1.0)
    writer = TensorBoardWriter({str(tmp_path)!r})
    writer.write()
    writer.close()
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"tensorboard.summary", "fsspec", "absl", "torch.utils.tensorboard"} & set(done.stdout.split())
    assert list(tmp_path.glob("events.out.tfevents.*"))

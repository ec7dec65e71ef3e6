"""TensorBoard's file of records: the length of each, its bytes, and a checksum of both (CRC-32C, Castagnoli 1993).

tensorboard has a writer of them, whose import takes a hundred modules and 40 ms for these twelve bytes a record.
"""

import struct
from pathlib import Path

from trainwright.events.writers.rows import RowFile

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits reversed
_MASK = 0xA282EAD8  # so that the checksum of data that holds checksums is none of those


class RecordFile:
    """A new file at ``path``. What was written is there for others after ``flush``."""

    def __init__(self, path: Path) -> None:
        self._file = RowFile(path)
        self._gathered: list[bytes] = []  # what is not in the file yet

    def write(self, record: bytes) -> None:
        length = struct.pack("<Q", len(record))
        sums = [struct.pack("<I", masked_checksum(part)) for part in (length, record)]
        self._gathered += (length, sums[0], record, sums[1])

    def flush(self) -> None:
        if self._gathered:
            self._file.append(b"".join(self._gathered))
            self._gathered = []

    def sync(self) -> None:
        """Return when what was flushed is on the disk."""
        self._file.sync()

    def close(self) -> None:
        self.flush()
        self._file.close()


def masked_checksum(data: bytes) -> int:
    """The CRC-32C of ``data``, turned by 15 bits and shifted by a constant, as a file of records has it.

    >>> hex(masked_checksum(b"123456789"))  # whose CRC-32C is 0xe3069283
    '0xc78ab0e5'
    """
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
    checksum ^= 0xFFFFFFFF
    return ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = [_table_entry(value) for value in range(256)]

"""Images and texts that a run has put into its storage, read from its TensorBoard files."""

import base64
import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MARKS = (b"\x89PNG", b"text_summary", b"plugin_name\x12\x04text", b"\n\x04text")
_FILES = "events.out.tfevents.*"
_MAX_PICTURES, _MAX_TEXTS, _MAX_BYTES = 24, 8, 4_000_000


@dataclass(frozen=True)
class Sample:
    """A picture as a data URI, or a text."""

    name: str
    iteration: int
    uri: str = ""
    text: str = ""


def read_samples(folder: Path) -> list[Sample]:
    found: dict[tuple[str, int], Sample] = {}
    paths = sorted({*folder.glob(_FILES), *folder.glob(f"*/{_FILES}")}, key=lambda path: path.stat().st_mtime)
    for path in paths:
        with suppress(OSError, ValueError):  # an empty file cannot be mapped
            for record in _records(path):
                found |= {(one.name, one.iteration): one for one in _samples_in(record)}
    latest = sorted(found.values(), key=lambda one: one.iteration)
    pictures = [one for one in latest if one.uri][-_MAX_PICTURES:]
    texts = [one for one in latest if not one.uri][-_MAX_TEXTS:]
    total, kept = 0, []
    for one in reversed(pictures):
        total += len(one.uri)
        kept += [one] if total <= _MAX_BYTES else []
    return [*sorted(kept, key=lambda one: (one.name, one.iteration)), *texts]


def _records(path: Path) -> Iterator[bytes]:
    """The records of a file that may have an image or a text; scalars are skipped without being parsed."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if not any(content.find(mark) >= 0 for mark in _MARKS):
            return
        at = 0
        while at + 12 <= len(content):  # length, its checksum, the record, its checksum
            (length,) = struct.unpack("<Q", content[at : at + 8])
            record = content[at + 12 : at + 12 + length]
            if len(record) < length:
                return
            if any(mark in record for mark in _MARKS):
                yield record
            at += length + 16


def _samples_in(record: bytes) -> Iterator[Sample]:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        return
    event: Any = Event.FromString(record)
    for value in event.summary.value:
        image = value.image.encoded_image_string
        if image.startswith(b"\x89PNG"):
            yield Sample(value.tag, event.step, uri=f"data:image/png;base64,{base64.b64encode(image).decode()}")
        elif value.metadata.plugin_data.plugin_name == "text":
            text = b"\n".join(value.tensor.string_val).decode(errors="replace")
            yield Sample(re.sub(r"/text_summary$", "", value.tag), event.step, text=text)

"""Verification: is a checkpoint what was saved? Every load asks this first."""

import hashlib
from dataclasses import replace
from pathlib import Path

import xxhash

from trainwright.checkpoint.contents import read_state
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import PathLike
from trainwright.checkpoint.manifest import FileEntry, Manifest, read_manifest
from trainwright.checkpoint.tensors import read_tensors
from trainwright.config.errors import MissingFileError

_CHUNK_BYTES = 1 << 20


def verify(path: PathLike, *, deep: bool = False) -> Manifest:
    """Check every file of a checkpoint against its manifest; returns the manifest.

    Files that the manifest does not list are no fault: nothing reads them.

    Args:
        deep: also read each state back, and fill in each file's ``sha256``, to compare with a list kept elsewhere.

    Raises:
        MissingFileError: there is no such folder.
        CheckpointError: a file is missing or is not as it was written. The message lists every fault.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: no such checkpoint folder.")
    manifest = read_manifest(folder)
    measured: dict[str, FileEntry] = {}
    faults = []
    for name, expected in manifest.files.items():
        fault, measured[name] = _check_file(folder / name, expected, sha256=deep)
        if fault:
            faults.append(f"{name} {fault}")
    if faults:
        raise CheckpointError("\n".join([f"{folder}: not what was saved.", *(f"  {fault}" for fault in faults)]))
    if deep:
        _read_back(folder, manifest)
    return replace(manifest, files=measured)


def _check_file(path: Path, expected: FileEntry, *, sha256: bool) -> tuple[str, FileEntry]:
    """What is wrong with a file, as the end of a sentence ("" if nothing), and what it is."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:  # said without reading it
            return f"has {size:,} bytes, the manifest says {expected.bytes:,} (an interrupted copy?)", expected
        found = _measure_file(path, sha256=sha256)
    except FileNotFoundError:
        return "is missing", expected
    except OSError as error:
        return f"cannot be read ({error.strerror})", expected
    if found.xxh3_128 != expected.xxh3_128:
        return f"has checksum {found.xxh3_128}, the manifest says {expected.xxh3_128} (damaged)", found
    return "", found


def _measure_file(path: Path, *, sha256: bool) -> FileEntry:
    fast, slow, size = xxhash.xxh3_128(), hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while count := file.readinto(buffer):
            fast.update(buffer[:count])
            if sha256:
                slow.update(buffer[:count])
            size += count
    return FileEntry(size, fast.hexdigest(), slow.hexdigest() if sha256 else None)


def _read_back(folder: Path, manifest: Manifest) -> None:
    for name in manifest.files:
        if name.endswith(".json"):
            read_state(folder, manifest, name.removesuffix(".json"))
        else:
            read_tensors(folder / name)

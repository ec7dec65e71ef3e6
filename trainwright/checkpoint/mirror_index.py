"""The index of a mirror: which checkpoints are complete there, with the names and links of the run folder.

A mirror has a folder for each saved checkpoint, which is written once, and ``index-<number>.json``. An index is written
after everything that it lists, and never changed; the one with the largest number counts. So a copy that was
interrupted is never read. Rules about folders (the order of checkpoints, retention) are those of
:mod:`~trainwright.checkpoint.folder`: they are applied to an image of the run folder that has only names and manifests.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from trainwright.base.files import has_links, point_at, temporary_sibling
from trainwright.checkpoint.errors import CheckpointError, NewerFormatError
from trainwright.checkpoint.folder import write_pointer
from trainwright.checkpoint.manifest import MANIFEST_NAME, FileEntry, is_inside
from trainwright.checkpoint.mirror_store import Store

FORMAT = 1
_NAME = re.compile(r"index-(\d{8,})\.json")
_PLACE = re.compile(r".+\.[0-9a-f]{8}", re.DOTALL)  # the folder of a checkpoint: its name, and what makes it unique


@dataclass(frozen=True, slots=True)
class Copied:
    """A complete checkpoint in a mirror."""

    place: str  # its folder there
    name: str  # its path in the run folder
    manifest: FileEntry
    run_files: Mapping[str, FileEntry]  # of the run folder, as they were when it was copied, by their path in it
    run_place: str = ""  # their folder in the mirror

    @property
    def key(self) -> str:
        """Differs between any two saves."""
        return self.manifest.xxh3_128


@dataclass(frozen=True, slots=True)
class Index:
    """The complete checkpoints of a mirror. Names are paths in the run folder, with slashes."""

    number: int = 0
    checkpoints: tuple[Copied, ...] = ()
    links: Mapping[str, str] | None = None  # {link: checkpoint}
    last: str | None = None  # the content of last_checkpoint
    folder: str = "."  # that of the checkpoints
    run: str | None = None  # when the run was first started; None: unknown

    @property
    def file_name(self) -> str:
        return f"index-{self.number:08d}.json"

    def to_bytes(self) -> bytes:
        content = {"format": FORMAT, **asdict(self)}
        return _dump({**content, "xxh3_128": _checksum(content)})

    def find(self, key: str) -> Copied | None:
        """The checkpoint with this key."""
        return next((one for one in self.checkpoints if one.key == key), None)


def read_index(store: Store) -> tuple[Index | None, int]:
    """The index that counts, and the largest number that an index has; None: there is none.

    Raises:
        CheckpointError: there are some, and none is readable.
        StoreError: the store cannot be read now.
    """
    numbers = sorted(int(match[1]) for name in store.entries() if (match := _NAME.fullmatch(name)))
    for number in reversed(numbers):
        name = Index(number).file_name
        try:
            return _parsed(store.read(name), number), numbers[-1]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, NewerFormatError):
                raise
    if numbers:
        raise CheckpointError(
            f"{store.shown}: no {Index(numbers[-1]).file_name} or earlier index can be read (damaged?)."
        )
    return None, 0


def _parsed(text: bytes, number: int) -> Index:
    content = json.loads(text)
    found = content.pop("xxh3_128")
    if content["format"] != FORMAT:
        raise NewerFormatError(
            f"index {number} of the mirror has format {content['format']!r}; this version of trainwright reads"
            f" {FORMAT}. A newer version has written it: update trainwright."
        )
    if found != _checksum(content) or content["number"] != number:
        raise ValueError("its content does not match its own checksum")
    checkpoints = tuple(
        Copied(
            one["place"],
            one["name"],
            _entry(one["manifest"]),
            {name: _entry(entry) for name, entry in one["run_files"].items()},
            one["run_place"],
        )
        for one in content["checkpoints"]
    )
    links = dict(content["links"] or {})
    folder = [] if content["folder"] == "." else [content["folder"]]
    paths = [path for one in checkpoints for path in (one.place, one.name, one.run_place, *one.run_files)] + folder
    if not all(is_inside(path) for path in (*paths, *links, *links.values())):
        raise ValueError("a path outside of the folder")
    return Index(number, checkpoints, links, content["last"], content["folder"], content["run"])


def _entry(content: Mapping[str, Any]) -> FileEntry:
    return FileEntry(int(content["bytes"]), str(content["xxh3_128"]))


def entry_of(content: bytes) -> FileEntry:
    """Size and checksum of a content."""
    return FileEntry(len(content), xxhash.xxh3_128_hexdigest(content))


def is_place(name: str) -> bool:
    """Whether a folder in a mirror has a name that :func:`place_of` makes."""
    return _PLACE.fullmatch(name) is not None


def place_of(name: str, key: str) -> str:
    """The folder in the mirror of a checkpoint ``name`` with this key."""
    return f"{name}.{key[:8]}"


@contextlib.contextmanager
def image_of(index: Index, manifests: Mapping[str, bytes], save_dir: Path) -> Iterator[Path]:
    """A temporary run folder with the names of a mirror, and with the manifests of its checkpoints by their keys."""
    image = temporary_sibling(save_dir / "mirror")
    try:
        for one in index.checkpoints:
            (image / one.name).mkdir(parents=True)
            (image / one.name / MANIFEST_NAME).write_bytes(manifests[one.key])
        folder = image / index.folder
        folder.mkdir(parents=True, exist_ok=True)
        for link, name in (index.links or {}).items():
            if (image / name).is_dir() and not os.path.lexists(image / link):
                _link(image / link, image / name, save_dir)
        if index.last is not None:
            write_pointer(folder, index.last)
        yield image
    finally:
        shutil.rmtree(image, ignore_errors=True)


def _link(link: Path, target: Path, save_dir: Path) -> None:
    if has_links(save_dir):
        link.symlink_to(os.path.relpath(target, link.parent))
    else:
        point_at(link, target)


def kept_in(image: Path, index: Index) -> Index:
    """``index`` without what has been deleted in its image."""
    checkpoints = tuple(one for one in index.checkpoints if (image / one.name).is_dir())
    names = {one.name for one in checkpoints}
    links = {
        link: name for link, name in (index.links or {}).items() if name in names and os.path.lexists(image / link)
    }
    return replace(index, checkpoints=checkpoints, links=links)


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_dump(content))


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=True, sort_keys=True) + "\n").encode()

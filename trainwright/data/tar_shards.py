"""Tar shards: samples in numbered tar files, read one after another, as WebDataset writes them.

The files of a sample follow each other and have the same name up to the first dot: ``000017.jpg``, ``000017.cls``,
``000017.json``. A position is a shard and the byte at which the next sample begins.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import random
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from trainwright.base.errors import ConfigError, MissingFileError, import_optional
from trainwright.data.errors import DataError
from trainwright.data.seeding import ORDER_STREAM, mixed_seed

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class TarShards(IterableDataset[Any]):
    """The samples of tar files, a dict each: values by file-name extension, and ``__key__``.

    Values are decoded by extension: ``cls`` (int), ``json``, ``txt``, ``npy``, and images (Pillow's); others are bytes.

    Each rank, and each of its workers, reads shards of its own. With fewer shards than ranks, each rank reads all of
    them and keeps its samples; workers beyond the number of a rank's shards read nothing.

    Args:
        shards: paths; or one with a range, ``"train-{000..009}.tar"``, or with ``*``. Compressed files work too.
        transform: turns the dict into a training sample.
        decoders: functions of bytes by extension, instead of or in addition to those above.
        shuffle_shards: read the shards in a different order in each pass.

    Raises:
        MissingFileError: a file does not exist.
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
        shuffle_shards: bool = False,
        seed: int = 0,
    ) -> None:
        self.shards, self.transform = shard_paths(shards), transform
        self.shuffle_shards, self.seed = shuffle_shards, seed
        self._decoders = {**DECODERS, **(decoders or {})}
        self._index, self._num_parts = 0, 1
        self._epoch = 0
        self._start = self._position = {"shard": 0, "offset": 0, "samples": 0}

    def shard(self, num_shards: int, index: int) -> "TarShards":
        """The part ``index`` of ``num_shards``: no sample is in two parts."""
        part = TarShards.__new__(type(self))
        vars(part).update(vars(self))
        part._num_parts, part._index = self._num_parts * num_shards, self._index * num_shards + index
        return part

    def identity(self) -> dict[str, Any]:
        """What must be equal on all ranks: the names of the shards in their order, and the seed."""
        names = hashlib.blake2b("\n".join(one.name for one in self.shards).encode(), digest_size=4).hexdigest()
        return {"the list of its shards": f"{len(self.shards)} with the checksum {names}", "seed": self.seed}

    def set_epoch(self, epoch: int) -> None:
        """The number of the next pass, for ``shuffle_shards``."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """The position after the latest sample, in this part and worker."""
        return dict(self._position)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Start the next iteration there."""
        self._start = dict(state)

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, {"shard": 0, "offset": 0, "samples": 0}
        shards, is_striped = self._own_shards()
        samples, offset = start["samples"], start["offset"]
        for number in range(start["shard"], len(shards)):
            for sample, end in self._read(shards[number], offset):
                samples += 1
                if is_striped and (samples - 1) % self._num_parts != self._index:
                    continue
                self._position = {"shard": number, "offset": end, "samples": samples}
                yield sample() if self.transform is None else self.transform(sample())
            offset = 0

    def __repr__(self) -> str:
        return f"TarShards(<{len(self.shards)} shards>, shuffle_shards={self.shuffle_shards}, seed={self.seed})"

    def _own_shards(self) -> tuple[list[Path], bool]:
        """The shards of this part and worker, and whether each part reads all of them and keeps its samples."""
        shards = list(self.shards)
        if self.shuffle_shards:
            random.Random(mixed_seed(self.seed, ORDER_STREAM, self._epoch)).shuffle(shards)
        is_striped = len(shards) < self._num_parts
        own = shards if is_striped else shards[self._index :: self._num_parts]
        info = get_worker_info()
        return own if info is None else own[info.id :: info.num_workers], is_striped

    def _read(self, path: Path, offset: int) -> Iterator[tuple[Callable[[], dict[str, Any]], int]]:
        """For each sample, a function that decodes it, and the byte after it."""
        try:
            with _OPENERS.get(path.suffix, open)(path, "rb") as file:
                file.seek(offset)
                for files, end in _samples(file):
                    yield lambda files=files: self._decoded(files, path), end  # type: ignore[misc]
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DataError(f"{path}: cannot be read as a tar file ({error}).") from error

    def _decoded(self, files: Mapping[str, bytes], path: Path) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        for name, content in files.items():
            key, extension = split_key(name)
            decode = self._decoders.get(extension.rpartition(".")[2])
            try:
                sample |= {"__key__": key, extension: content if decode is None else decode(content)}
            except Exception as error:
                error.add_note(f"While decoding {name} of {path}.")
                raise
        return sample


def _samples(file: IO[bytes]) -> Iterator[tuple[dict[str, bytes], int]]:
    """The files of each sample, and the byte after them, from the current position of ``file`` on."""
    files: dict[str, bytes] = {}
    key = None
    tar: Any = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  # the caller closes the file
    while (member := tar.next()) is not None:
        tar.members = []  # it would keep all of them
        if not member.isfile():
            continue
        if split_key(member.name)[0] != key:
            if files:
                yield files, member.offset
            files, key = {}, split_key(member.name)[0]
        content = tar.extractfile(member)
        assert content is not None, "a regular file"
        files[member.name] = content.read()
    if files:
        yield files, tar.offset


def split_key(name: str) -> tuple[str, str]:
    """Key and extension of a file name: they meet at the first dot after the folders.

    >>> split_key("train/0017.seg.png")
    ('train/0017', 'seg.png')
    """
    folder, slash, file = name.rpartition("/")
    key, _, extension = file.partition(".")
    return folder + slash + key, extension.lower()


def shard_paths(shards: str | Path | Sequence[str | Path]) -> list[Path]:
    """The paths that a pattern, or a list of patterns, describes."""
    patterns = [shards] if isinstance(shards, str | Path) else list(shards)
    paths: list[Path] = []
    for pattern in patterns:
        text = str(pattern)
        if found := _RANGE.search(text):
            first, last = found.groups()
            numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
            paths += shard_paths([text[: found.start()] + number + text[found.end() :] for number in numbers])
        elif "*" in text:
            folder = Path(text).parent
            paths += sorted(folder.glob(Path(text).name))
        else:
            paths.append(Path(text))
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise MissingFileError(f"TarShards: no such file: {', '.join(missing[:5])} ({len(missing)} of {len(paths)}).")
    if not paths:
        raise ConfigError(f"TarShards.shards: {shards!r} describes no file.")
    return paths


def _image(content: bytes) -> Any:
    pillow = import_optional("PIL.Image", "TarShards: images need Pillow: pip install pillow.", DataError)
    image = pillow.open(io.BytesIO(content))
    image.load()
    return image


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "cls": int,
    "json": json.loads,
    "txt": bytes.decode,
    "npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp"), _image),
}

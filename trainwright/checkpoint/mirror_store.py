"""A folder of objects at a URL, by fsspec: an object store, another file system, or a local folder.

An object store has no rename: an object has its new content or its former one. An error has a text without the URL's
secrets.
"""

import logging
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from trainwright.base.errors import ConfigError, UserError, import_optional, nearest_name

logger = logging.getLogger("trainwright.checkpoint")

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
# An object store has no folders to make; s3fs would make a bucket of a wrong name.
_WITHOUT_FOLDERS = {*_PACKAGES, "abfss", "adl", "memory", "oss", "oci"}
_REDACTED = "[redacted]"
PROBE = ".mirror-test-"  # of the name of the object that `Store.check` writes


class StoreError(UserError, OSError):
    """The store refuses an operation, or cannot be reached."""


class MissingObjectError(StoreError):
    """There is no such object."""


def shown_url(url: str) -> str:
    """A URL without user, password and query.

    >>> shown_url("sftp://me:secret@host/run?sig=1"), shown_url("s3://bucket/run@2")
    ('sftp://host/run', 's3://bucket/run@2')
    """
    protocol, between, rest = url.partition("://")
    user, _, place = rest.rpartition("@")
    if user and (":" in user or "/" not in user):
        rest = place
    return f"{protocol}{between}{rest}".partition("?")[0]


class Store:
    """The objects below ``url``, named by paths with slashes.

    Args:
        setting: the name of the URL in messages.

    Raises:
        ConfigError: there is no such kind of store, or its package is not installed.
    """

    def __init__(self, url: str, setting: str = "mirror") -> None:
        self.setting, self.shown = setting, shown_url(url)
        self._secrets = _secrets_of(url)
        self._fs, root = self._open(url)
        self._root = root.rstrip("/")

    def check_outside(self, *folders: str | os.PathLike[str]) -> None:
        """Raise if this is one of ``folders``, or in one: it would be lost with it."""
        protocol = self._fs.protocol
        if "file" not in ([protocol] if isinstance(protocol, str) else protocol):
            return
        own = os.path.realpath(self._root)
        for one in map(os.path.realpath, folders):
            if Path(own).is_relative_to(one):
                raise ConfigError(
                    f"{self.setting}: {self.shown} is in the folder of the run, {one}, and would be lost with it. A"
                    " mirror is elsewhere, best on another machine."
                )

    def check(self) -> None:
        """Write, read and delete a small object.

        Raises:
            ConfigError: the store refuses it, or cannot be reached.
        """
        name, content = f"{PROBE}{secrets.token_hex(8)}", b"trainwright writes checkpoints here"
        try:
            self.write(name, content)
            if self.read(name) != content:
                raise StoreError("what was written is not what is read")
            self.delete([name])
        except StoreError as error:
            raise ConfigError(
                f"{self.setting}: {self.shown}: checkpoints cannot be copied there: writing, reading and deleting a"
                f" small object has failed ({error}). Check the name, the permissions, the credentials and the network."
            ) from None

    def read(self, name: str) -> bytes:
        return bytes(self._do("cat_file", self._path(name)))

    def write(self, name: str, content: bytes) -> None:
        """Write a new object: readers see all of it, or none."""
        self._make_folder(name)
        path = self._path(name)
        if not self._has_folders:
            self._do("pipe_file", path, content)
            return
        # A file system shows a part of a file that is being written.
        self._do("pipe_file", f"{path}.part", content)
        self._do("mv", f"{path}.part", path)

    def upload(self, path: Path, name: str) -> None:
        self._make_folder(name)
        self._do("put_file", str(path), self._path(name))

    def download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._do("get_file", self._path(name), str(path))

    def copy(self, source: str, target: str) -> None:
        """Copy an object, without a transfer where the store can."""
        self._make_folder(target)
        self._do("cp_file", self._path(source), self._path(target))

    def sizes(self, folder: str) -> dict[str, int]:
        """The size of each object in ``folder`` and below, by its name in it."""
        above = self._path(folder)
        try:
            found = self._do("find", above, detail=True)
        except MissingObjectError:
            return {}
        return {_below(above, path): int(info["size"]) for path, info in found.items()}

    def entries(self, folder: str = "") -> list[str]:
        """The names of the objects and folders directly in ``folder``."""
        try:
            found = self._do("ls", self._path(folder), detail=False)
        except MissingObjectError:
            return []
        return sorted(PurePosixPath(path).name for path in found)

    def delete(self, names: list[str]) -> None:
        for name in names:
            self._do("rm", self._path(name))

    def delete_folder(self, name: str) -> None:
        with suppress(MissingObjectError):
            self._do("rm", self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _do(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """Each access to the store."""
        try:
            return getattr(self._fs, operation)(*arguments, **options)
        except FileNotFoundError as error:
            raise MissingObjectError(self._text(error)) from None
        except Exception as error:  # each backend has its own classes
            raise StoreError(self._text(error)) from None

    def _text(self, error: BaseException) -> str:
        text = str(error) or "no message"
        for secret in self._secrets:
            text = text.replace(secret, _REDACTED)
        return f"{type(error).__name__}: {text}"

    def _open(self, url: str) -> tuple[Any, str]:
        needed = f"{self.setting}: copies of checkpoints need fsspec, which is not installed: pip install fsspec s3fs"
        fsspec = import_optional("fsspec", needed, ConfigError)
        core, registry = import_optional("fsspec.core", needed), import_optional("fsspec.registry", needed)
        protocol = url.partition("://")[0].rpartition("::")[2]
        known = {*registry.known_implementations, *fsspec.available_protocols()}
        if protocol not in known:
            raise ConfigError(
                f"{self.setting}: got {self.shown!r}, and {protocol!r} is no kind of store that fsspec knows."
                f"{nearest_name(protocol, known)} Examples: s3://bucket/run, gs://bucket/run, file:///mnt/disk/run."
            )
        self._has_folders = protocol not in _WITHOUT_FOLDERS
        try:
            # Listings must be current: another process may write there.
            found: tuple[Any, str] = core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            package = _PACKAGES.get(protocol)
            fix = f": pip install {package}" if package else f" ({error})"
            raise ConfigError(
                f"{self.setting}: {self.shown} needs a package of fsspec that is not installed{fix}"
            ) from None
        except Exception as error:
            raise ConfigError(
                f"{self.setting}: got {self.shown!r}, which fsspec refuses ({self._text(error)})."
            ) from None
        return found

    def _make_folder(self, name: str) -> None:
        if self._has_folders:
            self._do("makedirs", os.path.dirname(self._path(name)), exist_ok=True)


def _secrets_of(url: str) -> list[str]:
    """The parts of a URL that no message has."""
    _, _, rest = url.partition("://")
    user, at, _ = rest.rpartition("@")
    found = [user, user.partition(":")[2]] if at and (":" in user or "/" not in user) else []
    found += re.findall(r"=([^&#]+)", rest.partition("?")[2])
    return sorted((text for text in found if text), key=len, reverse=True)


def _below(folder: str, path: str) -> str:
    """``path`` relative to ``folder``; a file system may return it with or without a slash before it."""
    return path.lstrip("/").removeprefix(folder.lstrip("/")).lstrip("/")

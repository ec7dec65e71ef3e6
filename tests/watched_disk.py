"""What a disk has after a power failure: an independent judge of the order of writes, syncs and renames.

The disk has a file as it was when it was last synced, and a name of a folder since the folder was synced. The judge
knows nothing of the library: it watches Python's own functions.
"""

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwright.base import files

POINTER = "last_checkpoint"
RECORD, BEST = "run.json", "model_best"


class WatchedDisk:
    """Watches what this process does in ``root``, which is on the disk when it begins.

    ``faults``: what a power failure would have made visible under a name before it was complete. ``rows``: names of
    files that a checkpoint refers to.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.faults, self.rows = root.resolve(), list[str](), set[str]()
        self._contents: dict[int, tuple[int, int]] = {}  # by inode: time of the last change and size, as on the disk
        self._entries: dict[int, dict[str, int]] = {}  # by inode of a folder: the inodes of its names, as on the disk
        self._lock = threading.RLock()
        self._know(self.root)
        self._wrap(monkeypatch, os, "fsync", after=self._synced)
        for name in ("rename", "replace"):
            self._wrap(monkeypatch, os, name, before=self._renames)
        self._wrap(monkeypatch, os, "unlink", before=self._deletes)
        self._wrap(monkeypatch, files, "_exchange", before=self._renames)

    def _wrap(
        self,
        monkeypatch: pytest.MonkeyPatch,
        module: Any,
        name: str,
        *,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        function = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if before is not None:
                    before(*args, **kwargs)
                result = function(*args, **kwargs)
                if after is not None:
                    after(*args, **kwargs)
                return result

        monkeypatch.setattr(module, name, watched)

    def _know(self, folder: Path) -> None:
        """All that is in ``folder`` is on the disk."""
        for path in [folder, *folder.rglob("*")]:
            if path.is_symlink():
                continue
            status = path.stat()
            if path.is_dir():
                self._entries[status.st_ino] = _listing(path)
            else:
                self._contents[status.st_ino] = status.st_mtime_ns, status.st_size

    def _synced(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._entries[status.st_ino] = _listing(Path(f"/proc/self/fd/{descriptor}"))
        else:
            self._contents[status.st_ino] = status.st_mtime_ns, status.st_size

    def _renames(self, source: Any, target: Any, **_: Any) -> None:
        source, target = Path(source).absolute(), Path(target).absolute()
        if not target.is_relative_to(self.root) or _is_hidden(target, self.root):
            return
        if not _is_hidden(source, self.root):  # it was visible before
            return
        self._judge(source, f"{target.relative_to(self.root)} gets its name")
        if target.name == POINTER:
            named = target.parent / source.read_text()
            self.expect(named, f"{POINTER} names {named.name}")
            for path in self.root.rglob("*"):
                if path.name in self.rows:
                    self.expect(path, f"{POINTER} names {named.name}, which refers to {path.name}")
        if target.name == RECORD:
            self._expect_best(target.parent, json.loads(source.read_text())["starts"][-1].get("best"))
        if source.is_symlink():
            self.expect(source.parent / os.readlink(source), f"{target.name} points at {os.readlink(source)}")

    def _expect_best(self, run: Path, best: dict[str, Any] | None) -> None:
        """The checkpoint of the best result that the record of a run names is on the disk."""
        if best is None:
            return
        event = f"{RECORD} names the best result, of iteration {best['iteration']}"
        path = next((run / folder / BEST for folder in ("", "checkpoints") if (run / folder / BEST).exists()), None)
        if path is None:
            self.faults.append(f"{event}, and there is no {BEST}")
            return
        self.expect(path, event)
        iteration = json.loads((path / "manifest.json").read_text())["iteration"] + 1  # of the manifest: from 0
        if iteration != best["iteration"]:
            self.faults.append(f"{event}, and {BEST} is of iteration {iteration}")

    def _deletes(self, path: Any, *_: Any, dir_fd: int | None = None) -> None:
        folder = Path(os.path.dirname(path) or ".") if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
        folder = folder.absolute()
        if folder == self.root or not folder.is_relative_to(self.root):
            return
        inode, above = folder.stat().st_ino, self._entries.get(folder.parent.stat().st_ino, {})
        names = [name for name, entry in above.items() if entry == inode and not name.startswith(".")]
        if _is_hidden(folder, self.root) and names:
            self.faults.append(f"{names[0]} is deleted file by file: the disk still has its name")

    def _judge(self, path: Path, event: str) -> None:
        """What is at ``path`` is on the disk, under whatever name."""
        for name, is_there in self._parts(path):
            if not is_there:
                self.faults.append(f"{event}, and {name or 'its content'} is not synced")

    def _parts(self, path: Path) -> Iterator[tuple[str, bool]]:
        for one in [path, *path.rglob("*")]:
            if one.is_symlink():
                continue
            status, name = one.stat(), "" if one == path else str(one.relative_to(path))
            if one.is_dir():
                yield name, self._entries.get(status.st_ino) == _listing(one)
            else:
                yield name, self._contents.get(status.st_ino) == (status.st_mtime_ns, status.st_size)

    def expect(self, path: Path, event: str) -> None:
        """``path`` is on the disk: its content, and its name in each folder above it."""
        path = Path(os.path.realpath(path))
        self._judge(path, event)
        self._expect_name(path, event)

    def _expect_name(self, path: Path, event: str) -> None:
        while path != self.root:
            if self._entries.get(path.parent.stat().st_ino, {}).get(path.name) != path.lstat().st_ino:
                self.faults.append(f"{event}, and the name {path.relative_to(self.root)} is not synced")
            path = path.parent

    def check(self, *, without: tuple[str, ...] = ()) -> None:
        """Raise if something was visible too early, or if a file in ``root`` would be lost now."""
        with self._lock:
            for path in self.root.rglob("*"):
                if path.name in without or path.parent.name in without:
                    continue
                if not path.is_symlink() and not path.is_dir():
                    self._judge(path, f"at the end {path.relative_to(self.root)} is there")
                self._expect_name(path, f"at the end {path.relative_to(self.root)} is there")
        assert not self.faults, "\n".join(dict.fromkeys(self.faults))


def _listing(folder: Path) -> dict[str, int]:
    """The entries without hidden ones, which other threads make and delete."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries if not entry.name.startswith(".tmp-")}


def _is_hidden(path: Path, root: Path) -> bool:
    return path.is_relative_to(root) and any(part.startswith(".tmp-") for part in path.relative_to(root).parts)

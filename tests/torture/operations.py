"""The file operations of a run, each with a name; at a chosen one the process kills itself.

Installed in the process that trains, around Python's own functions and so below every function of the library. What an
operation is called contains its save, the operation and its target::

    model_0000013 | fsync tmp(model_0000013)/optimizer.safetensors

Written down as they happen: ``+`` an operation done, ``=`` the name that last_checkpoint has now, ``!`` the last one.
"""

import builtins
import ctypes
import io
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OTHER = "other"  # the label of what belongs to no save: metrics, config.yaml
CLEANING = "cleaning"  # of what is done to checkpoints outside of a save: what is left of a killed run is removed
_TEMPORARY = re.compile(r"\.tmp-(.+)-\d+-[0-9a-f]{8}-\d+-\d+")
_CHECKPOINT = re.compile(r"\.?(model_(?:\d{7}|best|final))(?:-(\d{7})(?:-\d+)?)?")
_AGAIN = re.compile(r"(\.model_[a-z0-9]+-\d{7})-\d+")  # the name of the second hidden checkpoint of an iteration
_POINTER = "last_checkpoint"
_WATCHED_FILES = ("metrics.json", "config.yaml")


@dataclass(frozen=True, slots=True)
class Death:
    """Die ``moment`` ("before", "half", "after") the operation ``name``, or when its save is over without it."""

    name: str
    moment: str
    with_group: bool

    @property
    def label(self) -> str:
        return label_of(self.name)


def label_of(name: str) -> str:
    return name.partition(" | ")[0]


def final_name(entry: str) -> str:
    """What a hidden entry that is being written will be called."""
    while match := _TEMPORARY.fullmatch(entry):
        entry = match[1]
    return entry


def is_in_save(name: str) -> bool:
    """Whether an operation belongs to the saving of a checkpoint."""
    return label_of(name) not in (OTHER, CLEANING)


class Operations:
    """Watches the operations of this process inside ``folder``."""

    def __init__(self, folder: Path, log: Path, death: Death | None) -> None:
        self._folder = str(folder)
        self._death = death
        self._pid = os.getpid()
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._write, self._fsync = os.write, os.fsync  # before they are wrapped
        self._thread = threading.local()  # label: the save that a thread is busy with; counts: its operations

    def install(self) -> None:
        for name in ("mkdir", "rmdir", "unlink", "remove"):
            self._wrap(os, name, lambda path, *_, dir_fd=None, **__: self._path(path, dir_fd))
        for name in ("rename", "replace", "link"):
            self._wrap(os, name, lambda source, target, **_: self._path(target) or self._path(source))
        self._wrap(os, "symlink", lambda source, target, *_, **__: self._path(target))
        self._wrap(os, "fsync", lambda descriptor: self._path_of(descriptor))
        self._wrap(os, "write", lambda descriptor, data: self._rows_file(descriptor))
        self._wrap_open()
        self._wrap_exchange()

    def around(self, kind: str, path: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Do ``call``, which is the operation ``kind`` on ``path``, as the plan says."""
        name = self._begin(kind, path, arguments)
        self._die_if("before", name)
        if kind == "write":
            self._die_if("half", name, lambda: self._write(arguments[0], arguments[1][: len(arguments[1]) // 2]))
        else:
            self._die_if("half", name)
        result = call()
        self.done(name)
        return result

    def done(self, name: str) -> None:
        self._say(f"+ {name}")
        if name.split(" #")[0].endswith(f"replace {_POINTER}"):
            self._say(f"= {Path(self._folder, _POINTER).read_text()}")
        self._die_if("after", name)

    def begin_file(self, path: str) -> str:
        """The name of the operation of writing a file, which is about to be opened."""
        name = self._begin("write", path, ())
        self._die_if("before", name)
        return name

    def dies_half_way(self, name: str) -> bool:
        return self._is_here("half", name)

    def die(self, name: str, moment: str) -> None:
        self._say(f"! {moment} {name}")
        if self._death is not None and self._death.with_group:
            os.killpg(0, signal.SIGKILL)
        os.kill(self._pid, signal.SIGKILL)

    def _begin(self, kind: str, path: str, arguments: tuple[Any, ...]) -> str:
        """Name the operation. The making of a hidden entry for a checkpoint begins its save."""
        relative = os.path.relpath(path, self._folder)
        first = relative.split(os.sep)[0]
        entry = final_name(first)
        is_missed, temporary = False, entry != first
        if temporary and first == relative and kind in ("mkdir", "symlink") and _CHECKPOINT.fullmatch(entry):
            is_missed = self._enter(_label(entry, str(arguments[0]) if kind == "symlink" else ""))
        is_checkpoint = entry == _POINTER or _CHECKPOINT.fullmatch(entry) is not None
        if first == ".":  # of the folder itself: it belongs to what this thread did last
            is_checkpoint = getattr(self._thread, "is_checkpoint", False)
        self._thread.is_checkpoint = is_checkpoint
        label = getattr(self._thread, "label", CLEANING) if is_checkpoint else OTHER
        shown = relative.replace(first, f"tmp({entry})", 1) if temporary else relative
        shown = _AGAIN.sub(r"\1", shown)
        name = f"{label} | {kind} {shown}"
        if not hasattr(self._thread, "counts"):
            self._thread.counts = Counter()
        self._thread.counts[name] += 1
        if self._thread.counts[name] > 1:
            name = f"{name} #{self._thread.counts[name]}"
        if is_missed:
            self.die(name, "before")
        return name

    def _enter(self, label: str) -> bool:
        """Begin a save. True: it is the one behind that in which this process should have died."""
        before = getattr(self._thread, "label", None)
        if label == before:
            return False
        self._thread.label = label
        self._thread.counts = Counter()
        return self._death is not None and self._death.label in ((OTHER, CLEANING) if before is None else (before,))

    def _is_here(self, moment: str, name: str) -> bool:
        return self._death is not None and self._death.name == name and self._death.moment == moment

    def _die_if(self, moment: str, name: str, first: Callable[[], object] | None = None) -> None:
        if self._is_here(moment, name):
            if first is not None:
                first()
            self.die(name, moment)

    def _say(self, line: str) -> None:
        self._write(self._log, f"{line}\n".encode())

    def _path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path as text if it is inside the folder, and one of this process."""
        if isinstance(path, int) or os.getpid() != self._pid:
            return None
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        text = os.path.abspath(text)
        return text if text == self._folder or text.startswith(self._folder + os.sep) else None

    def _path_of(self, descriptor: Any) -> str | None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        return self._path(os.readlink(f"/proc/self/fd/{number}"))

    def _rows_file(self, descriptor: int) -> str | None:
        path = self._path_of(descriptor)
        return path if path is not None and path.endswith("metrics.json") else None

    def _wrap(self, module: Any, name: str, path_of: Callable[..., str | None]) -> None:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            path = path_of(*args, **kwargs)
            if path is None:
                return real(*args, **kwargs)
            kind = "unlink" if name == "remove" else name
            return self.around(kind, path, args, lambda: real(*args, **kwargs))

        setattr(module, name, call)

    def _wrap_open(self) -> None:
        real = io.open

        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            path = self._path(file) if set(mode) & set("wxa") else None
            if path is None or not self._is_watched(path):
                return real(file, mode, *args, **kwargs)
            name = self.begin_file(path)
            return WatchedFile(real(file, mode, *args, **kwargs), self, name)

        builtins.open = io.open = call  # type: ignore[assignment]

    def _is_watched(self, path: str) -> bool:
        first = os.path.relpath(path, self._folder).split(os.sep)[0]
        entry = final_name(first)
        is_checkpoint = entry == _POINTER or _CHECKPOINT.fullmatch(entry) is not None
        return is_checkpoint or entry in _WATCHED_FILES

    def _wrap_exchange(self) -> None:
        """Linux's renameat2 has no function in Python, so it is called through ctypes."""
        real = ctypes.CDLL

        def load(name: Any, *args: Any, **kwargs: Any) -> Any:
            library = real(name, *args, **kwargs)
            return WatchedLibrary(library, self) if name is None else library

        ctypes.CDLL = load  # type: ignore[assignment, misc]

    def exchange(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        path = self._path(arguments[3])
        if path is None:
            return function(*arguments)
        return self.around("exchange", path, arguments, lambda: function(*arguments))


class WatchedFile:
    """An open file, the writing of which is one operation from before it is opened until it is closed."""

    def __init__(self, file: Any, operations: Operations, name: str) -> None:
        self._file = file
        self._operations = operations
        self._name = name

    def write(self, data: Any) -> Any:
        if self._operations.dies_half_way(self._name) and len(data) > 1:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._operations.die(self._name, "half")
        return self._file.write(data)

    def close(self) -> None:
        if self._file.closed:
            return
        self._file.close()
        if self._operations.dies_half_way(self._name):  # nothing was written into it
            self._operations.die(self._name, "half")
        self._operations.done(self._name)

    def __enter__(self) -> "WatchedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class WatchedLibrary:
    """The C library, with renameat2 as an operation."""

    def __init__(self, library: Any, operations: Operations) -> None:
        self._library = library
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if name != "renameat2":
            return found
        return lambda *arguments: self._operations.exchange(found, arguments)


def _label(entry: str, link_target: str) -> str:
    """What a save is called: ``model_0000013``, or with its iteration where the name is saved again and again."""
    found = _CHECKPOINT.fullmatch(entry)
    assert found is not None
    digits = re.findall(r"\d{7}", link_target)
    iteration = found[2] or (digits[-1] if digits else None)
    return f"{found[1]}@{iteration}" if iteration else found[1]

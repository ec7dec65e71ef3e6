"""Atomic writes of files and folders: write a temporary sibling, sync, rename, sync the parent folder.

It imports no other module of the package, so every module may import it. A rename is atomic only within one
filesystem, so temporary entries are hidden siblings of their target: ``.tmp-<name>-<pid>-<host>-<start>-<count>``.
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import itertools
import logging
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger("trainwright.checkpoint")
PathLike = str | os.PathLike[str]
Content = bytes | Callable[[], bytes]  # of a file, or what returns it
Writer = Callable[[BinaryIO], object]  # writes its content into an open binary file

_TEMPORARY = re.compile(r"\.tmp-.+-(?P<pid>\d+)-(?P<host>[0-9a-f]{8})-(?P<start>\d+)-\d+", re.DOTALL)
_LOCK = "lock"  # a temporary file of a process that is writing
_ABANDONED_S = 24 * 3600  # age of an entry of another machine, whose processes are not visible here
_counter = itertools.count()


def temporary_sibling(path: PathLike) -> Path:
    """A new hidden name next to ``path`` that identifies the process. Creates nothing."""
    path = Path(path)
    return path.with_name(f".tmp-{path.name}-{'-'.join(_process(os.getpid()))}-{next(_counter)}")


def clean_sibling(path: PathLike) -> Path:
    """As `temporary_sibling`, for what takes long to write: first deletes what killed processes have left beside it."""
    with contextlib.suppress(OSError):  # there may be no such folder, or no right to delete
        remove_stale(Path(path).parent)
    return temporary_sibling(path)


def is_temporary(name: str) -> bool:
    """Whether an entry's name is one that `temporary_sibling` makes."""
    return _TEMPORARY.fullmatch(name) is not None


def atomic_write(path: PathLike, content: bytes | Writer) -> None:
    """Replace ``path`` atomically by a synced file with ``content``: readers never see a partial file."""
    with _replacing(path) as temporary, open(temporary, "xb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            content(file)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _replacing(path: PathLike) -> Iterator[Path]:
    """A temporary name for the block to create; afterwards it is renamed to ``path``, or deleted after an error."""
    temporary = temporary_sibling(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise named(error, path) from None
        raise
    sync_folder(Path(path).parent)


def commit_folder(temporary: PathLike, final: PathLike, synced: Collection[str] = ()) -> None:
    """Sync a written folder and rename it to ``final``, which must not exist or must be an empty folder.

    ``synced``: files whose content is on the disk already.
    """
    temporary, final = Path(temporary), Path(final)
    _sync_tree(temporary, synced)
    if os.name == "nt" and final.exists():  # a rename does not replace an empty folder there
        final.rmdir()
    os.rename(temporary, final)
    sync_folder(final.parent)


def _sync_tree(path: Path, synced: Collection[str] = ()) -> None:
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            file = Path(folder, name)
            if file.relative_to(path).as_posix() not in synced:
                sync_file(file)
        sync_folder(folder)


def make_folders(path: PathLike) -> None:
    """Make a folder, and those above it, unless they exist. What is in a new folder would be lost with its name, so
    that the names are synced."""
    path = Path(os.path.abspath(path))
    new = list(itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        with contextlib.suppress(PermissionError):  # a folder of others that may be changed, and not read
            sync_folder(folder.parent)


def swap_folders(new: PathLike, current: PathLike) -> None:
    """Exchange the names of two committed folders atomically: ``current`` always names a complete folder.

    A filesystem that cannot exchange names (NFS, for example) needs three renames; between two of them the name does
    not exist, and both folders have hidden names.
    """
    new, current = Path(new), Path(current)
    if not _exchange(new, current):
        aside = temporary_sibling(current)
        done: list[tuple[Path, Path]] = []
        try:
            for source, target in ((current, aside), (new, current), (aside, new)):
                os.rename(source, target)
                done.append((source, target))
        except BaseException:
            for source, target in reversed(done):
                os.rename(target, source)
            raise
    sync_folder(current.parent)


def replace_link(link: PathLike, target: PathLike) -> None:
    """Point the symbolic link ``link`` at ``target`` atomically, with a relative path, so that folders can move."""
    with _replacing(link) as temporary:
        # Real paths, because the path to the folder may contain other links.
        os.symlink(os.path.relpath(real_path(target), real_path(Path(link).parent)), temporary)


@functools.cache
def has_links(folder: Path) -> bool:
    """Whether ``folder`` can hold symbolic links: a mounted cloud drive, exFAT or Windows may not. Tried once."""
    probe = temporary_sibling(folder / "link")
    try:
        os.symlink("target", probe)
        os.unlink(probe)
    except OSError as error:
        logger.info(
            "%s: no symbolic links here (%s): names such as model_best are folders of their own, of hard links or"
            " copies.",
            folder,
            error.strerror,
        )
        return False
    return True


def point_at(name: PathLike, folder: PathLike) -> None:
    """Make ``name`` a link to ``folder`` atomically; where there are no links, a folder with the same files."""
    name, folder = Path(name), real_path(folder)
    if has_links(name.parent):
        replace_link(name, folder)
        return
    temporary = temporary_sibling(name)
    try:
        for source in sorted(path for path in folder.rglob("*") if path.is_file()):
            target = temporary / source.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not hard_link(source, target):
                shutil.copyfile(source, target)
        if name.exists():
            _sync_tree(temporary)
            swap_folders(temporary, name)
        else:
            commit_folder(temporary, name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def hard_link(source: Path, target: Path) -> bool:
    """Make a second name of a file that never changes. Returns False if the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def remove_folder(path: PathLike) -> None:
    """Delete a folder. It is renamed first, so that a crash leaves no partial folder under its name.

    If the rename cannot be synced, the folder keeps its name: another call can delete it.
    """
    temporary = temporary_sibling(path)
    os.rename(path, temporary)
    try:
        sync_folder(temporary.parent)
    except BaseException:
        os.rename(temporary, path)
        raise
    shutil.rmtree(temporary)


def remove_stale(folder: PathLike) -> list[Path]:
    """Delete the temporary entries that dead processes left in ``folder``; returns the deleted paths.

    For this machine, the process table shows which processes are dead. For another machine (each container has its
    own host name), a process is dead if it no longer holds its lock; without a lock, entries expire after a day.
    """
    removed, failure = [], None
    matches = [(entry, _TEMPORARY.fullmatch(entry.name)) for entry in _entries(folder)]
    # Find all entries before deleting the first: a lock file shows the state of the others.
    for entry in [entry for entry, match in matches if match is not None and _is_abandoned(entry, match)]:
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
            removed.append(entry)
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return removed


def is_used_by_others(folder: PathLike) -> bool:
    """Whether ``folder`` has temporary entries of other processes."""
    own = _process(os.getpid())
    matches = (_TEMPORARY.fullmatch(entry.name) for entry in _entries(folder))
    return any(match.group("pid", "host", "start") != own for match in matches if match is not None)


@contextlib.contextmanager
def locked(folder: PathLike) -> Iterator[None]:
    """Mark the temporary entries of this process in ``folder`` as in use.

    It holds a file lock, which the system releases when the process ends and which other containers see.
    """
    lock = temporary_sibling(Path(folder, _LOCK))
    descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    held_locks.add(descriptor)
    try:
        with contextlib.suppress(ImportError, OSError):  # Windows; a filesystem without locks
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        if os.name == "nt":  # an open file cannot be deleted there
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(lock)
        held_locks.discard(descriptor)
        if os.name != "nt":
            os.close(descriptor)


_processes: dict[int, tuple[str, str, str]] = {}  # by pid: this one
held_locks = set[int]()  # descriptors of locks, those of output folders too


def _after_fork() -> None:
    """A worker of a loader, which may outlive its killed trainer, must not hold its locks; it is another process."""
    for descriptor in held_locks:
        os.close(descriptor)
    held_locks.clear()
    _processes.clear()  # a pid may be reused


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _is_abandoned(entry: Path, match: re.Match[str]) -> bool:
    held = _holds_lock(entry.parent, match)
    if match["host"] == _host() and os.name != "nt":
        # Two containers may have the same host name, and processes of the other one are not visible here.
        return _start_time(int(match["pid"])) != int(match["start"]) and not held
    if held is not None:
        return not held
    try:
        return time.time() - os.lstat(entry).st_mtime > _ABANDONED_S
    except OSError:
        return False


def _holds_lock(folder: Path, match: re.Match[str]) -> bool | None:
    """Whether the process of a temporary entry holds a lock; None if it has no lock file or locks are unsupported."""
    try:
        import fcntl
    except ImportError:
        return None
    held = None
    for lock in folder.glob(f".tmp-{_LOCK}-{match['pid']}-{match['host']}-{match['start']}-*"):
        try:
            descriptor = open_regular(lock, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = held or False
        except BlockingIOError:
            held = True
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return held


def is_at(descriptor: int, path: PathLike) -> bool:
    """Whether an open file is still at its path: it may have been deleted or moved since."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def is_about_access(error: OSError) -> bool:
    """Whether an error says that a file cannot be reached now, not that it is absent, or of another kind.

    Permissions, a connection, a limit of open files: the file may be complete, and another try may succeed.
    """
    return not isinstance(error, FileNotFoundError) and error.errno not in _ABOUT_PATHS


_ABOUT_PATHS = {errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG}


def irregular(path: PathLike) -> str | None:
    """The kind of a path that is not a regular file, such as "a pipe"; None for a regular file or a missing path."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return "a link in a circle of links" if error.errno == errno.ELOOP else None
    if stat.S_ISREG(mode):
        return None
    kinds = {"a folder": stat.S_ISDIR, "a pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK}
    return next((name for name, is_kind in kinds.items() if is_kind(mode)), "a device")


def is_left_out(path: Path) -> bool:
    """Whether something other than a file has the name, so that the file is not written; logs a warning."""
    kind = irregular(path)
    if kind is not None:
        logger.warning("%s: is %s, so this file is not written; the run continues without it.", path, kind)
    return kind is not None


def open_regular(path: PathLike, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, which may be created, and return its descriptor. Does not block on a pipe."""
    if (kind := irregular(path)) is None:
        flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags, 0o666)  # of which the umask removes rights
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        kind = "another kind of file"  # replaced after the check above
    raise OSError(errno.EINVAL, f"a regular file is needed here, and this is {kind}", str(path))


def read_regular(path: PathLike) -> bytes:
    """The content of a regular file."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def real_path(path: PathLike) -> Path:
    """``path`` with links resolved; does not raise for a loop of links, unlike `Path.resolve`."""
    return Path(os.path.realpath(path))


def relative_path(path: PathLike, start: PathLike = os.curdir) -> str:
    """``path`` from ``start`` on, with slashes; ``path`` itself on another drive, or without a working folder."""
    try:
        return os.path.relpath(path, start).replace(os.sep, "/")
    except (OSError, ValueError):
        return str(path)


def named(error: OSError, path: PathLike) -> OSError:
    """The same error with ``path``, the name that the user knows, instead of the temporary name."""
    return type(error)(error.errno, error.strerror, str(path)) if error.errno is not None else error


def sync_file(path: PathLike) -> None:
    """Wait until a file's content is on disk."""
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows syncs only what it may write
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: PathLike) -> None:
    """Wait until a folder's entries are on disk, if the system supports that."""
    if os.name == "nt":  # a folder cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems sync names by themselves
            raise
    finally:
        os.close(descriptor)


def _entries(folder: PathLike) -> list[Path]:
    try:
        return sorted(Path(folder).iterdir())
    except FileNotFoundError:
        return []


def _process(pid: int) -> tuple[str, str, str]:
    """The identity of a running process, which does not change: its pid, host and start time."""
    if pid not in _processes:
        found = str(pid), _host(), str(start := _start_time(pid))
        if start < 0:  # it cannot be read now
            return found
        _processes[pid] = found
    return _processes[pid]


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _start_time(pid: int) -> int:
    """Start time of a process in clock ticks; -1 for a dead one. Distinguishes processes that reuse a pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1 if Path("/proc/self/stat").exists() else _start_time_without_proc(pid)
    fields = stat.rpartition(")")[2].split()  # the program's name, in parentheses, may hold anything
    return -1 if fields[0] in "ZX" else int(fields[19])  # a zombie writes no more


def _start_time_without_proc(pid: int) -> int:
    if os.name == "nt":  # os.kill would end the process there
        return 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except PermissionError:
        pass
    return 0


def _exchange(first: Path, second: Path) -> bool:
    """Linux's atomic exchange of two names; False if the system or the filesystem does not support it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    at_fdcwd, rename_exchange = -100, 2
    if renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))

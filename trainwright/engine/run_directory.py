"""The folder a run writes into, opened only when nothing can be lost by it.

A folder that holds no run is opened at once. One that does is opened when the new run has made its first step: a
run that cannot start leaves an earlier one as it was. A run begun anew (not resumed) then moves the earlier one
aside first.
"""

import copy
import json
import logging
import logging.handlers
import os
import re
import weakref
from itertools import count
from pathlib import Path
from typing import Any

from trainwright.checkpoint.files import atomic_write, irregular, open_regular
from trainwright.checkpoint.rank_errors import raised_together
from trainwright.config.errors import ConfigError
from trainwright.config.secrets import RedactingFormatter, remember_secrets
from trainwright.engine.run_files import EARLIER_RUNS, Layout, RunFiles
from trainwright.events.log_file import LogFile
from trainwright.hooks.base import HookBase
from trainwright.parallel.dist import get_rank, get_world_size, is_main_process, synchronize

logger = logging.getLogger("trainwright.engine")

_locks: set[int] = set()  # descriptors that this process holds a lock by
LOG_FORMAT = "[%(asctime)s %(name)s %(levelname)s] %(message)s"
_MAX_ROW = 1 << 20  # bytes of the last row that is read


def _is_config(head: bytes) -> bool:
    """Whether this is the beginning of a completed configuration: the key is one that only we write."""
    return re.search(rb"^train:", head, re.MULTILINE) is not None and b"consumed_train_samples:" in head


class RunFolder:
    """``path`` with a run's ``config.yaml`` and ``log.txt``. ``open`` may be called again and does its work once.

    What runs did not write is never replaced or moved (see :mod:`trainwright.engine.run_files`).
    """

    layout = Layout("config.yaml", _is_config)
    setting = "train.output_dir"  # in messages

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path)
        self.resume = resume
        self.is_open = False
        self.files = RunFiles(self.path, self.layout)
        self._config: Any = None
        self._lock: int | None = None
        self._early_records = logging.handlers.MemoryHandler(capacity=100_000, flushLevel=logging.CRITICAL + 1)
        logging.getLogger("trainwright").addHandler(self._early_records)
        weakref.finalize(self, _detach, self._early_records)  # a trainer that is dropped untrained logs no more

    def holds_a_run(self) -> bool:
        """Whether an earlier run has left metrics or checkpoints here."""
        metrics = self.path / "metrics.json"
        return self.files.has_checkpoints() or (metrics.is_file() and self.files.is_own("metrics.json"))

    def contains(self, path: str | Path) -> bool:
        """Whether ``path``, or what it links to, lies in this folder and is not a part of an earlier run."""
        path = os.path.abspath(os.path.expanduser(path))
        inside = [
            os.path.relpath(path, self.path.absolute()),
            os.path.relpath(os.path.realpath(path), os.path.realpath(self.path)),
        ]
        return any(name.split(os.sep)[0] not in (os.curdir, os.pardir, EARLIER_RUNS) for name in inside)

    def last_results(self, prefix: str) -> dict[str, float]:
        """The figures in the last row of metrics.json whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): x for name, x in self._last_row().items() if name.startswith(prefix)}

    def _last_row(self) -> dict[str, Any]:
        """The last row of metrics.json; empty where there is none, or where it is torn or no row of ours."""
        try:
            with open(open_regular(self.path / "metrics.json"), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_ROW))
                last = file.read().splitlines()[-1:]
            row = json.loads(last[0]) if last else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return row if isinstance(row, dict) else {}

    def check_free(self) -> None:
        """Raise if another process trains in this folder."""
        if self.path.is_dir():
            self.lock()
            self._unlock()

    def lock(self) -> None:
        """Keep the folder for this process until ``close``.

        Raises:
            ConfigError: another process trains in it.
        """
        if self._lock is not None or not is_main_process():
            return
        self._lock = lock_folder(self.path, self.setting)

    def _unlock(self) -> None:
        if self._lock is not None:
            unlock_folder(self._lock)
            self._lock = None

    def recover(self) -> None:
        """Finish moving an earlier run aside, where a start before was ended in the middle of that. For all ranks."""
        with raised_together():
            if is_main_process() and self.files.is_moving():
                self.lock()
                self.files.complete_move()
                self._unlock()

    def check_names(self) -> None:
        """Raise if files that no run wrote have the names of those that this run will write.

        Raises:
            ConfigError: names them all.
        """
        layout, path = self.layout, self.path
        names = [*layout.names(get_world_size()), *([layout.card] if layout.card else [])]
        foreign = [name for name in names if irregular(path / name) is None and not self.files.is_own(name)]
        links = [entry.name for entry in path.iterdir() if entry.is_symlink()] if path.is_dir() else []
        foreign += [name for name in links if layout.link_name.fullmatch(name) and not self.files.is_own_link(name)]
        if os.path.lexists(path / EARLIER_RUNS) and not (path / EARLIER_RUNS).is_dir() and not self.resume:
            foreign.append(EARLIER_RUNS)
        if foreign:
            raise ConfigError(
                f"{self.setting}: {path} holds what no run wrote under names that this run will use:"
                f" {', '.join(foreign)}. Move or rename it, or give another folder."
            )

    def prepare(self, config: Any) -> None:
        """Take the configuration to be written, and open the folder now if nothing is in it."""
        self._config = config
        remember_secrets(config)
        self.check_free()
        if is_main_process():
            self.check_names()
        if not self.holds_a_run():
            self.open()

    def open(self) -> None:
        """Move an earlier run aside (unless it is resumed), write ``config.yaml``, and begin ``log.txt``."""
        if self.is_open:
            return
        self.is_open = True
        if is_main_process():
            if not self.resume and self.holds_a_run():
                place = self.files.move_aside()
                logger.info(
                    "%s held an earlier run, which is now in %s. (Resuming would have continued it.)", self.path, place
                )
            self.files.add([*self.layout.names(get_world_size()), *self.files.event_names()])
            if self._config is not None:
                self.write_config(self._config)
        synchronize()
        self._log_to_file()

    def write_config(self, config: Any) -> None:
        """Make the folder and write ``config.yaml`` into it: what was asked for, without whether this start resumed."""
        from omegaconf import open_dict

        from trainwright.config.lazy.serialization import to_yaml

        config = copy.deepcopy(config)  # objects in it are shared, not copied
        with open_dict(config):
            config.train.pop("resume", None)
        path = self.path / self.layout.config
        if not is_left_out(path):
            self._keep_other_version(path, to_yaml(config, path))

    def write_card(self, text: str) -> None:
        """Write the model card, unless a file that no run wrote has its name by now."""
        assert self.layout.card is not None
        path = self.path / self.layout.card
        if is_left_out(path):
            return
        if not self.files.is_own(self.layout.card):
            logger.warning("%s: not written by a run, so it stays, and the model card is not written.", path)
        else:
            self.files.add([self.layout.card])
            atomic_write(path, text.encode())

    def _keep_other_version(self, path: Path, content: bytes) -> None:
        """Write a file; one of other content that is there is kept as ``name.1.suffix``, ``.2``, …"""
        self.files.add([path.name])
        if path.exists() and path.read_bytes() != content:
            versions = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
            kept = next(version for version in versions if not os.path.lexists(version))
            self.files.add([kept.name])
            path.rename(kept)
        if not path.exists() or path.read_bytes() != content:
            atomic_write(path, content)

    def close(self) -> None:
        """Stop logging here. What was logged before the folder was opened is dropped if it never was."""
        self._unlock()
        _detach(self._early_records)

    def _log_to_file(self) -> None:
        rank = get_rank()
        path = self.path / ("log.txt" if rank == 0 else f"log.txt.rank{rank}")
        if is_left_out(path):
            _detach(self._early_records)
            return
        handler = LogFile(path)
        handler.setFormatter(RedactingFormatter(LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
        self._early_records.setTarget(handler)
        self._early_records.flush()
        self._early_records.capacity = 1  # each record goes through at once


def is_left_out(path: Path) -> bool:
    """Whether something else than a file has the name, so that the file is not written; a warning says so."""
    kind = irregular(path)
    if kind is not None:
        logger.warning("%s: is %s, so this file is not written; the run continues without it.", path, kind)
    return kind is not None


def lock_folder(path: Path, setting: str = "output_dir") -> int | None:
    """Lock a folder against other processes; returns what is closed to free it, None where locks do not exist.

    Raises:
        ConfigError: another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the system however the process ends
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"{setting}: another run is training in {path}. Wait for it to end, or give another folder."
        ) from error
    except OSError:  # a filesystem without locks
        logger.debug("%s: this filesystem has no locks.", path)
    _locks.add(descriptor)
    return descriptor


def unlock_folder(descriptor: int) -> None:
    """Free what :func:`lock_folder` locked. In a forked process, which has no part in it, nothing is done."""
    if descriptor in _locks:
        import fcntl

        _locks.remove(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _leave_locks() -> None:
    """In a forked process: a worker of a loader outlives a killed trainer by seconds, and a restart need not wait."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


def _detach(handler: logging.handlers.MemoryHandler) -> None:
    logging.getLogger("trainwright").removeHandler(handler)
    target = handler.target
    handler.setTarget(None)
    handler.close()
    if target is not None:
        target.close()


class OpenRunFolder(HookBase):
    """Open the run's folder when the first step is made. Stands first, before any hook that writes there."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def before_train(self) -> None:
        if self.trainer.start_iter >= self.trainer.max_iter:  # a run that is resumed at its end makes no step
            self._folder.open()

    def after_step(self) -> None:
        if not self._folder.is_open:
            self._folder.open()

    def after_train(self) -> None:
        # No step was made: what little was measured must not be written over the earlier run's metrics.
        if not self._folder.is_open:
            self.trainer.storage.load_state_dict({"samples": 0, "written": None, "scalars": {}})

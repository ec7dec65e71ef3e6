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
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from trainwright.checkpoint.files import temporary_sibling
from trainwright.config.errors import ConfigError
from trainwright.config.secrets import RedactingFormatter, remember_secrets
from trainwright.events.log_file import LogFile
from trainwright.hooks.base import HookBase
from trainwright.parallel.dist import get_rank, is_main_process, synchronize

logger = logging.getLogger("trainwright.engine")

EARLIER_RUNS = "earlier_runs"
# What a run writes. The folder may hold other things of the user's, and these are not ours to move.
_WRITTEN_BY_A_RUN = (
    "config.yaml",
    "config.*.yaml",
    "log.txt*",
    "metrics.json*",
    "last_checkpoint",
    "events.out.tfevents.*",
    "profile",
)
_locks: set[int] = set()  # descriptors that this process holds a lock by
LOG_FORMAT = "[%(asctime)s %(name)s %(levelname)s] %(message)s"


class RunFolder:
    """``path`` with a run's ``config.yaml`` and ``log.txt``. ``open`` may be called again and does its work once."""

    signs_of_a_run: tuple[str, ...] = ("metrics.json", "last_checkpoint", "model_*")
    written_by_a_run: tuple[str, ...] = _WRITTEN_BY_A_RUN
    checkpoints: tuple[str, ...] = ("model_*", ".model_*")

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path)
        self.resume = resume
        self.is_open = False
        self._config: Any = None
        self._lock: int | None = None
        self._early_records = logging.handlers.MemoryHandler(capacity=100_000, flushLevel=logging.CRITICAL + 1)
        logging.getLogger("trainwright").addHandler(self._early_records)
        weakref.finalize(self, _detach, self._early_records)  # a trainer that is dropped untrained logs no more

    def holds_a_run(self) -> bool:
        """Whether an earlier run has left metrics or checkpoints here."""
        return any(next(self.path.glob(sign), None) is not None for sign in self.signs_of_a_run)

    def has_row(self, iteration: int) -> bool:
        """Whether metrics.json has come to ``iteration``: that of the final evaluation is the last thing written."""
        path = self.path / "metrics.json"
        last = path.read_bytes().splitlines()[-1:] if path.is_file() else []
        try:
            return bool(last) and json.loads(last[0])["iteration"] >= iteration
        except (ValueError, LookupError, TypeError):  # torn, or another's file
            return False

    def last_results(self, prefix: str) -> dict[str, float]:
        """The figures in the last row of metrics.json whose names begin so, by the rest of their names."""
        path = self.path / "metrics.json"
        last = path.read_bytes().splitlines()[-1:] if path.is_file() else []
        try:
            row = json.loads(last[0]) if last else {}
            return {name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}
        except (ValueError, TypeError):  # torn, or another's file
            return {}

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
        self._lock = lock_folder(self.path)

    def _unlock(self) -> None:
        if self._lock is not None:
            unlock_folder(self._lock)
            self._lock = None

    def prepare(self, config: Any) -> None:
        """Take the configuration to be written, and open the folder now if nothing is in it."""
        self._config = config
        remember_secrets(config)
        self.check_free()
        if not self.holds_a_run():
            self.open()

    def open(self) -> None:
        """Move an earlier run aside (unless it is resumed), write ``config.yaml``, and begin ``log.txt``."""
        if self.is_open:
            return
        self.is_open = True
        if is_main_process():
            if not self.resume and self.holds_a_run():
                self._move_earlier_run_aside()
            if self._config is not None:
                self.write_config(self._config)
        synchronize()
        self._log_to_file()

    def write_config(self, config: Any) -> None:
        """Make the folder and write ``config.yaml`` into it: what was asked for, without whether this start resumed."""
        from omegaconf import open_dict

        from trainwright.config.lazy import LazyConfig

        self.path.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(config)  # objects in it are shared, not copied
        with open_dict(config):
            config.train.pop("resume", None)
        keep_other_version(self.path / "config.yaml", lambda path: LazyConfig.save(config, path))

    def close(self) -> None:
        """Stop logging here. What was logged before the folder was opened is dropped if it never was."""
        self._unlock()
        _detach(self._early_records)

    def _move_earlier_run_aside(self) -> None:
        shelf = self.path / EARLIER_RUNS
        number = 1 + max((int(p.name) for p in shelf.glob("[0-9]*") if p.name.isdigit()), default=0)
        place = shelf / f"{number:03d}"
        place.mkdir(parents=True)
        for entry in self._entries_of_the_run():
            entry.rename(place / entry.name)  # links among them are relative, so they keep pointing at their neighbours
        logger.info("%s held an earlier run, which is now in %s. (Resuming would have continued it.)", self.path, place)

    def _entries_of_the_run(self) -> list[Path]:
        entries = [entry for pattern in self.written_by_a_run for entry in self.path.glob(pattern)]
        for pattern in self.checkpoints:
            entries += [e for e in self.path.glob(pattern) if e.is_symlink() or (e / "manifest.json").is_file()]
        return entries

    def _log_to_file(self) -> None:
        rank = get_rank()
        handler = LogFile(self.path / ("log.txt" if rank == 0 else f"log.txt.rank{rank}"))
        handler.setFormatter(RedactingFormatter(LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
        self._early_records.setTarget(handler)
        self._early_records.flush()
        self._early_records.capacity = 1  # each record goes through at once


def keep_other_version(path: Path, save: Callable[[Path], object]) -> None:
    """Save a file whole; one of other content that has the name already is kept as ``name.1.suffix``, ``.2``, …"""
    written = temporary_sibling(path)
    save(written)
    if path.exists() and path.read_bytes() != written.read_bytes():
        number = next(n for n in count(1) if not path.with_name(f"{path.stem}.{n}{path.suffix}").exists())
        path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))
    written.replace(path)


def lock_folder(path: Path) -> int | None:
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
            f"train.output_dir: another run is training in {path}. Wait for it to end, or give another folder."
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

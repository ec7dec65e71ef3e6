"""The output folder of a run, opened so that no data is lost.

A folder without a run is opened at once. A folder with an earlier run is opened after the first step: a run that cannot
start leaves the earlier one unchanged. A run that is not resumed then first moves the earlier one into
``earlier_runs``.
"""

import copy
import functools
import logging
import logging.handlers
import os
import re
import weakref
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.base.dist import get_rank, get_world_size, is_main_process, raised_together, synchronize
from trainwright.base.errors import ConfigError
from trainwright.base.files import atomic_write, held_locks, irregular, is_left_out, make_folders, relative_path
from trainwright.config.secrets import RedactingFormatter, remember_secrets
from trainwright.engine.folder.files import EARLIER_RUNS, FileNames, RunFiles
from trainwright.engine.logs import LOG_FORMAT, LogFile
from trainwright.events.formats import (
    CSV_NAME,
    LOSSES_NAME,
    METRICS_NAME,
    RECORD_NAME,
    check_formats,
    parse_rows,
    read_tail,
)

if TYPE_CHECKING:
    from trainwright.config.spec import RunSpec


logger = logging.getLogger("trainwright.engine")

_MAX_ROW = 1 << 20  # bytes read for the last row


@functools.cache
def _warn_of_variable(setting: str, path: str) -> None:
    """Once for each path: a run may make several objects of its folder."""
    if re.search(r"\$\w|\$\{", path):
        logger.warning("%s: got %r, in which no variable is replaced. Write os.path.expandvars(...).", setting, path)


class RunFolder:
    """``path`` with a run's ``config.yaml`` and ``log.txt``. Repeated calls of ``open`` have no effect.

    Files that no run wrote are never replaced or moved (see :mod:`trainwright.engine.folder.files`).
    """

    file_names = FileNames("config.yaml")
    setting = "train.output_dir"  # in messages

    def __init__(self, path: str | Path, *, resume: bool, records: Iterable[logging.LogRecord] = ()) -> None:
        """``records``: logged before, and written into ``log.txt``, too."""
        _warn_of_variable(self.setting, str(path))
        self.path = Path(path).absolute()  # a program may change its working folder while it trains
        self.resume = resume
        self.is_open = False
        self.on_open: Callable[[], None] | None = None  # called once, by all ranks
        self._config: Any = None
        self._lock: int | None = None
        self._collect_records()
        self._early_records.buffer.extend(records)

    @property
    def files(self) -> RunFiles:
        return RunFiles(self.path, self.file_names)

    def _collect_records(self) -> None:
        self._early_records = _Records()
        logging.getLogger("trainwright").addHandler(self._early_records)
        weakref.finalize(self, _detach, self._early_records)  # also for a trainer that never trains

    def reopen(self) -> None:
        """Continue the run after ``close``: the next ``open`` resumes its files."""
        if self.is_open:
            self.is_open, self.resume = False, True
            self._collect_records()

    def holds_a_run(self) -> bool:
        """Whether the folder has metrics or checkpoints of an earlier run."""
        metrics = self.path / METRICS_NAME
        return self.files.has_checkpoints() or (metrics.is_file() and self.files.is_own(METRICS_NAME))

    def contains(self, path: str | Path) -> bool:
        """Whether ``path``, or the target of its link, is in this folder and not part of an earlier run."""
        path = os.path.abspath(os.path.expanduser(path))
        inside = [
            relative_path(path, self.path.absolute()),
            relative_path(os.path.realpath(path), os.path.realpath(self.path)),
        ]
        others = os.curdir, os.pardir, EARLIER_RUNS
        return any(not os.path.isabs(name) and name.split("/")[0] not in others for name in inside)

    def last_results(self) -> dict[str, float]:
        """The results of an evaluation in the last row of metrics.json, without ``eval_``."""
        last = [{}, *parse_rows(read_tail(self.path / METRICS_NAME, _MAX_ROW).splitlines())][-1]
        return {name.removeprefix("eval_"): value for name, value in last.items() if name.startswith("eval_")}

    def check_free(self) -> None:
        """Raise if another process trains in this folder, or if it is a checkpoint."""
        if (self.path / "manifest.json").is_file():
            raise ConfigError(
                f"{self.setting}: got {self.path}, a checkpoint; the folder of its run is {self.path.parent}."
            )
        if self.path.is_dir():
            self.lock()
            self._unlock()

    def lock(self) -> None:
        """Lock the folder for this process until ``close``.

        Raises:
            ConfigError: another process trains in it.
        """
        if self._lock is not None or not is_main_process():
            return
        try:
            import fcntl
        except ImportError:  # Windows
            return
        make_folder(self.path, self.setting)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it when the process ends
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                _log_no_locks(os.path.realpath(self.path), error.strerror)
                return
            raise ConfigError(
                f"{self.setting}: another run is training in {self.path}. Wait for it to end, or set another folder."
            ) from error
        held_locks.add(descriptor)
        self._lock = descriptor

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None and lock in held_locks:  # not in a forked process, which has closed it
            import fcntl

            held_locks.remove(lock)
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def recover(self) -> None:
        """Finish an interrupted move of an earlier run. Every rank must call this."""
        with raised_together():
            if is_main_process() and self.files.is_moving():
                self.lock()
                self.files.complete_move()
                self._unlock()

    def check_names(self) -> None:
        """Raise if files that no run wrote have names that this run will write.

        Raises:
            ConfigError: lists all of them.
        """
        file_names, path = self.file_names, self.path
        names = [*file_names.names(get_world_size()), *([file_names.card] if file_names.card else [])]
        foreign = [name for name in names if irregular(path / name) is None and not self.files.is_own(name)]
        links = [entry.name for entry in path.iterdir() if entry.is_symlink()] if path.is_dir() else []
        foreign += [name for name in links if file_names.link_name.fullmatch(name) and not self.files.is_own_link(name)]
        if os.path.lexists(path / EARLIER_RUNS) and not (path / EARLIER_RUNS).is_dir() and not self.resume:
            foreign.append(EARLIER_RUNS)
        if foreign:
            raise ConfigError(
                f"{self.setting}: {path} has files that no run wrote, under names that this run will use:"
                f" {', '.join(foreign)}. Move or rename them, or set another folder."
            )

    def prepare(self, config: Any) -> None:
        """Set the configuration to write, and open the folder now if it holds no run."""
        self._config = config
        remember_secrets(config)
        self.check_free()
        with raised_together():
            if is_main_process():
                self.check_names()
                if self.resume:
                    check_formats(self.path / RECORD_NAME)
                make_folder(self.path, self.setting)
        if not self.holds_a_run():
            self.open()

    def open(self) -> None:
        """Move an earlier run (unless it is resumed), write ``config.yaml``, and start ``log.txt``."""
        if self.is_open:
            return
        self.is_open = True
        if is_main_process():
            if not self.resume and self.holds_a_run():
                target = self.files.move_aside()
                logger.info(
                    "%s held an earlier run, which is now in %s. (Resuming would continue it.)", self.path, target
                )
            self.files.add([*self.file_names.names(get_world_size()), *self.files.event_names()])
            if self._config is not None:
                self.write_config(self._config)
        synchronize()
        on_open, self.on_open = self.on_open, None
        if on_open is not None:
            on_open()
        self._log_to_file()

    def write_config(self, config: Any) -> None:
        """Create the folder and write ``config.yaml``: the settings as requested, without ``train.resume``."""
        from omegaconf import open_dict

        from trainwright.config.lazy.serialization import to_yaml

        config = copy.deepcopy(config)  # objects in it are shared
        with open_dict(config):
            config.train.pop("resume", None)
        path = self.path / self.file_names.config_file
        if not is_left_out(path):
            self._keep_other_version(path, to_yaml(config, path))

    def write_card(self, text: str) -> None:
        """Write the model card, unless a file that no run wrote has its name."""
        assert self.file_names.card is not None
        path = self.path / self.file_names.card
        if is_left_out(path):
            return
        if not self.files.is_own(self.file_names.card):
            logger.warning("%s: not written by a run, so it is kept, and the model card is not written.", path)
        else:
            self.files.add([self.file_names.card])
            atomic_write(path, text.encode())

    def _keep_other_version(self, path: Path, content: bytes) -> None:
        """Write a file; an existing file with other content is kept as ``name.1.suffix``, ``.2``, …"""
        self.files.add([path.name])
        if path.exists() and path.read_bytes() != content:
            versions = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
            kept = next(version for version in versions if not os.path.lexists(version))
            self.files.add([kept.name])
            path.rename(kept)
        if not path.exists() or path.read_bytes() != content:
            atomic_write(path, content)

    def close(self) -> None:
        """Stop logging to the folder. Records of a folder that was never opened are dropped."""
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
        self._early_records.capacity = 1  # from now on each record is written at once


def make_folder(path: Path, setting: str) -> None:
    """Make the folder that a setting names, with those above it.

    Raises:
        ConfigError: the system refuses it.
    """
    try:
        make_folders(path)
    except OSError as error:
        if kind := "a file" if path.is_file() else irregular(path):
            raise ConfigError(f"{setting}: {str(path)!r} is {kind}; set a folder.") from error
        raise ConfigError(
            f"{setting}: the folder {path} cannot be made ({error.strerror}). Set a folder that can be written."
        ) from error


@functools.cache  # once per folder
def _log_no_locks(path: str, reason: str) -> None:
    logger.info("%s: this file system has no locks (%s): start one training at a time in this folder.", path, reason)


class _Records(logging.handlers.MemoryHandler):
    """Keeps log records until the log file is open; closed together with it."""

    def __init__(self) -> None:
        super().__init__(capacity=100_000, flushLevel=logging.CRITICAL + 1)

    def close(self) -> None:
        file = self.target
        super().close()
        if file is not None:
            file.close()


def _detach(handler: _Records) -> None:
    logging.getLogger("trainwright").removeHandler(handler)
    handler.close()


def file_names_of(spec: "RunSpec", path: Path | None = None) -> FileNames:
    """Where a run of the Python API writes. ``path``: its absolute output folder."""
    path = Path(spec.output_dir).absolute() if path is None else path
    events = spec.tensorboard or {"log_dir": None, "comment": ""}
    event_folder = relative_path(events["log_dir"] or Path(path, spec.logs_dir, events["comment"]), path)
    is_outside = os.path.isabs(event_folder) or event_folder.startswith(os.pardir)
    return FileNames(
        "training_config.yaml",
        tables=(METRICS_NAME, LOSSES_NAME, (Path(spec.logs_dir) / CSV_NAME).as_posix()),
        event_folders=() if is_outside else (event_folder,),
        checkpoints=Path(spec.checkpoints_dir).as_posix(),
        checkpoint_name=re.compile(r"\d+|model_best(_\d+)?|model_.+_best"),
        link_name=re.compile(r"epoch_\d+|final_epoch"),
        card="README.md" if spec.save_enabled else None,
    )


class TrainerFolder(RunFolder):
    """Run folder of ``Trainer``: ``training_config.yaml``, ``metrics.csv``, checkpoints and links to them."""

    setting = "TrainingConfig.output_dir"

    def __init__(self, path: str | Path, spec: "Callable[[], RunSpec]") -> None:
        """``spec`` returns the settings, some of which may be changed between two trainings."""
        self._spec = spec
        super().__init__(path, resume=False)

    @property
    def file_names(self) -> FileNames:  # type: ignore[override]
        return file_names_of(self._spec(), self.path)

    def write_config(self, config: Any) -> None:
        """Create the folder and write ``training_config.yaml`` into it."""
        path = self.path / self.file_names.config_file
        if not is_left_out(path):
            make_folders(self.path)
            config.save_to_yaml(path)

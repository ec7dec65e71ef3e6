"""``run.json``: what each start of a run used, and how it ended. Read by ``trainwright report`` and ``diff``."""

import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import site
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import xxhash

from trainwright.base.devices import count_cpus
from trainwright.base.dist import get_world_size, is_main_process
from trainwright.base.files import atomic_write, irregular
from trainwright.base.lazy_names import ring
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.manifest import read_manifest
from trainwright.checkpoint.saving import wait_for_saves
from trainwright.config.secrets import redact_command
from trainwright.data.fingerprint import described_data
from trainwright.engine.folder.run_folder import RunFolder
from trainwright.events.formats import CURVES_NAME, FORMATS, RECORD_NAME, read_starts
from trainwright.hooks.base import BestResult, HookBase, has_failed
from trainwright.hooks.due import Moment
from trainwright.hooks.signals import STOPS
from trainwright.models.checkpoint_files import class_name

logger = logging.getLogger("trainwright.engine")

_OF_BEST = ("metric", "value", "iteration", "is_higher_better")
MIN_SECONDS = 30.0  # of a training whose curves are drawn: importing matplotlib and drawing takes about one


class RunRecord(HookBase):
    """Open the run's folder after the first step; write ``run.json`` there, and complete it at the end.

    A resumed run adds another start. ``facts()`` returns what only the API knows; its ``data`` are data sets by
    name, which are described here. A training of at least 30 seconds gets a picture of its curves, too.
    ``after_saves(call)`` calls ``call`` when the checkpoints saved so far are on disk.

    Only the main process writes ``run.json``. It names a best result when the checkpoint of that is on disk.
    """

    slot, due = "prepare", (Moment.FIRST,)
    in_copies = False

    def __init__(
        self,
        folder: RunFolder,
        facts: Callable[[], Mapping[str, Any]],
        after_saves: Callable[[Callable[[], object]], object],
    ) -> None:
        self._folder, self._facts, self._after_saves = folder, facts, after_saves
        self._start: dict[str, Any] = {}
        self._saved_best: dict[str, Any] | None = None  # the newest with a checkpoint
        self._began = 0.0

    def before_train(self) -> None:
        self._start, self._began = {}, time.perf_counter()
        if is_main_process():
            self._start = self.described_start()
            if self.trainer.start_iter and self._folder.resume:
                self._warn_of_other_data()
        if self.trainer.start_iter >= self.trainer.max_iter:  # a run resumed at its end makes no step
            self._folder.open()
        if self._folder.is_open:
            self._write(self._start)

    def before_first_step(self) -> None:
        self._saved_best = self._results()["best"]  # of the run that is continued
        # Hooks of the last iteration, which write, are called now; or a callback that has stopped the run is loaded.
        if self.trainer.called_hooks is not None or self.trainer.start_iter >= self.trainer.max_iter:
            self.after_step()

    def after_step(self) -> None:
        if not self._folder.is_open:
            self._folder.open()
            self._write(self._start)

    def after_train(self) -> None:
        # No step was made: values measured so far must not replace the earlier run's metrics.
        if not self._folder.is_open:
            self.trainer.storage.load_state_dict({"samples": 0, "written": None, "scalars": {}})

    def _warn_of_other_data(self) -> None:
        """Compare the fingerprints of the data with those of the start before; another size is an error elsewhere."""
        starts = read_starts(self._folder.path / RECORD_NAME)
        known = (starts[-1].get("data") or {}) if starts else {}
        for name, data in self._start["data"].items():
            before = known.get(name) or {}
            if None not in (one := [before.get("fingerprint"), data["fingerprint"]]) and one[0] != one[1]:
                logger.warning(
                    "The data %r are not those that this run had before. If a random split made them, give it a fixed"
                    " seed: a run that continues with other samples evaluates some that it was trained on.",
                    name,
                )

    def before_save(self) -> None:
        """Show the results of a run in progress, whose best checkpoint is being saved."""
        results = self._results()
        if self._start and self._folder.is_open and results["best"] != self._start.get("best"):
            self._start = self._start | results
            self.trainer.call_between_steps(self._record_best)  # this may be another save, and that of the best next

    def _record_best(self) -> None:
        start = self._start

        def write() -> None:
            self._write(start)
            self._saved_best = start["best"]

        self._after_saves(write)

    def after_end(self) -> None:
        if not self._start or not self._folder.is_open:
            return
        wait_for_saves()  # this record comes last
        self._start = self._start | self._end()
        if self._start["status"] == "failed" and not self._is_best_saved():
            self._start["best"] = self._saved_best
        self._write(self._start)
        if self._start["seconds"] >= MIN_SECONDS and self._start["status"] == "finished":
            self._draw()

    def described_start(self) -> dict[str, Any]:
        trainer = self.trainer
        facts = dict(self._facts())
        data = {name: described_data(one) for name, one in facts.pop("data", {}).items() if one is not None}
        return {
            "started": _now(),
            "trainer": trainer.__class__.__name__,
            "first_iteration": trainer.start_iter + 1,
            "last_iteration": trainer.max_iter,
            **facts,
            "model": {
                "class": class_name(trainer.model),
                "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
                "trainable": sum(one.numel() for one in trainer.model.parameters() if one.requires_grad),
            },
            "device": str(trainer.device),
            "processes": get_world_size(),
            "command": shlex.join([os.path.basename(sys.executable), *redact_command(sys.argv)]),
            "working_folder": working_folder(),
            "data": data,
            "git": git_state(code_folder()),
            "versions": versions(),
            "machine": machine(),
            "numerics": numerics(),
        }

    def _end(self) -> dict[str, Any]:
        trainer = self.trainer
        is_stopped = trainer.failure is None or issubclass(trainer.failure, STOPS)
        error = None if trainer.failure is None else trainer.failure.__name__
        return {
            "ended": _now(),
            "status": "finished" if not has_failed(trainer) else "interrupted" if is_stopped else "failed",
            "reason": (trainer.stop_reason or error) if is_stopped else error,
            "iterations_done": trainer.iterations_done,
            "seconds": time.perf_counter() - self._began,
            "phases": dataclasses.asdict(trainer.phases),
            "peak_memory_bytes": _peak_memory(torch.device(trainer.device)),
            **self._results(),
        }

    def _results(self) -> dict[str, Any]:
        """The best value of the metric that selects checkpoints, and the names of the metrics of evaluations."""
        best = self._best_result()
        return {
            "best": None if best is None else {name: getattr(best, name) for name in _OF_BEST},
            "evaluated": sorted(self.trainer.storage.results),
            **({"evaluated_weights": weights} if (weights := self.trainer.storage.evaluated_weights) else {}),
        }

    def _best_result(self) -> BestResult | None:
        return next(filter(None, (hook.best_result() for hook in self.trainer.hooks)), None)

    def _is_best_saved(self) -> bool:
        """Whether the best checkpoint is that of the best result: a failure may have been that of its save."""
        best = self._best_result()
        with suppress(CheckpointError, OSError):
            return best is not None and read_manifest(Path(best.path)).iteration == best.iteration - 1
        return False

    def _draw(self) -> None:
        """Write ``curves.png``, if matplotlib is installed and no run is stopped by it."""
        path = self._folder.path / CURVES_NAME
        if irregular(path) is not None or not self._folder.files.is_own(CURVES_NAME):
            return
        try:
            self._folder.files.add([CURVES_NAME])
            with suppress(ImportError):  # matplotlib is not installed
                ring("inspect.report.picture").draw_curves(self._folder.path)
        except Exception as error:
            logger.warning("%s: not written (%s: %s).", path, type(error).__name__, error)

    def _write(self, start: Mapping[str, Any]) -> None:
        path = self._folder.path / RECORD_NAME
        if not start or irregular(path) is not None:
            return
        starts = read_starts(path) if self._folder.resume or start.get("ended") else []
        if starts and starts[-1].get("started") == start["started"]:
            starts.pop()
        content = json.dumps({"formats": FORMATS, "starts": [*starts, start]}, indent=1, allow_nan=False, default=str)
        try:
            atomic_write(path, content.encode() + b"\n")
        except OSError as error:  # the run does not depend on it
            logger.warning("%s: cannot be written (%s); the run continues without it.", path, error)


def _peak_memory(device: torch.device) -> int | None:
    """Of this process: on the accelerator, else in main memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on this system
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


_PACKAGES = (
    *("torch", "numpy", "trainwright", "torchvision", "torchmetrics", "safetensors", "transformers", "tokenizers"),
    *("datasets", "accelerate", "peft", "timm", "scikit-learn", "omegaconf"),
)
_MAX_SECONDS, _MAX_FILES = 5, 20


@functools.cache  # once per process
def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that may change results."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.Distribution.from_name(name).version
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        cudnn: Any = torch.backends.cudnn
        found |= {"cuda": torch.version.cuda, "cudnn": str(cudnn.version())}
    return found


@functools.cache
def machine() -> dict[str, Any]:
    """The host, its processor, memory and accelerators."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": count_cpus(),
        "memory_bytes": _memory(),
    }
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        found["accelerators"] = [{"name": one.name, "memory_bytes": one.total_memory} for one in devices]
    return found


def numerics() -> dict[str, Any]:
    """Settings of torch that change results by bits."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def code_folder() -> str:
    """The folder of the program that runs; the working folder for an installed command."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return working_folder()
    path = Path(file).resolve()
    installed = sys.prefix, site.getuserbase(), Path(__file__).parents[2]  # the last: this package, also in a clone
    is_installed = any(path.is_relative_to(os.path.realpath(folder)) for folder in installed)
    return working_folder() if is_installed else str(path.parent)


def working_folder() -> str:
    """The working folder; empty if it is deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


@functools.cache
def git_state(folder: str) -> dict[str, Any] | None:
    """Commit, branch and changed files of the repository around ``folder``; None outside of one, or without git.

    Also None for a repository that a command was given: its settings name programs that git starts.
    """
    data = sys.modules.get("trainwright.config.lazy.allowlist")  # not loaded: no command was given a run or a YAML file
    if not folder or (data is not None and data.is_data(folder)):
        return None
    if not any((place / ".git").exists() for place in [Path(folder), *Path(folder).parents]):
        return None
    status = _git(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None:
        return None
    lines = status.decode(errors="replace").splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch.") and " " in line[2:])
    changed = [line.split(" ", 8)[-1] for line in lines if line[:2] in ("1 ", "2 ", "u ")]
    diff = _git(folder, "diff", "HEAD", "--no-ext-diff") if changed else None
    return {
        "commit": head.get("branch.oid"),
        "branch": head.get("branch.head"),
        "changed": changed[:_MAX_FILES],
        "num_changed": len(changed),
        "diff": None if diff is None else xxhash.xxh3_64_hexdigest(diff),
    }


def _git(folder: str, *arguments: str) -> bytes | None:
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, timeout=_MAX_SECONDS, env=quiet, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not on this system
        return None

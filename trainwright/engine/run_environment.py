"""What a run depends on beside its settings: versions of packages, the state of the code in git, the machine."""

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash

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
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
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
    path = os.path.realpath(file)
    is_installed = path.startswith((os.path.realpath(sys.prefix), str(Path(__file__).parents[1])))
    return working_folder() if is_installed else os.path.dirname(path)


def working_folder() -> str:
    """The working folder; empty if it is deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


@functools.cache
def git_state(folder: str) -> dict[str, Any] | None:
    """Commit, branch and changed files of the repository around ``folder``; None outside of one, or without git."""
    if not folder or not any((place / ".git").exists() for place in [Path(folder), *Path(folder).parents]):
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

"""Restarts by the launcher: a run continues without ``resume`` where torchrun has started its processes again."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from trainwright.base.dist import all_gather_object, broadcast_object, is_main_process

logger = logging.getLogger("trainwright.engine")

RESUME = "TRAINWRIGHT_RESUME"  # set to 1 by `trainwright launch --resume` for the processes of a script


def is_continued(last_checkpoint: Path, elsewhere: Callable[[], bool] = lambda: False) -> bool:
    """Whether an earlier attempt of this job has saved ``last_checkpoint``, a file; logs it. Every rank must call it.

    It has if the file is newer than the launcher and older than this process. So a job that begins in the folder of an
    earlier run does not continue that run, although its first attempt failed before it saved.

    On a new machine it has if ``elsewhere()``, which only one process calls: the mirror has a checkpoint.

    With ``trainwright launch --resume``, as in ``examples/cluster``, each checkpoint counts: a queue starts the
    launcher again.
    """
    if os.environ.get(RESUME) == "1":
        found = broadcast_object(is_main_process() and (last_checkpoint.is_file() or elsewhere()))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        # A node that joins later counts its own restarts only.
        is_restart = any(all_gather_object(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))
        # One process looks: clocks may differ.
        is_there = is_main_process() and (
            _is_of_this_job(last_checkpoint, is_restart)
            or (is_restart and not last_checkpoint.is_file() and elsewhere())
        )
        found = broadcast_object(is_there)
    else:
        return False
    if found:
        logger.info("The launcher has restarted this run: it continues from its latest checkpoint.")
    return found


def _is_of_this_job(file: Path, is_restart: bool) -> bool:
    if not file.is_file():
        return False
    launched, started = _start_of(os.getppid()), _start_of(os.getpid())
    if launched is None or started is None:
        return is_restart
    return launched < file.stat().st_mtime < started


def _start_of(process: int) -> float | None:
    """When a process has started, as ``time.time()``; None where the system has no such record."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")

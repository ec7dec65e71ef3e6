"""Profile a few iterations: every operation on host and device, as a trace for a browser.

The files have Chrome's trace format and the names that TensorBoard's profiler plugin expects.
"""

import contextlib
import logging
import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainwright._torch_compat.profiler_state import is_profiling
from trainwright.base.dist import get_rank
from trainwright.base.errors import ConfigError
from trainwright.base.files import sync_file, sync_folder
from trainwright.hooks.base import HookBase
from trainwright.hooks.timer import duration, percent

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as Profiler

logger = logging.getLogger("trainwright.hooks")

FOLDER = "profile"  # for traces, in the run folder
_NEVER = 1 << 62  # iterations
_NAME_WIDTH = 70
_OTHER = "another profiler records in this process, and there can be one at a time"


class ProfileHook(HookBase):
    """Record some iterations with ``torch.profiler`` into ``folder``, and log the slowest operations.

    Skips ``wait`` iterations of this training, warms the profiler up for ``warmup`` more, records ``active``, and
    repeats this ``repeat`` times (0: to the end). Otherwise the hook only counts iterations. Recorded iterations are
    slower than others, with ``with_stack`` several times as slow. A training that ends while it records writes a trace
    of what was recorded. If the profiler fails, the hook warns and the training continues.

    Args:
        record_shapes, profile_memory, with_stack, with_flops: as in ``torch.profiler.profile``.
        num_rows: operations in the logged table.
        all_ranks: record every process, each into its own file; by default only the main process.

    Raises:
        ConfigError: an argument is out of range.
    """

    _open: ClassVar["weakref.ref[ProfileHook] | None"] = None  # the hook whose window is open in this process

    slot = "show"
    in_copies = False

    def __init__(
        self,
        folder: str | Path,
        *,
        wait: int = 10,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        num_rows: int = 10,
        all_ranks: bool = False,
    ) -> None:
        given = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat, "num_rows": num_rows}
        for name, least in {"wait": 0, "warmup": 1, "active": 1, "repeat": 0, "num_rows": 0}.items():
            if isinstance(given[name], bool) or not isinstance(given[name], int) or given[name] < least:
                raise ConfigError(f"ProfileHook.{name}: got {given[name]!r}; it must be a whole number >= {least}.")
        self._folder = Path(folder).absolute()
        self._wait, self._warmup, self._active, self._num_rows = wait, warmup, active, num_rows
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
            "acc_events": True,  # a profiler has one window; else torch 2.11 warns that it forgets earlier ones
        }
        self._windows_left: float = repeat or math.inf
        self._is_on = all_ranks or get_rank() == 0
        self._countdown = wait if self._is_on else _NEVER  # iterations until the next action
        self._first = 0  # iteration of the window
        self._has_recorded = False
        self._profiler: Profiler | None = None

    def before_train(self) -> None:
        if self._countdown == 0:
            self._begin(self.trainer.iter)

    def after_step(self) -> None:
        if self._countdown > 1:
            self._countdown -= 1
        elif self._profiler is None:
            self._begin(self.trainer.iter + 1)
        else:
            self._advance(self._profiler)

    def after_train(self) -> None:
        if self._profiler is not None:
            self._end(self._profiler)
        if self._is_on and not self._has_recorded and not self.trainer.has_failed:
            self._is_on = False  # warn once
            first = self.trainer.start_iter + self._wait + self._warmup
            logger.warning(
                "Nothing was profiled: recording starts with iteration %d, but the training ended after"
                " iteration %d. Use a smaller wait (now wait=%d).",
                first + 1, self.trainer.iter, self._wait,
            )  # fmt: skip

    def _begin(self, iteration: int) -> None:
        from torch.profiler import profile, schedule

        if is_profiling() or (ProfileHook._open is not None and ProfileHook._open() is not None):
            self._give_up(_OTHER)
            return
        self._first = iteration
        self._countdown = 0
        action_of = schedule(wait=0, warmup=self._warmup, active=self._active, repeat=1)
        try:
            profiler = profile(
                activities=_activities(getattr(self.trainer, "device", None)),
                schedule=lambda step: action_of(max(0, step - iteration)),  # asked for 0 before its start is known
                on_trace_ready=self._write,
                **self._options,
            )
            profiler.step_num = iteration  # the trace numbers steps as the training does
            profiler.start()
        except Exception as error:  # profiling must not end the training
            self._give_up(error)  # not stopped: torch 2.11 crashes in __exit__ of a profiler that did not start
            return
        self._profiler, ProfileHook._open = profiler, weakref.ref(self)

    def _advance(self, profiler: "Profiler") -> None:
        start = self._first + self._warmup
        if self.trainer.iter + 1 >= start and self._is_disturbed(records=self.trainer.iter >= start):
            return
        try:
            profiler.step()
        except Exception as error:
            with contextlib.suppress(Exception):
                profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._give_up(error)
            return
        if self.trainer.iter + 1 >= self._first + self._warmup + self._active:
            self._end(profiler)

    def _end(self, profiler: "Profiler") -> None:
        """End a window; an incomplete one writes what it has recorded."""
        start = self._first + self._warmup
        if self._is_disturbed(records=start <= profiler.step_num < start + self._active):
            return
        self._profiler = ProfileHook._open = None
        self._windows_left -= 1
        self._countdown = max(1, self._wait) if self._windows_left > 0 else _NEVER
        try:
            profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._give_up(error)

    def _is_disturbed(self, *, records: bool) -> bool:
        """Whether another profiler was started, or has ended this one: then this one is left as it is."""
        if is_profiling() is records:
            return False
        self._give_up(_OTHER)
        return True

    def _give_up(self, reason: str | Exception) -> None:
        if self._profiler is not None:
            ProfileHook._open = None
        self._profiler, self._countdown, self._is_on = None, _NEVER, False
        if isinstance(reason, Exception):
            reason = f"the profiler failed with {type(reason).__name__}: {reason}"
        logger.warning("Profiling stops: %s.", reason)

    def _write(self, profiler: "Profiler") -> None:
        self._has_recorded = True
        first = self._first + self._warmup
        path = self._folder / f"rank{get_rank()}.{first}.pt.trace.json"
        part = path.with_name(f".{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(part))
            sync_file(part)
            os.replace(part, path)
            sync_folder(path.parent)
            table = _table(profiler, self._num_rows) if self._num_rows else ""
        except Exception as error:
            with contextlib.suppress(OSError):
                part.unlink()
            logger.warning("%s: the trace was not written: %s: %s", path, type(error).__name__, error)
            return
        last = max(first, min(first + self._active, self.trainer.iterations_done) - 1)
        logger.info(
            "Profile of iterations %d to %d: %s (for https://ui.perfetto.dev).%s", first + 1, last + 1, path, table
        )


def profile_hook(asked: bool | Mapping[str, Any] | None, output_dir: str | Path) -> ProfileHook | None:
    """The hook for a setting: True, or arguments by name; None and False: no hook. Writes to ``output_dir``."""
    if asked is None or asked is False:
        return None
    return ProfileHook(Path(output_dir) / FOLDER, **({} if asked is True else asked))


def _activities(device: Any) -> "list[ProfilerActivity] | None":
    """Activities of the host and the training device; None (all that torch supports) if the device is unknown."""
    from torch.profiler import ProfilerActivity, supported_activities

    if device is None:
        return None
    names = ("CPU", str(device).partition(":")[0].upper())
    supported: set[ProfilerActivity] = supported_activities()  # type: ignore[no-untyped-call]
    return [activity for activity in supported if activity.name in names]


def _table(profiler: "Profiler", num_rows: int) -> str:
    """The operations with the longest self time: kernels, if a device runs some."""
    averages = [row for row in profiler.key_averages() if not row.key.startswith("ProfilerStep")]
    kernels = [row for row in averages if row.device_type.name != "CPU" and not row.is_user_annotation]
    place, rows = ("device", kernels) if kernels else ("host", averages)
    times = {id(row): row.self_device_time_total if kernels else row.self_cpu_time_total for row in rows}  # us
    total = sum(times.values())
    if not total:
        return ""
    rows = sorted(rows, key=lambda row: -times[id(row)])[:num_rows]
    lines = [f"{'self time':>11}  {'share':>5}  {'calls':>6}  operation (on the {place})"]
    for row in rows:
        time, share = duration(times[id(row)] / 1e6), percent(times[id(row)] / total)
        lines.append(f"{time:>11}  {share:>5}  {row.count:>6}  {row.key[:_NAME_WIDTH]}")
    return "".join(f"\n{line}" for line in lines)

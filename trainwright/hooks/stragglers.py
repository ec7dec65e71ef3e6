"""Name the processes that are slower than the others."""

import logging
import time
from contextlib import ExitStack
from statistics import median_low
from typing import Any

import torch
from torch import nn

from trainwright.base import dist
from trainwright.hooks.base import HookBase
from trainwright.hooks.due import Condition, Period
from trainwright.parallel.data_parallel import unwrap_model
from trainwright.parallel.mesh import current_mesh

logger = logging.getLogger("trainwright.hooks")

_LEAST_S = 0.02  # a smaller difference is that of the operating system


class Stragglers(HookBase):
    """Warn of ranks whose own time in a step is more than twice the median of all ranks, in two checks in a row.

    All ranks end a step together, so their own time is what they need before they wait for each other: to read a batch,
    and for the forward passes. With ZeRO, tensor and pipeline parallelism, where ranks wait in forward passes, and in
    graph mode it is the reading alone.

    Reading is the mean since the last check; forward passes are those of the step after it. Nothing waits for a GPU.
    Every rank must have this hook: a check is one collective call.
    """

    slot = "check"
    in_copies = False

    def __init__(self, period: Period, device: torch.device, *, measures_forward: bool = True) -> None:
        self._is_due = Condition(period)
        self.due = self._periods = (self._is_due,)
        self._device, self._measures_forward = device, measures_forward
        self._watching = ExitStack()
        self._marks: list[Any] = []  # the starts and ends of the forward passes of a step
        self._read_before, self._iter_before = 0.0, 0
        self._slow = set[int]()  # in the last check

    def before_train(self) -> None:
        self._start_again()
        self._slow.clear()

    def after_step(self) -> None:
        self._watching.close()
        self.due = self._periods
        if not self._is_due(self.trainer):
            return
        trainer, row = self.trainer, [0] * dist.get_world_size()
        reading = (trainer.phases.data - self._read_before) / (trainer.iter + 1 - self._iter_before)
        row[dist.get_rank()] = round(1e6 * (reading + self._forward_seconds()))
        self._report([time_us / 1e6 for time_us in dist.largest(*row)])
        self._start_again()
        if self._measures_forward and current_mesh() is None:
            model = unwrap_model(trainer.model)
            self._watching.enter_context(model.register_forward_pre_hook(self._mark))
            self._watching.enter_context(model.register_forward_hook(self._mark))
            self.due = None  # at the end of the step that is watched

    def after_train(self) -> None:
        self._watching.close()

    def _start_again(self) -> None:
        self._marks.clear()
        self._read_before, self._iter_before = self.trainer.phases.data, self.trainer.iterations_done

    def _mark(self, model: nn.Module, *_: Any) -> None:
        if not model.training:
            return
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def _forward_seconds(self) -> float:
        pairs = [*zip(self._marks[::2], self._marks[1::2], strict=False)]
        if self._device.type != "cuda":
            return float(sum(end - start for start, end in pairs))
        for _, end in pairs[-1:]:  # the log line has waited for the GPU
            end.synchronize()
        return float(sum(start.elapsed_time(end) for start, end in pairs)) / 1e3

    def _report(self, seconds: list[float]) -> None:
        usual = median_low(seconds)
        slow = {rank for rank, own in enumerate(seconds) if own > 2 * usual and own > usual + _LEAST_S}
        named = [f"rank {rank} ({1e3 * seconds[rank]:.0f} ms)" for rank in sorted(slow & self._slow)]
        self._slow = slow
        if named and dist.is_main_process():
            text = "reading a batch" + " and the forward pass" * (self._measures_forward and current_mesh() is None)
            logger.warning(
                "Iteration %d: %s: more than twice the median (%.0f ms) of all ranks for %s; the others wait in each"
                " step.",
                self.trainer.iter + 1, ", ".join(named), 1e3 * usual, text,
            )  # fmt: skip

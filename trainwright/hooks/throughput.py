"""Tokens and floating-point operations per second, and the share of the device's peak."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainwright.base.batch import fields
from trainwright.base.dist import get_averaging_size
from trainwright.hooks.base import HookBase

# TFLOP/s of dense matrix products in bfloat16, by words of the device's name: the data sheets of NVIDIA and AMD.
_PEAKS = {"B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312}
_PEAKS |= {"L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "MI300X": 1307, "MI250X": 383}


class Throughput(HookBase):
    """Stores ``tflops``, ``peak_share`` and ``tokens_per_s`` of each iteration but the first.

    ``tflops``: 10^12 floating-point operations of this process in a second. The operations of an iteration are three
    times those of its forward passes, which are counted in the first one: without what is computed again in the
    backward pass (Chowdhery et al. 2022, "PaLM", appendix B). ``peak_share``: their share of what the device can do in
    bfloat16, where that is known. ``tokens_per_s``: of all processes, by the ``input_ids`` of the latest batch.

    Args:
        parts: the model, or its stages on this process.
        batch: returns the latest batch.
        num_batches: returns the micro-batches of the current iteration.
        device: that of the model.
    """

    slot = "step"
    in_copies = False

    def __init__(
        self, parts: Sequence[nn.Module], batch: Callable[[], Any], num_batches: Callable[[], int], device: torch.device
    ) -> None:
        self._parts, self._batch, self._num_batches = parts, batch, num_batches
        self._peak = peak_tflops(device)
        self._counter: Any = FlopCounterMode(display=False)
        self._counting = ExitStack()
        self._tflop, self._num_counted = 0.0, 1  # of the first iteration, and its micro-batches

    def before_train(self) -> None:
        self._tflop = 0.0
        for part in self._parts:
            self._counting.callback(part.register_forward_pre_hook(self._start).remove)
            self._counting.callback(part.register_forward_hook(self._stop, always_call=True).remove)

    def after_step(self) -> None:
        if self.trainer.iter == self.trainer.start_iter:
            self._counting.close()
            self._num_counted = self._num_batches()
            return
        seconds, storage = self.trainer.step_seconds, self.trainer.storage
        if self._tflop:
            tflop = self._tflop * self._num_batches() / self._num_counted
            storage.put_scalar("tflops", tflop / seconds)
            if self._peak is not None:
                storage.put_scalar("peak_share", tflop / seconds / self._peak)
        tokens = (fields(self._batch()) or {}).get("input_ids")
        if isinstance(tokens, torch.Tensor):
            number = tokens.numel() * self._num_batches() * get_averaging_size()
            storage.put_scalar("tokens_per_s", number / seconds)

    def after_train(self) -> None:
        self._counting.close()

    def _start(self, module: nn.Module, _: Any) -> None:
        if module.training:
            self._counter.__enter__()

    def _stop(self, module: nn.Module, *_: Any) -> None:
        if module.training:
            self._counter.__exit__(None, None, None)
            self._tflop += 3 * self._counter.get_total_flops() / 1e12


def peak_tflops(device: torch.device) -> float | None:
    """What ``device`` can do in bfloat16, in 10^12 operations per second; None: unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((float(peak) for words, peak in _PEAKS.items() if re.search(rf"\b{words}\b", name)), None)

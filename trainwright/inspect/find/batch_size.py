"""The largest micro-batch that fits into the memory: doubled until it does not, then between the last two sizes."""

import gc
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainwright.base.batch import num_rows
from trainwright.base.errors import ConfigError
from trainwright.data.seeding import kept_generators
from trainwright.engine.out_of_memory import is_out_of_memory
from trainwright.engine.run import Run
from trainwright.inspect.check.copies import Copies, quiet
from trainwright.inspect.check.finding import Skipped
from trainwright.inspect.check.observed import bytes_of, counting_saved


@dataclass(frozen=True)
class BatchSizes:
    """The result of the trials.

    Attributes:
        largest: samples of the largest micro-batch that fits; 0: not even one sample does.
        limited_by: ``memory``, ``data`` (all samples fit), ``max_size`` or ``time``.
        trials: bytes that a step needs by size; None: it does not fit.
        settings: the settings that use ``largest``, with as many samples per update as before, or as few more as
            possible.
    """

    largest: int
    limited_by: str
    trials: dict[int, int | None]
    settings: dict[str, int]


def find_batch_size(
    run: Run, *, memory: int | None = None, max_size: int | None = None, max_seconds: float = 300.0
) -> BatchSizes:
    """Find the largest micro-batch with which a copy of the trainer of ``run`` can make updates.

    ``memory``: bytes that a step may use, for another device than this one; on a CPU the tensors are counted.

    Raises:
        ConfigError: the loader does not change with the batch size, or an argument is out of range.
    """
    for name, value in (("memory", memory), ("max_size", max_size)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"find_batch_size: got {name}={value!r}; it must be a whole number >= 1.")
    trials: dict[int, int | None] = {}
    with tempfile.TemporaryDirectory() as folder, kept_generators(), quiet():
        copies = Copies(run, Path(folder), end=time.perf_counter() + max_seconds)
        most = None
        with suppress(AttributeError, TypeError):  # a stream
            most = len(run.batches.loader.dataset)
        bound = min(one for one in (most, max_size, 1 << 30) if one is not None)
        reason = "data" if bound == most else "max_size"
        try:
            fits, fails = 0, None
            size = min(2, bound)  # batch norms need two samples
            while fails is None and fits < bound:
                if _fits(copies, size, memory, trials):
                    fits, size = size, min(2 * size, bound)
                else:
                    fails = size
            while fails is not None and fails - fits > max(1, fits // 8):  # to an eighth
                size = (fits + fails) // 2
                fits, fails = (size, fails) if _fits(copies, size, memory, trials) else (fits, size)
            reason = reason if fails is None else "memory"
        except Skipped:
            fits, reason = max([one for one, needed in trials.items() if needed is not None], default=0), "time"
    return BatchSizes(fits, reason, dict(sorted(trials.items())), _settings(copies, fits))


def _fits(copies: Copies, size: int, memory: int | None, trials: dict[int, int | None]) -> bool:
    needed: int | None = None
    try:
        needed = _needed(copies, size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    if needed is None or copies.run.device.type == "cuda":
        gc.collect()  # the error and its frames held what the step had allocated
    if copies.run.device.type == "cuda":
        torch.cuda.empty_cache()
    is_over = needed is None or (memory is not None and needed > memory)
    trials[size] = None if is_over else needed
    return not is_over


def _needed(copies: Copies, size: int) -> int:
    """The bytes of an update with micro-batches of ``size`` samples."""
    new = copies.make(batch_size=size, gradient_accumulation_steps=1, constant_rate=True)
    (batch,) = new.run.batches.first(1)
    if (found := num_rows(new.prepared(batch))) != size:
        raise ConfigError(
            f"find_batch_size: the loader gives {found or 'unknown numbers of'} samples instead of {size}. Pass a data"
            " set instead of a loader, or build the loader with the batch size of the configuration."
        )
    new.run.batches.repeat([batch])
    is_cuda = copies.run.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(copies.run.device)
    saved: list[int] = []
    counting = counting_saved(new.model, saved.append)
    with ExitStack() as stack:  # the first update creates the state of the optimizer
        new.train(2, before=lambda: new.trainer.iter and stack.enter_context(counting))
    if is_cuda:
        return torch.cuda.max_memory_allocated(copies.run.device)
    return bytes_of(new)[1] + sum(saved)


def _settings(copies: Copies, size: int) -> dict[str, Any]:
    if not size:
        return {}
    spec = copies.run.spec
    total = spec.batch_size * spec.windows.at(0)
    steps = -(-total // size)
    if steps > 1 and not spec.windows.is_scheduled:
        size = -(-total // steps)
    return spec.batch_settings(size, spec.windows.scaled(lambda length: -(-spec.batch_size * length // size)))

"""BatchLoader: torch's DataLoader with randomness of its own, seeded workers and our way to make a batch."""

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainwright.config.errors import ConfigError, ConfigTypeError, did_you_mean
from trainwright.data.collate import collate
from trainwright.data.seeding import LOADER_STREAM, WORKER_STREAM, mixed_seed, seed_everything_in_this_process
from trainwright.parallel.dist import get_data_parallel_rank

logger = logging.getLogger("trainwright.data")

# What may be passed on to torch's DataLoader. The rest of its arguments are the sampler's business, or set here.
_LOADER_OPTIONS = (
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "multiprocessing_context",
    "worker_init_fn",
    "in_order",
    "persistent_workers",
)


class BatchLoader(DataLoader[Any]):
    """torch's DataLoader over batches of indices, with the ``mixup_func`` that is to be applied to each of its batches.

    It has a generator of its own: iterating draws nothing from the global ones.
    """

    def __init__(
        self, dataset: Any, batch_sampler: Any, *, mixup_func: Callable[..., Any] | None = None, **options: Any
    ) -> None:
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        self.mixup_func = mixup_func

    def __repr__(self) -> str:
        return (
            f"BatchLoader(<{type(self.dataset).__name__} of {len(self.dataset)}>, "  # type: ignore[arg-type]  # torch's Dataset has no len
            f"batch_sampler={self.batch_sampler!r}, num_workers={self.num_workers})"
        )


def make_loader(
    dataset: Any,
    batch_sampler: Any,
    *,
    seed: int,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    loader_options: Mapping[str, Any],
    mixup_func: Callable[..., Any] | None = None,
) -> BatchLoader:
    """A loader over ``batch_sampler``'s lists of indices. ``loader_options`` are arguments of torch's DataLoader."""
    for name in loader_options:
        if name not in _LOADER_OPTIONS:
            raise ConfigTypeError(f"data loader: {name!r} is no argument of it. {did_you_mean(name, _LOADER_OPTIONS)}")
    num_workers = _allowed_workers(num_workers)
    rank = get_data_parallel_rank()
    user_init = loader_options.get("worker_init_fn")
    options: dict[str, Any] = {"pin_memory": _can_pin_memory(), "persistent_workers": num_workers > 0, **loader_options}
    options["worker_init_fn"] = functools.partial(_init_worker, seed=seed, rank=rank, user_init=user_init)
    if num_workers == 0:  # torch refuses these without workers; the same config shall run with and without
        for name in ("prefetch_factor", "timeout", "multiprocessing_context", "persistent_workers"):
            options.pop(name, None)
    return BatchLoader(
        dataset,
        batch_sampler,
        mixup_func=mixup_func,
        num_workers=num_workers,
        collate_fn=collate_fn or collate,
        generator=torch.Generator().manual_seed(mixed_seed(seed, LOADER_STREAM, rank)),
        **options,
    )


def _allowed_workers(num_workers: int) -> int:
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise ConfigError(f"num_workers: got {num_workers!r}; it must be a whole number >= 0.")
    available = os.cpu_count() or 1
    if num_workers > available:
        _say_capped(num_workers, available)
    return min(num_workers, available)


@functools.cache  # once for each pair of numbers
def _say_capped(asked: int, available: int) -> None:
    logger.debug("num_workers=%d asked for; this machine has %d CPUs, so %d are used.", asked, available, available)


def _can_pin_memory() -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "mps"  # torch does not pin for mps


def _init_worker(worker_id: int, *, seed: int, rank: int, user_init: Callable[[int], Any] | None) -> None:
    seed_everything_in_this_process(mixed_seed(seed, WORKER_STREAM, rank, worker_id))
    if user_init is not None:
        user_init(worker_id)

"""What a run logs about itself before it starts."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainwright.parallel.dist import get_data_parallel_size

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger("trainwright.engine")


def log_header(
    cfg: "DictConfig", model: nn.Module, device: torch.device, *, first_iter: int, num_samples: int | None
) -> None:
    """Log model, device, mode, iterations and batch sizes. ``num_samples`` of the training set, None if unknown."""
    train, ranks = cfg.train, get_data_parallel_size()
    parameters = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = "" if trainable == parameters else f" ({trainable:,} trainable)"
    mode = "graph mode" if cfg.graph.enabled else "eager mode"
    logger.info(
        "%s: %s parameters%s, %d x %s, %s.", type(model).__name__, f"{parameters:,}", frozen, ranks, device.type, mode
    )
    if first_iter >= train.train_iter:
        return  # nothing to train, which the loop logs
    epochs = ""
    if num_samples:
        epochs = f" ({train.train_iter * train.global_batch_size / num_samples:.1f} epochs of {num_samples:,} samples)"
    logger.info(
        "Iterations %d to %d%s, each of %d samples = %d (micro-batch) x %d (accumulation) x %d (processes).",
        first_iter + 1,
        train.train_iter,
        epochs,
        train.global_batch_size,
        train.train_micro_batch_size,
        train.num_accumulation_steps,
        ranks,
    )


def log_recomputed(names: Sequence[str]) -> None:
    """Log the blocks that are recomputed in the backward pass."""
    if names:
        logger.info("The backward pass recomputes %d blocks: %s.", len(names), ", ".join(names))
    else:
        logger.warning(
            "train.activation_checkpoint: the model has no repeated blocks (children of nn.ModuleList or"
            " nn.Sequential with"
            " parameters) and no set_activation_checkpoint, so nothing is recomputed."
        )


def training_info(rows: Mapping[str, object]) -> str:
    """A block of text with one line per row."""
    width = max(len(name) for name in rows)
    lines = [f"  {name:<{width}}  {value:,}" if type(value) is int else f"  {name:<{width}}  {value}"
             for name, value in rows.items()]  # fmt: skip
    return "\n".join(["Training Info", *lines])

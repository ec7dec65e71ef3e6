"""What a run says about itself before it starts."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainwright.engine.scale import num_samples
from trainwright.parallel.dist import get_data_parallel_size

if TYPE_CHECKING:
    from trainwright.engine.default import DefaultTrainer

logger = logging.getLogger("trainwright.engine")


def log_header(trainer: "DefaultTrainer") -> None:
    """Model, device and mode; iterations and batch sizes."""
    train, model, ranks = trainer.cfg.train, trainer.model, get_data_parallel_size()
    parameters = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = "" if trainable == parameters else f" ({trainable:,} trainable)"
    mode = "graph mode" if trainer.cfg.graph.enabled else "eager mode"
    logger.info(
        "%s: %s parameters%s, on %d x %s, %s.",
        type(model).__name__,
        f"{parameters:,}",
        frozen,
        ranks,
        trainer.device.type,
        mode,
    )
    length = num_samples(trainer.train_loader, train.train_micro_batch_size)
    epochs = (
        ""
        if not length
        else f" ({train.train_iter * train.global_batch_size / length:.1f} epochs of {length:,} samples)"
    )
    logger.info(
        "Iterations %d to %d%s, each of %d samples = %d (micro-batch) x %d (accumulation) x %d (processes).",
        trainer.start_iter,
        trainer.max_iter,
        epochs,
        train.global_batch_size,
        train.train_micro_batch_size,
        train.num_accumulation_steps,
        ranks,
    )


def log_recomputed(names: Sequence[str]) -> None:
    """Which blocks are computed again in the backward pass."""
    if names:
        logger.info("The backward pass computes %d blocks again: %s.", len(names), ", ".join(names))
    else:
        logger.warning(
            "train.activation_checkpoint: the model has no repeated blocks (children of nn.ModuleList or"
            " nn.Sequential with"
            " parameters) and no set_activation_checkpoint, so nothing is recomputed."
        )

"""What a run logs about itself before it starts, and how its log reaches the console."""

import functools
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from trainwright.config.secrets import RedactingFormatter, redact
from trainwright.data.columns import ColumnDataset
from trainwright.engine.run_directory import LOG_FORMAT
from trainwright.events.writers.console import ProgressAwareHandler
from trainwright.hooks.timer import Facts, SettingNames
from trainwright.parallel.dist import get_data_parallel_size, get_rank
from trainwright.terminal import open_standard_streams

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
            "Activation checkpointing: the model has no repeated blocks (children of nn.ModuleList or"
            " nn.Sequential with"
            " parameters) and no set_activation_checkpoint, so nothing is recomputed."
        )


def training_info(rows: Mapping[str, object]) -> str:
    """A block of text with one line per row."""
    width = max(len(name) for name in rows)
    lines = [f"  {name:<{width}}  {value:,}" if type(value) is int else f"  {name:<{width}}  {value}"
             for name, value in rows.items()]  # fmt: skip
    return "\n".join(["Training Info", *lines])


_OF_OBJECTS = SettingNames(
    workers="dataloader_num_workers",
    no_workers="dataloader_num_workers=0",
    collate="data_collator=lambda batch: batch",
    profile="TrainingConfig(profile=True)",
)

_OF_FILES = SettingNames(
    workers="num_workers of dataloader.train",
    no_workers="num_workers=0 of dataloader.train",
    asynchronous="train.checkpointer.asynchronous=True",
    profile="train.profile=True",
)


def facts_of_objects(trainer: Any) -> Facts:
    """Facts of a :class:`~trainwright.Trainer`."""
    config = trainer.config
    save = _saves_of(config, trainer._plan.steps_per_epoch)
    names = replace(_OF_OBJECTS, save=save, evaluate=_evaluations_of(config))
    return _facts(trainer, trainer.train_dataloader, names, batches=config.gradient_accumulation_steps)


def facts_of_files(trainer: Any) -> Facts:
    """Facts of a :class:`~trainwright.DefaultTrainer`."""
    train = trainer.cfg.train
    by_epochs, by_period = "train.checkpointer.save_model_after_n_epoch", "train.checkpointer.period"
    save = by_epochs if train.checkpointer.get("save_model_after_n_epoch") else by_period
    by_epochs, by_period = "train.evaluation.eval_after_n_epoch", "train.evaluation.eval_period"
    evaluate = by_epochs if train.evaluation.get("eval_after_n_epoch") else by_period
    names = replace(_OF_FILES, save=f"a larger {save}", evaluate=f"a larger {evaluate}")
    return _facts(trainer, trainer.train_loader, names, batches=int(train.get("num_accumulation_steps") or 1))


def _facts(trainer: Any, loader: Any, names: SettingNames, *, batches: int) -> Facts:
    return Facts(
        batches=batches,
        device=torch.device(trainer.device).type,
        num_workers=getattr(loader, "num_workers", None),
        reads_batches=_reads_batches(getattr(loader, "dataset", None)),
        saves_async=bool(getattr(trainer.checkpointer, "asynchronous", True)),
        names=names,
    )


def _saves_of(config: Any, steps_per_epoch: int) -> str:
    """The setting that saves most often; the period of evaluations, which save the best, if there is no other."""
    found: list[tuple[float, str]] = []
    periods = config.model_checkpoint or {}
    for name, steps in (("every_n_epoch", steps_per_epoch), ("every_n_iteration", 1)):
        if period := periods.get(name):
            found.append((period * steps, f"a larger {name} of model_checkpoint (now {period})"))
    if config.save_steps:
        share = steps_per_epoch * config.num_epochs if isinstance(config.save_steps, float) else 1
        found.append((config.save_steps * share, f"a larger save_steps (now {config.save_steps})"))
    return min(found)[1] if found else _evaluations_of(config)


def _evaluations_of(config: Any) -> str:
    if config.eval_steps:
        return f"a larger eval_steps (now {config.eval_steps})"
    return "eval_strategy='step' with eval_steps of more than an epoch"


def _reads_batches(dataset: Any) -> bool:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, TensorDataset | ColumnDataset) or hasattr(dataset, "__getitems__")


def log_to_console() -> None:
    """Log to the console: everything of rank 0, warnings of the other ranks; above a progress bar, if there is one.

    If the program has configured logging itself (the root logger has a handler), no handler is added. A level that the
    program has set on the logger "trainwright" is kept.
    """
    open_standard_streams()
    library = logging.getLogger("trainwright")
    if library.level == logging.NOTSET:  # else the user has set it
        library.setLevel(logging.INFO)
    logging.getLogger("libai").parent = library  # the name that LiBai's examples log under
    if logging.getLogger().handlers or any(isinstance(h, ProgressAwareHandler) for h in library.handlers):
        return
    handler = ProgressAwareHandler(sys.stdout)
    handler.setFormatter(RedactingFormatter(LOG_FORMAT, datefmt="%H:%M:%S"))
    handler.setLevel(logging.INFO if get_rank() == 0 else logging.WARNING)
    handler.addFilter(lambda record: not getattr(record, "file_only", False))
    library.addHandler(handler)
    _redact_python_output()


@functools.cache  # once per process
def _redact_python_output() -> None:
    """Mask secrets also in warnings, and in log lines of loggers without a handler, which Python prints itself."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(RedactingFormatter())
    formatted = warnings.formatwarning

    def formatwarning(*args: Any, **kwargs: Any) -> str:
        return redact(formatted(*args, **kwargs))

    warnings.formatwarning = formatwarning

"""From a TrainingConfig to the parts of a run: loaders, optimizer, schedule, criterion, and where to go on from."""

import inspect
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.folder import checkpoint_folders, is_checkpoint
from trainwright.config.errors import ConfigError, ConfigTypeError, MissingFileError
from trainwright.data.batch_loader import make_loader
from trainwright.data.epochs import EpochSampler
from trainwright.data.sampler import SingleRoundSampler
from trainwright.optim import configured

if TYPE_CHECKING:
    from trainwright.config.training_config import TrainingConfig

CHECKPOINTS = "checkpoints"


def train_loader(dataset: Any, config: "TrainingConfig", collator: Callable[[list[Any]], Any] | None) -> Any:
    """An endless loader of epochs' batches."""
    sampler = EpochSampler(
        dataset,
        config.batch_size,
        shuffle=config.dataloader_shuffle,
        drop_last=config.dataloader_drop_last,
        seed=config.seed,
    )
    return _loader(dataset, sampler, config, collator)


def eval_loader(dataset: Any, config: "TrainingConfig", collator: Callable[[list[Any]], Any] | None) -> Any:
    """A loader of one pass: every sample once, in the data set's order."""
    assert config.eval_batch_size is not None, "resolved when the config was made"
    return _loader(dataset, SingleRoundSampler(dataset, config.eval_batch_size), config, collator)


def _loader(dataset: Any, sampler: Any, config: "TrainingConfig", collator: Callable[[list[Any]], Any] | None) -> Any:
    return make_loader(
        dataset,
        sampler,
        seed=config.seed,
        num_workers=config.dataloader_num_workers,
        collate_fn=collator or getattr(dataset, "data_collator", None),
        loader_options={},
    )


def build_optimizer(config: "TrainingConfig", model: nn.Module) -> Optimizer:
    """``config.optimizer`` over the trainable parameters of ``model``.

    Raises:
        ConfigError: nothing is trainable, or the optimizer refuses its arguments.
    """
    from trainwright.config.torch_names import find_torch_class, split_name

    found, _ = find_torch_class("optimizer", config.optimizer)
    assert found is not None, "checked when the config was made"
    _, arguments = split_name(config.optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            f"Trainer.model: {type(model).__name__} has no trainable parameter; set requires_grad on some."
        )
    settings = {"lr": config.learning_rate, **arguments}
    if "weight_decay" in inspect.signature(found).parameters or config.weight_decay:
        settings.setdefault("weight_decay", config.weight_decay)
    try:
        optimizer: Optimizer = found(parameters, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"TrainingConfig.optimizer: {found.__name__} refuses {settings}: {error}.") from error
    return optimizer


def build_lr_scheduler(config: "TrainingConfig", optimizer: Optimizer, num_updates: int) -> LRScheduler | None:
    """``config.lr_scheduler_type`` over ``num_updates`` updates; None without one."""
    warmup = config.warmup_steps or math.ceil(num_updates * config.warmup_ratio)
    match config.lr_scheduler_type:
        case None:
            return None
        case "constant":
            return configured.configure_constant_scheduler(optimizer)
        case "constant_with_warmup":
            return configured.configure_constant_scheduler_with_warmup(optimizer, warmup)
        case "linear":
            return configured.configure_linear_scheduler_with_warmup(optimizer, warmup, num_updates)
        case "cosine":
            return configured.configure_cosine_scheduler_with_warmup(optimizer, warmup, num_updates)
        case "cosine_with_restarts":
            return configured.configure_cosine_with_hard_restarts_scheduler_with_warmup(optimizer, warmup, num_updates)
        case "polynomial":
            return configured.configure_polynomial_decay_scheduler_with_warmup(optimizer, warmup, num_updates)


def build_criterion(config: "TrainingConfig", device: torch.device) -> nn.Module:
    """``config.loss`` on the device.

    Raises:
        ConfigError: the loss refuses its arguments.
    """
    from trainwright.config.torch_names import find_torch_class, split_name

    found, _ = find_torch_class("loss", config.loss)
    assert found is not None, "checked when the config was made"
    _, arguments = split_name(config.loss)
    try:
        criterion: nn.Module = found(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"TrainingConfig.loss: {found.__name__} refuses {arguments}: {error}.") from error
    return criterion.to(device)


def losses(
    config: "TrainingConfig", model: nn.Module, device: torch.device
) -> tuple[Callable[..., Tensor], Callable[..., Tensor] | None]:
    """The criterion, and the model's own ``compute_loss`` if it has one, in the precision of the run.

    With mixed precision the model's forward is replaced by itself under autocast, for good: no wrapper is put around
    the model, so names in its state stay the same.
    """
    criterion = build_criterion(config, device)
    own_loss = getattr(model, "compute_loss", None)
    if config.mixed_precision != "bf16":
        return criterion, own_loss
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("TrainingConfig.mixed_precision: got 'bf16', in which this GPU does not compute; give None.")
    in_bfloat16 = torch.autocast(device.type, dtype=torch.bfloat16)
    model.forward = in_bfloat16(model.forward)
    return in_bfloat16(criterion.forward), own_loss and in_bfloat16(own_loss)


def resume(config: "TrainingConfig", model: nn.Module, states: dict[str, Any]) -> Path | None:
    """Bring back what ``config`` says to go on from, and return the folder where it was; None for a run begun anew.

    Raises:
        MissingFileError: the path that was given holds no checkpoint.
    """
    asked = config.resume_from_checkpoint
    weights = config.init_weights_from or ""
    if asked is None or asked is False:
        Checkpointer(model).load(weights, checkpointables=[])
        return None
    folder = Path(config.output_dir, CHECKPOINTS) if asked is True else _checkpoints_at(Path(asked))
    if is_checkpoint(folder):
        Checkpointer(model, **states).load(folder)
        return folder
    checkpointer = Checkpointer(model, folder, **states)
    is_there = checkpointer.has_checkpoint()
    checkpointer.resume_or_load(weights, resume=True)
    return folder if is_there else None


def _checkpoints_at(path: Path) -> Path:
    """``path``, or the checkpoints of the run there."""
    for folder in (path, path / CHECKPOINTS):
        if is_checkpoint(folder) or checkpoint_folders(folder):
            return folder
    raise MissingFileError(
        f"TrainingConfig.resume_from_checkpoint: {path} holds no checkpoint; give the folder of one, or that of a run."
    )


def check_parts(model: Any, config: Any, train_data: bool, eval_data: bool) -> None:
    """Raise one error with everything that is wrong with what a Trainer was given."""
    from trainwright.config.training_config import TrainingConfig

    faults = []
    if not isinstance(model, nn.Module):
        faults.append(f"Trainer.model: got {type(model).__name__}; it must be a torch.nn.Module.")
    if not isinstance(config, TrainingConfig):
        faults.append(f"Trainer.config: got {type(config).__name__}; it must be a TrainingConfig.")
    if not train_data:
        faults.append("Trainer.train_dataset: got None; give a data set, or a loader as train_dataloader.")
    if isinstance(config, TrainingConfig) and config.eval_strategy == "step" and not eval_data:
        faults.append("Trainer.eval_dataset: got None with TrainingConfig.eval_strategy='step'; give one, or a loader.")
    if faults:
        raise ConfigTypeError("\n".join(faults))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("Trainer: it trains in one process. For several, use DefaultTrainer with torchrun.")


def check_given(config: "TrainingConfig", optimizer: Optimizer | None, lr_scheduler: LRScheduler | None) -> None:
    """Refuse settings that a part given to the Trainer would leave without effect."""
    unused = []
    if optimizer is not None:
        unused += [("optimizer", name) for name in ("optimizer", "learning_rate", "weight_decay")]
    if lr_scheduler is not None:
        unused += [("lr_scheduler", name) for name in ("lr_scheduler_type", "warmup_ratio", "warmup_steps")]
    faults = [
        f"TrainingConfig.{name}: got {getattr(config, name)!r}, but the Trainer was given its own {part}. Set one of"
        " them."
        for part, name in unused
        if getattr(config, name) != type(config).model_fields[name].default
    ]
    if faults:
        raise ConfigError("\n".join(faults))

"""What a Trainer is given, looked at as a whole before anything is made of it."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from trainwright.config.errors import ConfigError, ConfigTypeError

if TYPE_CHECKING:
    from trainwright.config.training.training_config import TrainingConfig

logger = logging.getLogger("trainwright.engine")


def in_order(model: Any, config: Any, training_config: Any) -> tuple[Any, Any]:
    """Model and config, given in either order, the second perhaps by its other keyword."""
    from trainwright.config.training.training_config import TrainingConfig

    given = [part for part in (config, training_config) if part is not None]
    if len(given) == 2:
        raise ConfigTypeError("Trainer: got config and training_config, two names of one argument. Give one of them.")
    config = given[0] if given else None
    if isinstance(model, TrainingConfig) and not isinstance(config, TrainingConfig):
        model, config = config, model
    if config is None and isinstance(model, nn.Module):
        config = TrainingConfig(output_dir="tmp_trainer")
        logger.warning("Trainer: no config is given; training by the defaults, into %s.", config.output_dir)
    return model, config


def check_parts(model: Any, config: Any, train_data: bool, eval_data: bool) -> None:
    """Raise one error with everything that is wrong with what a Trainer was given."""
    from trainwright.config.training.training_config import TrainingConfig

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


def check_data(train_dataset: Any, train_dataloader: Any, eval_dataset: Any, eval_dataloader: Any) -> None:
    """Refuse loaders that are given as data sets, and the other way round."""
    faults = []
    for name, dataset, loader in (("train", train_dataset, train_dataloader), ("eval", eval_dataset, eval_dataloader)):
        if isinstance(dataset, DataLoader):
            faults.append(f"Trainer.{name}_dataset: got a DataLoader; give it as {name}_dataloader.")
        if isinstance(dataset, dict):
            faults.append(
                f"Trainer.{name}_dataset: got a dict; give one data set. Call trainer.evaluate(dataset) for others."
            )
        if isinstance(loader, Dataset):
            faults.append(
                f"Trainer.{name}_dataloader: got {type(loader).__name__}, a data set; give it as {name}_dataset."
            )
        if isinstance(loader, Iterator):
            faults.append(
                f"Trainer.{name}_dataloader: got {type(loader).__name__}, an iterator, which can be gone through only"
                " once; give a list or a loader."
            )
    if faults:
        raise ConfigTypeError("\n".join(faults))


def check_kinds(**given: Any) -> None:
    """Refuse parts that cannot be what they are given as, all of them in one message."""
    has = {
        "data_collator": ((), "a function of a list of samples"),
        "optimizer": (("step", "param_groups"), "a torch.optim.Optimizer"),
        "lr_scheduler": (("step", "last_epoch"), "a schedule of torch.optim.lr_scheduler"),
        "metrics_handler": ((), "a MetricsHandler, or a function of (predictions, labels)"),
        "model_card": (("to_text",), "a ModelCard"),
    }
    faults = []
    for name, value in given.items():
        attributes, kind = has[name]
        fits = all(hasattr(value, attribute) for attribute in attributes) if attributes else callable(value)
        if name == "metrics_handler" and all(hasattr(value, method) for method in ("reset", "update", "compute")):
            fits = True
        if value is not None and not fits:
            faults.append(f"Trainer.{name}: got {value!r:.60} ({type(value).__name__}); it must be {kind}.")
    if faults:
        raise ConfigTypeError("\n".join(faults))


def check_optimizer(optimizer: Any, model: nn.Module, lr_scheduler: Any = None) -> None:
    """Refuse an optimizer of other parameters, and a schedule of another optimizer: they would train nothing."""
    check_kinds(optimizer=optimizer, lr_scheduler=lr_scheduler)
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"Trainer.optimizer: {type(optimizer).__name__} holds none of the model's parameters; make it with"
            " model.parameters()."
        )
    if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"Trainer.lr_scheduler: {type(lr_scheduler).__name__} is the schedule of another optimizer; give that one"
            " too, as optimizer=, or name the schedule in the configuration."
        )


def check_given(config: "TrainingConfig", optimizer: Optimizer | None, lr_scheduler: LRScheduler | None) -> None:
    """Warn once of the settings that have no effect because of a part that the Trainer is given.

    Raises:
        ConfigError: a given ReduceLROnPlateau is to be stepped every so many steps.
    """
    names = {
        "optimizer": ("optimizer", "learning_rate", "weight_decay"),
        "lr_scheduler": ("lr_scheduler", "lr_scheduler_kwargs", "lr_scheduler_type", "warmup_ratio", "warmup_steps"),
    }
    parts = {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
    unused = [
        f"{name}={getattr(config, name)!r} (the Trainer was given its own {part}, {type(given).__name__})"
        for part, given in parts.items()
        for name in names[part]
        if given is not None and getattr(config, name) != type(config).model_fields[name].default
    ]
    steps = config.lr_scheduling_steps
    if steps is not None and lr_scheduler is None and config.lr_scheduler is None:
        unused.append(f"lr_scheduling_steps={steps} (lr_scheduler_type is stepped at each update)")
    if unused:
        logger.warning("TrainingConfig: without effect: %s. Leave these settings out.", "; ".join(unused))
    if steps is not None and isinstance(lr_scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"TrainingConfig.lr_scheduling_steps: got {steps}, but the given ReduceLROnPlateau is stepped after each"
            " evaluation, or without one at the end of each epoch. Leave it out."
        )

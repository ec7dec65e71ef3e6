"""Where a run of the objects door computes, and in which processes: a launcher's, or those of a given Accelerator."""

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.parallel.dist import get_world_size
from trainwright.parallel.launch import leave_at_exit, setup_dist_util

if TYPE_CHECKING:
    from trainwright.config.training.training_config import TrainingConfig

logger = logging.getLogger("trainwright.engine")

_PRECISIONS = ("no", "bf16", "fp16")
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


def join(config: "TrainingConfig", accelerator: Any = None) -> "tuple[TrainingConfig, torch.device]":
    """Join the processes that a launcher started, if there are any; returns the settings and this one's device.

    With an ``accelerator`` the processes are its own, and the returned settings, a copy then, have what only it says.

    Raises:
        ConfigError: the two contradict each other, or several processes shall share one GPU.
    """
    if accelerator is not None:
        config = _agreed(config, accelerator)
        leave_at_exit()
        return config, torch.device(accelerator.device)
    asked = config.device_str
    if asked is not None and ":" in asked and not asked.startswith("cpu") and _num_launched() > 1:
        raise ConfigError(
            f"TrainingConfig.device_str: got {asked!r}, one device, for {_num_launched()} processes; give"
            f" {asked.partition(':')[0]!r}, of which each takes its own, or None."
        )
    return config, setup_dist_util({"device_type": asked})


def tell(config: "TrainingConfig", accelerator: Any = None) -> None:
    """Say what was asked for and is not so."""
    if config.distributed and get_world_size() == 1:
        logger.info(
            "TrainingConfig.distributed: this is the only process. `torchrun --nproc-per-node 2 SCRIPT` and"
            " `accelerate launch --multi_gpu --num_processes 2 SCRIPT` start two."
        )
    if accelerator is None:
        _warn_unused(config)


def _num_launched() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def _warn_unused(config: "TrainingConfig") -> None:
    """`accelerate launch --mixed_precision` speaks to an Accelerator, and there is none."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", _precision_of(config)):
        logger.warning(
            "`accelerate launch` says --mixed_precision %s, TrainingConfig.mixed_precision %r, and that one counts. Set"
            " it, or give the Trainer an Accelerator().",
            launched, config.mixed_precision,
        )  # fmt: skip


def _agreed(config: "TrainingConfig", accelerator: Any) -> "TrainingConfig":
    missing = [name for name in ("device", "prepare_model", "backward") if not hasattr(accelerator, name)]
    if missing:
        raise ConfigTypeError(
            f"Trainer.accelerator: got {type(accelerator).__name__}; it must be an accelerate.Accelerator."
        )
    faults = [*_faults_of(config, accelerator)]
    precision, steps = accelerator.mixed_precision, accelerator.gradient_accumulation_steps
    if config.is_set("mixed_precision") and _precision_of(config) != precision:
        faults.append(_contradiction("mixed_precision", config.mixed_precision, precision))
    if config.is_set("gradient_accumulation_steps") and config.gradient_accumulation_steps != steps:
        faults.append(_contradiction("gradient_accumulation_steps", config.gradient_accumulation_steps, steps))
    if faults:
        raise ConfigError("\n".join(faults))
    changes: dict[str, Any] = {}
    if _precision_of(config) != precision:
        changes["mixed_precision"] = precision
    if config.gradient_accumulation_steps != steps:
        changes["gradient_accumulation_steps"] = steps
    return config.copy_with(**changes) if changes else config


def _precision_of(config: "TrainingConfig") -> str:
    """By the name that accelerate has for it."""
    return config.mixed_precision or "no"


def _faults_of(config: "TrainingConfig", accelerator: Any) -> list[str]:
    faults = []
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind in _SHARDED:
        faults.append(f"Trainer.accelerator: it is set up for {kind}; the Trainer trains data-parallel only.")
    if accelerator.mixed_precision not in _PRECISIONS:
        faults.append(
            f"Trainer.accelerator: its mixed_precision is {accelerator.mixed_precision!r}; the Trainer knows"
            f" {', '.join(map(repr, _PRECISIONS))}."
        )
    asked = config.device_str
    if asked is not None and torch.device(asked).type != accelerator.device.type:
        faults.append(_contradiction("device_str", asked, str(accelerator.device), theirs="device"))
    if config.graph:
        faults.append(
            "TrainingConfig.graph: got True, with an Accelerator, which compiles by itself: give that a dynamo_backend"
            " and leave graph out."
        )
    return faults


def _contradiction(name: str, ours: object, its: object, *, theirs: str = "") -> str:
    return (
        f"TrainingConfig.{name}: got {ours!r}, but the given Accelerator has {theirs or name}={its!r}. Give both the"
        " same, or leave it out of the TrainingConfig."
    )

"""Device and processes of a run of the Python API: those of a launcher or of a passed Accelerator."""

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
    """Join the launcher's processes, if there are any; return the settings and the device of this process.

    With an ``accelerator`` its processes are used, and the returned settings are a copy with the accelerator's values.

    Raises:
        ConfigError: the two contradict each other, or several processes would share one GPU.
    """
    if accelerator is not None:
        config = _apply_accelerator(config, accelerator)
        leave_at_exit()
        return config, torch.device(accelerator.device)
    asked = config.device_str
    if asked is not None and ":" in asked and not asked.startswith("cpu") and _num_launched() > 1:
        raise ConfigError(
            f"TrainingConfig.device_str: got {asked!r}, one device, for {_num_launched()} processes; use"
            f" {asked.partition(':')[0]!r}, of which each process uses one, or None."
        )
    return config, setup_dist_util({"device_type": asked})


def check_launch(config: "TrainingConfig", accelerator: Any = None) -> None:
    """Log or warn if the launcher does not start what the settings request."""
    if config.distributed and get_world_size() == 1:
        logger.info(
            "TrainingConfig.distributed: there is only one process. `torchrun --nproc-per-node 2 SCRIPT` and"
            " `accelerate launch --multi_gpu --num_processes 2 SCRIPT` start two."
        )
    if accelerator is None:
        _warn_unused(config)


def _num_launched() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def _warn_unused(config: "TrainingConfig") -> None:
    """Warn that `accelerate launch --mixed_precision` has no effect without an Accelerator."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", _precision_of(config)):
        logger.warning(
            "`accelerate launch` sets --mixed_precision %s, but TrainingConfig.mixed_precision=%r is used. Set"
            " TrainingConfig.mixed_precision, or pass an Accelerator() to the Trainer.",
            launched, config.mixed_precision,
        )  # fmt: skip


def _apply_accelerator(config: "TrainingConfig", accelerator: Any) -> "TrainingConfig":
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
    """The precision under accelerate's name for it."""
    return config.mixed_precision or "no"


def _faults_of(config: "TrainingConfig", accelerator: Any) -> list[str]:
    faults = []
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind in _SHARDED:
        faults.append(f"Trainer.accelerator: got one for {kind}; the Trainer supports data parallelism only.")
    if accelerator.mixed_precision not in _PRECISIONS:
        faults.append(
            f"Trainer.accelerator: got mixed_precision={accelerator.mixed_precision!r}; the Trainer supports"
            f" {', '.join(map(repr, _PRECISIONS))}."
        )
    asked = config.device_str
    if asked is not None and torch.device(asked).type != accelerator.device.type:
        faults.append(_contradiction("device_str", asked, str(accelerator.device), theirs="device"))
    if config.graph:
        faults.append(
            "TrainingConfig.graph: got True with an Accelerator, which compiles by itself: set its dynamo_backend"
            " and remove graph."
        )
    return faults


def _contradiction(name: str, ours: object, its: object, *, theirs: str = "") -> str:
    return (
        f"TrainingConfig.{name}: got {ours!r}, but the passed Accelerator has {theirs or name}={its!r}. Set both to the"
        " same value, or remove it from the TrainingConfig."
    )

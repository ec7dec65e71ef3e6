"""``RunSpec``: the settings that a run of either API uses, under one vocabulary. Nothing below reads a config class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainwright.parallel.precision import autocast_dtype

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainwright.config.settings import TrainingConfig

Api = Literal["Python", "config file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The settings by their names in ``TrainingConfig``.

    Attributes:
        max_time: seconds, or text as the user writes it.
        batch_size: samples of a micro-batch of one process.
        gradient_accumulation_steps: micro-batches of an update.
        mixed_precision: the type of mixed precision; None: all is float32.
        asynchronous: whether checkpoints are written in the background.
        hardest_samples: the number of samples with the largest losses that each evaluation writes.
        overfit_batches: the number of batches that are trained and evaluated on, again and again.
        non_finite: what follows a loss or gradient that is NaN or infinite.
        loss_ignores: the classes of labels that the mean loss leaves out; None: samples count alike.
    """

    api: Api
    max_time: Any
    batch_size: int
    gradient_accumulation_steps: int
    mixed_precision: str | None
    float32_matmul_precision: Literal["highest", "high", "medium"] | None
    find_unused_parameters: bool
    gradient_checkpointing: bool | Literal["selective", "offload"]
    compile_blocks: bool
    zero_gather_precision: Literal["bf16"] | None
    graph: bool
    output_dir: str
    allow_other_trainer: bool
    save_trainable_only: bool
    asynchronous: bool
    hardest_samples: int | None
    overfit_batches: int | None
    limit_train_batches: int | float | None
    ema: Mapping[str, Any] | None
    unfreeze: Sequence[Any] | None
    seed: int
    log_throughput: bool
    deterministic: bool | Literal["warn"]
    non_finite: Literal["stop", "skip", "warn"]
    loss_ignores: int | Sequence[int] | Literal["declared"] | None

    def batch_settings(self, batch_size: int, accumulation: int) -> dict[str, int]:
        """The settings of an update of ``accumulation`` micro-batches, by the names that the user gives them."""
        if self.api == "Python":
            return {"batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        return {
            "train.train_micro_batch_size": batch_size,
            "train.num_accumulation_steps": accumulation,
            "train.global_batch_size": batch_size * accumulation,
        }


def spec_of_training_config(config: "TrainingConfig") -> RunSpec:
    """The settings of the Python API."""
    return _spec(
        {"api": "Python", "asynchronous": True, **{name: getattr(config, name) for name in type(config).model_fields}}
    )


def spec_of_cfg(cfg: "DictConfig", device: torch.device) -> RunSpec:
    """The settings of a complete configuration, as ``DefaultTrainer.cfg`` is, for a run on ``device``."""
    train, precision = cfg.train, str(autocast_dtype(device)).removeprefix("torch.")
    settings = {
        "api": "config file",
        **train.dist,
        **train.evaluation,
        **train.checkpointer,
        **train,
        "batch_size": train.train_micro_batch_size,
        "gradient_accumulation_steps": train.num_accumulation_steps,
        "mixed_precision": precision if train.amp.enabled else None,
        "gradient_checkpointing": train.activation_checkpoint.enabled,
        "zero_gather_precision": train.zero_optimization.gather_precision,
        "graph": cfg.graph.enabled,
    }
    return _spec(settings)


def _spec(settings: Mapping[str, Any]) -> RunSpec:
    return RunSpec(**{field.name: settings[field.name] for field in fields(RunSpec)})

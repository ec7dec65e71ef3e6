"""``RunSpec``: the settings of a run that both APIs share, under one vocabulary. Nothing below reads a config class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainwright.parallel.precision import autocast_dtype

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainwright.config.settings import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long the run is. The settings of an API that are not set are None."""

    num_epochs: float
    max_steps: int | float | None
    max_time: Any  # seconds, or text as the user writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of a micro-batch of one process, and the micro-batches of an update."""

    batch_size: int
    eval_batch_size: int
    gradient_accumulation_steps: int
    elastic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """``mixed_precision``: the type of mixed precision; None: all is float32."""

    mixed_precision: str | None
    float32_matmul_precision: Literal["highest", "high", "medium"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The layout of the processes, and what each does with the model."""

    data_parallel_size: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    zero_stage: int
    replicate_size: int | None
    sequence_parallel: bool
    pipeline_schedule: str
    find_unused_parameters: bool
    gradient_checkpointing: bool
    graph: bool
    hang_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """``output_dir`` and what is saved into it."""

    output_dir: str
    max_to_keep: int | None
    save_top_k: int | None
    save_trainable_only: bool
    asynchronous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """``hardest_samples``: the number of samples with the largest losses that each evaluation writes."""

    eval_on_start: bool
    hardest_samples: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """What is shown and recorded."""

    progress_bar: bool
    profile: Any
    trackers: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Parts of the data, as a number of batches or a share of them."""

    limit_train_batches: int | float | None
    limit_eval_batches: int | float | None
    overfit_batches: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What happens to the weights beside the optimizer's steps."""

    learning_rate: float | None
    ema: Mapping[str, Any] | None
    unfreeze: Sequence[Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """``non_finite``: what follows a loss or gradient that is NaN or infinite."""

    seed: int
    deterministic: bool | Literal["warn"]
    non_finite: Literal["stop", "skip", "warn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """All settings of a run that both APIs have, by their canonical names."""

    api: Literal["Python", "config file"]
    length: Length
    batch: Batch
    precision: Precision
    layout: Processes
    saving: Saving
    evaluation: Evaluations
    logging: Logging
    limits: Limits
    learning: Learning
    safety: Safety

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
        "Python",
        {
            **{name: getattr(config, name) for name in type(config).model_fields},
            "graph": bool(config.graph),
            "asynchronous": True,
        },
    )


def spec_of_cfg(cfg: "DictConfig", device: torch.device) -> RunSpec:
    """The settings of a complete configuration, as ``DefaultTrainer.cfg`` is, for a run on ``device``."""
    train = cfg.train
    zero, optim = train.zero_optimization, cfg.get("optim") or {}
    precision = str(autocast_dtype(device)).removeprefix("torch.")
    return _spec(
        "config file",
        {
            **train.dist,
            **train.evaluation,
            **train.checkpointer,
            **train,
            "num_epochs": train.train_epoch,
            "max_steps": train.train_iter,
            "batch_size": train.train_micro_batch_size,
            "eval_batch_size": train.test_micro_batch_size,
            "gradient_accumulation_steps": train.num_accumulation_steps,
            "mixed_precision": precision if train.amp.enabled else None,
            "zero_stage": zero.stage if zero.enabled else 0,
            "gradient_checkpointing": train.activation_checkpoint.enabled,
            "graph": cfg.graph.enabled,
            "learning_rate": optim.get("lr"),
        },
    )


_GROUPS = {
    "length": Length,
    "batch": Batch,
    "precision": Precision,
    "layout": Processes,
    "saving": Saving,
    "evaluation": Evaluations,
    "logging": Logging,
    "limits": Limits,
    "learning": Learning,
    "safety": Safety,
}


def _spec(api: Literal["Python", "config file"], given: Mapping[str, Any]) -> RunSpec:
    groups: dict[str, Any] = {}
    for name, kind in _GROUPS.items():
        groups[name] = kind(**{field.name: given.get(field.name) for field in fields(kind)})
    return RunSpec(api=api, **groups)

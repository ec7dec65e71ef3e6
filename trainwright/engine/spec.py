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
class Length:
    """``max_time``: seconds, or text as the user writes it."""

    max_time: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of a micro-batch of one process, and the micro-batches of an update."""

    batch_size: int
    gradient_accumulation_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """``mixed_precision``: the type of mixed precision; None: all is float32."""

    mixed_precision: str | None
    float32_matmul_precision: Literal["highest", "high", "medium"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """What each process does with the model."""

    find_unused_parameters: bool
    gradient_checkpointing: bool
    graph: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """``output_dir`` and what is saved into it."""

    output_dir: str
    save_trainable_only: bool
    asynchronous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """``hardest_samples``: the number of samples with the largest losses that each evaluation writes."""

    hardest_samples: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Parts of the data, as a number of batches or a share of them.

    ``overfit_batches``: the number of batches that are trained and evaluated on, again and again.
    """

    overfit_batches: int | None
    limit_train_batches: int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What happens to the weights beside the optimizer's steps, and the base learning rate."""

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
    """The settings by their names in ``TrainingConfig``."""

    api: Api
    length: Length
    batch: Batch
    precision: Precision
    layout: ModelLayout
    saving: Saving
    evaluation: Evaluations
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
        "Python", {"asynchronous": True, **{name: getattr(config, name) for name in type(config).model_fields}}
    )


def spec_of_cfg(cfg: "DictConfig", device: torch.device) -> RunSpec:
    """The settings of a complete configuration, as ``DefaultTrainer.cfg`` is, for a run on ``device``."""
    train, precision = cfg.train, str(autocast_dtype(device)).removeprefix("torch.")
    settings = {
        **train.dist,
        **train.evaluation,
        **train.checkpointer,
        **train,
        "batch_size": train.train_micro_batch_size,
        "gradient_accumulation_steps": train.num_accumulation_steps,
        "mixed_precision": precision if train.amp.enabled else None,
        "gradient_checkpointing": train.activation_checkpoint.enabled,
        "graph": cfg.graph.enabled,
        "learning_rate": (cfg.get("optim") or {}).get("lr"),
    }
    return _spec("config file", settings)


def _spec(api: Api, settings: Mapping[str, Any]) -> RunSpec:
    def group(kind: Any) -> Any:
        return kind(**{field.name: settings[field.name] for field in fields(kind)})

    return RunSpec(api=api, **{field.name: group(field.type) for field in fields(RunSpec) if field.name != "api"})

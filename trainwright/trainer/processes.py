"""Device and processes of a run of the Python API: those of a launcher or of a passed Accelerator."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.base.batch import tensors
from trainwright.base.dist import get_world_size, use_mesh
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.config.spec import RunSpec
from trainwright.engine.accumulation import TOKENS
from trainwright.engine.gradient_sync import GradientSync, gradient_sync
from trainwright.engine.pipeline_step import refuse_own_step, refuse_unseeded_loader
from trainwright.engine.run import TrainerRun
from trainwright.hooks.method_overrides import Overrides
from trainwright.parallel.data_parallel import leave_at_exit, num_launched, setup_dist_util
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.pipeline import Pipeline, pipeline_of
from trainwright.parallel.rank_checks import check_same_settings, data_size

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig


logger = logging.getLogger("trainwright.engine")

LAYOUT_SETTINGS = (
    *("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "replicate_size", "zero_stage"),
    *("zero_offload", "context_parallel_size", "expert_parallel_size", "sequence_parallel", "pipeline_schedule"),
    "custom_pipeline_stage_id",
)

# A pipeline runs the forward and backward passes of an update at once: these would call the model themselves. In
# optimization_step, a norm or a decision of the user's would be that of one stage.
OWN_STEPS = (
    *("run_step", "train_step", "training_step", "inner_training_loop", "compute_metric", "update_metrics"),
    "optimization_step",
)


def join(config: "TrainingConfig", accelerator: Any, given: Mapping[str, Any]) -> "tuple[TrainingConfig, torch.device]":
    """Join the launcher's processes, if there are any; return the settings and the device of this process.

    ``given``: the data arguments of the Trainer by name, which must have equal sizes on all processes.
    With an ``accelerator`` its processes are used, and the returned settings are a copy with the accelerator's values.
    """
    if accelerator is not None:
        config = _apply_accelerator(config, accelerator)
        leave_at_exit()
        use_mesh(None)
        _check_same(config, given)
        return config, torch.device(accelerator.device)
    sizes = {name: getattr(config, name) for name in (*LAYOUT_SETTINGS, "hang_timeout_s")}
    check = partial(_check_same, config, given)
    sizes["device_type"] = config.device_str

    def name_of(setting: str) -> str:
        return f"TrainingConfig.{'device_str' if setting == 'device_type' else setting}"

    return config, setup_dist_util(sizes, name=name_of, check=check)


def _check_same(config: "TrainingConfig", given: Mapping[str, Any]) -> None:
    sizes = {name: data_size(data, is_whole=name == "eval_dataloader") for name, data in given.items()}
    check_same_settings({"TrainingConfig": config.to_dict(), "Trainer": sizes})


def check_launch(spec: RunSpec, accelerator: Any = None) -> None:
    """Log or warn if the launcher does not start what the settings request."""
    if spec.distributed and get_world_size() == 1:
        logger.info(
            "TrainingConfig.distributed: there is only one process. `torchrun --nproc-per-node 2 SCRIPT` and"
            " `accelerate launch --multi_gpu --num_processes 2 SCRIPT` start two."
        )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if accelerator is None and launched not in ("no", spec.mixed_precision):
        logger.warning(
            "`accelerate launch` sets --mixed_precision %s, but TrainingConfig.mixed_precision=%r is used. Set"
            " TrainingConfig.mixed_precision, or pass an Accelerator() to the Trainer.",
            launched, spec.mixed_precision,
        )  # fmt: skip


def _apply_accelerator(config: "TrainingConfig", accelerator: Any) -> "TrainingConfig":
    if not hasattr(accelerator, "prepare_model"):
        raise ConfigTypeError(
            f"Trainer.accelerator: got {type(accelerator).__name__}; it must be an accelerate.Accelerator."
        )
    faults = []
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        faults.append(f"Trainer.accelerator: got one for {kind}; the Trainer supports data parallelism only.")
    if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
        faults.append(
            f"Trainer.accelerator: got mixed_precision={accelerator.mixed_precision!r}; the Trainer supports"
            " 'no', 'bf16', 'fp16'."
        )
    sizes = "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size"
    least = {**dict.fromkeys(sizes, 1), "zero_stage": 0}
    faults += [
        f"TrainingConfig.{name}: got {getattr(config, name)} with an Accelerator, which has its own processes and"
        " averages gradients itself. Start the Trainer without it."
        for name, smallest in least.items()
        if (getattr(config, name) or 0) > smallest
    ]
    if config.graph:
        faults.append(
            "TrainingConfig.graph: got True with an Accelerator, which compiles by itself: set its dynamo_backend"
            " and remove graph."
        )
    theirs = {
        "device_str": str(accelerator.device),
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
    }
    ours = {name: getattr(config, name) or "no" for name in theirs}
    if config.device_str is None or torch.device(config.device_str).type == accelerator.device.type:
        ours["device_str"] = theirs["device_str"]
    changes = {name: value for name, value in theirs.items() if ours[name] != value}
    faults += [
        f"TrainingConfig.{name}: got {getattr(config, name)!r}, but the passed Accelerator has"
        f" {name.removesuffix('_str')}={value!r}. Set both to the same value, or remove it from the TrainingConfig."
        for name, value in changes.items()
        if config.is_set(name)
    ]
    if faults:
        raise ConfigError("\n".join(faults))
    return config.copy_with(**changes) if changes else config


def has_all_gpus(device_str: str | None) -> bool:
    """Whether a run on this device uses several GPUs in one process."""
    return device_str == "cuda" and num_launched() == 1 and torch.cuda.is_available() and torch.cuda.device_count() > 1


class AllGPUs(nn.DataParallel[Any]):
    """torch's DataParallel, also for models that return their losses: splits the batch and gathers the outputs.

    A loss is the mean over the GPUs' parts of the batch, weighted by samples, or by tokens if the model returns
    ``num_tokens``. Slower than one process per GPU (``torchrun --nproc-per-node``), since one process drives all GPUs.
    """

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        scattered = super().scatter(inputs, kwargs, device_ids)
        self._sizes = [_samples((args, named)) for args, named in zip(*scattered, strict=True)]
        return scattered

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        first = outputs[0]
        if isinstance(first, Mapping):
            weights = [out[TOKENS] for out in outputs] if TOKENS in first else self._sizes
            return {name: self._joined(name, [out[name] for out in outputs], output_device, weights) for name in first}
        return self._joined("", list(outputs), output_device, self._sizes)

    def _joined(self, name: str, values: list[Any], device: Any, weights: Sequence[Any]) -> Any:
        if not all(isinstance(value, Tensor) and value.dim() == 0 for value in values):
            return super().gather(values, device)
        place = torch.device("cuda", device) if isinstance(device, int) else device
        stacked = torch.stack([value.to(place) for value in values])
        if name == TOKENS:
            return stacked.sum()
        by = torch.stack([torch.as_tensor(weight, device=stacked.device) for weight in weights]).to(stacked.dtype)
        return torch.where(by > 0, stacked * by, torch.zeros_like(stacked)).sum() / by.sum().clamp(min=1)


def _samples(value: Any) -> int:
    """The first dimension of the first tensor in ``value``; 1 if there is none."""
    first = next(tensors(value), None)
    return len(first) if first is not None and first.dim() else 1


class Placement:
    """The model of a run on its processes. With one process and no Accelerator, it is the model itself.

    Args:
        optimizer: the user's own; None: built later.
        splits_scores: whether nothing but the model's loss uses its scores.
        wraps: False: with several processes, gradients are averaged after the backward passes.

    Attributes:
        model: what a step calls: the model, perhaps wrapped. ``on_wrap``: called when it changes.
    """

    def __init__(self, run: TrainerRun, *, accelerator: Any, optimizer: Any, splits_scores: bool, wraps: bool) -> None:
        model = run.model
        _refuse_with_mesh(run.spec, model, accelerator)
        autocast = None if accelerator is not None else run.autocast
        run.place_model(splits_scores=splits_scores, autocast=autocast, optimizer=optimizer)
        prepared = None if accelerator is None else accelerator.prepare_model(model)  # applies autocast, too
        self.pipeline = pipeline_of(model)
        self.model: Any = model if prepared is None else prepared
        self.on_wrap: Callable[[Any], object] | None = None
        self.sync: GradientSync | None = gradient_sync(
            model,
            run.device,
            self._use,
            prepared=prepared,
            find_unused_parameters=run.spec.find_unused_parameters,
            wraps=wraps,
        )
        if self.sync is None and has_all_gpus(run.spec.device_str):
            self.model = AllGPUs(model)

    def _use(self, model: Any) -> None:
        self.model = model
        if self.on_wrap is not None:
            self.on_wrap(model)


def _refuse_with_mesh(spec: RunSpec, model: nn.Module, accelerator: Any) -> None:
    mesh = current_mesh()
    if mesh is None:
        return
    if mesh.layout.sequence_parallel and _generates(spec, model):
        raise ConfigError(
            "TrainingConfig.evaluate_with_generate: got True with sequence_parallel=True, which needs texts whose"
            " length tensor_parallel_size divides; generate adds one token at a time. Set one of them to False."
        )
    if accelerator is not None:
        raise ConfigError(
            "Trainer.accelerator: got one with tensor, pipeline or context parallel, or ZeRO of TrainingConfig; use one"
            " of the two."
        )


def _generates(spec: RunSpec, model: nn.Module) -> bool:
    is_on = spec.is_set("evaluate_with_generate") and spec.evaluate_with_generate
    return bool(is_on and getattr(model, "is_generative", False))


def check_pipeline(pipeline: Pipeline, spec: RunSpec, model: nn.Module, loader: Any, overrides: Overrides) -> None:
    """Raise if the model's stages cannot train with these settings, this loader or these methods of the user's."""
    refuse_own_step(pipeline, overrides.kind, [name for name in OWN_STEPS if overrides.has(name)])
    if _generates(spec, model):
        raise ConfigError(
            "TrainingConfig.evaluate_with_generate: got True with pipeline_parallel_size > 1, whose stages have a"
            " part of the model. Use tensor parallelism or ZeRO, or set it to False."
        )
    refuse_unseeded_loader(loader, "Trainer.train_dataloader")
    pipeline.check_length(spec.windows.largest, "TrainingConfig.gradient_accumulation_steps")

"""The stepper of a DefaultTrainer, and the settings that a step of the user's own may ignore."""

import logging
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig
from torch.optim import Optimizer

from trainwright.config.errors import ConfigError
from trainwright.engine.default.eager_trainer import EagerTrainer
from trainwright.engine.pipeline_step import refuse_own_step, refuse_unseeded_loader
from trainwright.engine.run import Run
from trainwright.engine.update import Update
from trainwright.lazy_names import ring
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.pipeline import pipeline_of

logger = logging.getLogger("trainwright.engine")


def build_stepper(
    run: Run, cfg: DictConfig, train_loader: Any, build_graph: Callable[..., Any], *, own_step_of: str | None
) -> EagerTrainer:
    """What makes the steps of a DefaultTrainer: eager, compiled or of a pipeline.

    ``own_step_of``: the name of the user's class that overrides ``train_step``.

    Raises:
        ConfigError: the settings exclude each other.
    """
    spec, steps = run.spec, run.spec.batch.gradient_accumulation_steps
    settings: dict[str, Any] = {
        "grad_scaler": run.grad_scaler,
        "skip_non_finite": spec.safety.non_finite == "skip",
        "find_unused_parameters": spec.layout.find_unused_parameters,
        "wraps_model": own_step_of is None,
    }
    pipeline = pipeline_of(run.model)
    refuse_own_step(pipeline, own_step_of or "", ["train_step"] if own_step_of else [])
    if spec.layout.graph and current_mesh() is not None:
        raise ConfigError(
            "graph.enabled: got True with tensor parallel, pipeline parallel or ZeRO, which are not compiled; set"
            " it to False."
        )
    if pipeline is not None:
        refuse_unseeded_loader(train_loader, "dataloader.train")
        pipeline.check_length(steps, "train.num_accumulation_steps")
    if spec.layout.graph:
        graph = build_graph(cfg, run.model, run.optimizer, run.lr_scheduler)
        graph_trainer: EagerTrainer = ring("graph.graph_trainer").GraphTrainer(graph, train_loader, steps, **settings)
        return graph_trainer
    return EagerTrainer(run.model, train_loader, run.optimizer, steps, **settings)


def settings_of_step(train: DictConfig, update: Update, optimizer: Optimizer) -> dict[str, str]:
    """The settings that a step of the user's own may ignore, by what they change."""
    settings = {}
    if train.num_accumulation_steps > 1:
        settings["accumulation"] = f"train.num_accumulation_steps={train.num_accumulation_steps}"
    if update.grad_scaler is not None:
        settings["scaler"] = "the gradient scaler of float16"
    for name in ("clip_grad_max_norm", "clip_grad_value"):
        if any(group.get(name) is not None for group in optimizer.param_groups):
            settings["clipping"] = name
    if train.non_finite == "skip":
        settings["skip"] = "train.non_finite='skip'"
    return settings


def warn_of_settings_without_effect(stepper: Any, steps: int, name: str, *, has_own_step: bool, assigned: bool) -> None:
    """Settings that ``stepper``, perhaps the user's replacement, was not built with; ``name``: of the trainer.

    ``assigned``: ``train_step`` was assigned to the trainer after ``__init__``.
    """
    if assigned:
        raise ConfigError("DefaultTrainer.train_step: was assigned after __init__; override it in a subclass.")
    if has_own_step and getattr(stepper, "has_own_run_step", lambda: True)():
        logger.warning(
            "%s.train_step has no effect: trainer._trainer, a %s, has its own run_step.", name, type(stepper).__name__
        )
    own_steps = getattr(stepper, "grad_acc_steps", None)
    if own_steps not in (None, steps):
        logger.warning(
            "train.num_accumulation_steps=%d has no effect: trainer._trainer, a %s, was built with"
            " grad_acc_steps=%d. Pass cfg.train.num_accumulation_steps to it.",
            steps, type(stepper).__name__, own_steps,
        )  # fmt: skip

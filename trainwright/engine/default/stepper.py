"""The stepper of a DefaultTrainer, and the settings that a step of the user's own may ignore."""

import logging
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.engine.default.eager_trainer import EagerTrainer
from trainwright.engine.pipeline_step import refuse_own_step, refuse_unseeded_loader
from trainwright.hooks.method_overrides import is_overridden
from trainwright.lazy_names import ring
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.pipeline import pipeline_of

logger = logging.getLogger("trainwright.engine")


def build_stepper(trainer: Any) -> EagerTrainer:
    """What makes the steps of a DefaultTrainer: eager, compiled or of a pipeline.

    Raises:
        ConfigError: the settings exclude each other.
    """
    cfg, steps = trainer.cfg, trainer.cfg.train.num_accumulation_steps
    settings: dict[str, Any] = {
        "grad_scaler": trainer._grad_scaler,
        "skip_non_finite": cfg.train.non_finite == "skip",
        "find_unused_parameters": cfg.train.dist.find_unused_parameters,
        "wraps_model": not trainer._has_own_step,
    }
    pipeline = pipeline_of(trainer.model)
    refuse_own_step(pipeline, type(trainer).__name__, ["train_step"] if trainer._has_own_step else [])
    if cfg.graph.enabled and current_mesh() is not None:
        raise ConfigError(
            "graph.enabled: got True with tensor parallel, pipeline parallel or ZeRO, which are not compiled; set"
            " it to False."
        )
    if pipeline is not None:
        refuse_unseeded_loader(trainer.train_loader, "dataloader.train")
        pipeline.check_length(steps, "train.num_accumulation_steps")
    if cfg.graph.enabled:
        graph = trainer.build_graph(cfg, trainer.model, trainer.optimizer, trainer.lr_scheduler)
        graph_trainer: EagerTrainer = ring("graph.graph_trainer").GraphTrainer(
            graph, trainer.train_loader, steps, **settings
        )
        return graph_trainer
    return EagerTrainer(trainer.model, trainer.train_loader, trainer.optimizer, steps, **settings)


def settings_of_step(trainer: Any) -> dict[str, str]:
    """The settings that a step of the user's own may ignore, by what they change."""
    train, settings = trainer.cfg.train, {}
    if train.num_accumulation_steps > 1:
        settings["accumulation"] = f"train.num_accumulation_steps={train.num_accumulation_steps}"
    if trainer._update.grad_scaler is not None:
        settings["scaler"] = "the gradient scaler of float16"
    for name in ("clip_grad_max_norm", "clip_grad_value"):
        if any(group.get(name) is not None for group in trainer.optimizer.param_groups):
            settings["clipping"] = name
    if train.non_finite == "skip":
        settings["skip"] = "train.non_finite='skip'"
    return settings


def warn_of_settings_without_effect(trainer: Any) -> None:
    """Settings that ``trainer._trainer``, replaced by the user, was not built with."""
    if is_overridden(trainer, "train_step") and not trainer._has_own_step:
        raise ConfigError("DefaultTrainer.train_step: was assigned after __init__; override it in a subclass.")
    if trainer._has_own_step and getattr(trainer._trainer, "has_own_run_step", lambda: True)():
        logger.warning(
            "%s.train_step has no effect: trainer._trainer, a %s, has its own run_step.",
            type(trainer).__name__, type(trainer._trainer).__name__,
        )  # fmt: skip
    steps, own_steps = trainer.cfg.train.num_accumulation_steps, getattr(trainer._trainer, "grad_acc_steps", None)
    if own_steps not in (None, steps):
        logger.warning(
            "train.num_accumulation_steps=%d has no effect: trainer._trainer, a %s, was built with"
            " grad_acc_steps=%d. Pass cfg.train.num_accumulation_steps to it.",
            steps, type(trainer._trainer).__name__, own_steps,
        )  # fmt: skip

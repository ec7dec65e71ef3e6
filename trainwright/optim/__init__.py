"""What changes the weights: parameter groups, configured optimizers, clipping, learning-rate schedules, freezing."""

from trainwright.optim.build import build_lr_scheduler, build_optimizer
from trainwright.optim.clip import gradient_clipper
from trainwright.optim.configured import (
    configure_constant_scheduler,
    configure_constant_scheduler_with_warmup,
    configure_cosine_scheduler_with_warmup,
    configure_cosine_with_hard_restarts_scheduler_with_warmup,
    configure_linear_scheduler_with_warmup,
    configure_polynomial_decay_scheduler_with_warmup,
)
from trainwright.optim.freeze import LayerFreezer, freeze_bn
from trainwright.optim.groups import get_default_optimizer_params, reduce_param_groups
from trainwright.optim.schedules import (
    WarmupCosineAnnealingLR,
    WarmupCosineLR,
    WarmupExponentialLR,
    WarmupMultiStepLR,
    WarmupPolynomialLR,
    WarmupStepLR,
)

__all__ = [
    "build_optimizer",
    "get_default_optimizer_params",
    "reduce_param_groups",
    "gradient_clipper",
    "build_lr_scheduler",
    "WarmupCosineLR",
    "WarmupCosineAnnealingLR",
    "WarmupStepLR",
    "WarmupMultiStepLR",
    "WarmupExponentialLR",
    "WarmupPolynomialLR",
    "configure_constant_scheduler",
    "configure_constant_scheduler_with_warmup",
    "configure_linear_scheduler_with_warmup",
    "configure_cosine_scheduler_with_warmup",
    "configure_cosine_with_hard_restarts_scheduler_with_warmup",
    "configure_polynomial_decay_scheduler_with_warmup",
    "LayerFreezer",
    "freeze_bn",
]

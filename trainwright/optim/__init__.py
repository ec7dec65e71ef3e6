"""What changes the weights: parameter groups, configured optimizers, clipping, learning-rate schedules, freezing."""

from typing import TYPE_CHECKING

from trainwright.base.lazy_names import declared_names

if TYPE_CHECKING:
    from trainwright.optim.build import build_lr_scheduler as build_lr_scheduler
    from trainwright.optim.build import build_optimizer as build_optimizer
    from trainwright.optim.build import get_default_optimizer_params as get_default_optimizer_params
    from trainwright.optim.build import reduce_param_groups as reduce_param_groups
    from trainwright.optim.clip import gradient_clipper as gradient_clipper
    from trainwright.optim.freeze import LayerFreezer as LayerFreezer
    from trainwright.optim.freeze import freeze_bn as freeze_bn
    from trainwright.optim.layer_depth import layer_depths as layer_depths
    from trainwright.optim.muon import Muon as Muon
    from trainwright.optim.schedules import WarmupCosineAnnealingLR as WarmupCosineAnnealingLR
    from trainwright.optim.schedules import WarmupCosineLR as WarmupCosineLR
    from trainwright.optim.schedules import WarmupExponentialLR as WarmupExponentialLR
    from trainwright.optim.schedules import WarmupMultiStepLR as WarmupMultiStepLR
    from trainwright.optim.schedules import WarmupPolynomialLR as WarmupPolynomialLR
    from trainwright.optim.schedules import WarmupStepLR as WarmupStepLR
    from trainwright.optim.schedules import configure_constant_scheduler as configure_constant_scheduler
    from trainwright.optim.schedules import (
        configure_constant_scheduler_with_warmup as configure_constant_scheduler_with_warmup,
    )
    from trainwright.optim.schedules import (
        configure_cosine_scheduler_with_warmup as configure_cosine_scheduler_with_warmup,
    )
    from trainwright.optim.schedules import (
        configure_cosine_with_hard_restarts_scheduler_with_warmup as configure_cosine_with_hard_restarts_scheduler_with_warmup,  # noqa: E501
    )
    from trainwright.optim.schedules import (
        configure_linear_scheduler_with_warmup as configure_linear_scheduler_with_warmup,
    )
    from trainwright.optim.schedules import (
        configure_polynomial_decay_scheduler_with_warmup as configure_polynomial_decay_scheduler_with_warmup,
    )

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __all__, __getattr__ = declared_names(__name__)

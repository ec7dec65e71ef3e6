"""The engine: the loop, the steps, and the trainers of both APIs."""

from typing import TYPE_CHECKING

from trainwright.base.lazy_names import declared_names

if TYPE_CHECKING:
    from trainwright.config_trainer.default_trainer import DefaultTrainer as DefaultTrainer
    from trainwright.config_trainer.eager_trainer import EagerTrainer as EagerTrainer
    from trainwright.config_trainer.setup import default_setup as default_setup
    from trainwright.engine.loop import TrainerBase as TrainerBase
    from trainwright.engine.own_loop import TrainingLoop as TrainingLoop
    from trainwright.graph.graph_trainer import GraphBase as GraphBase
    from trainwright.graph.graph_trainer import GraphTrainer as GraphTrainer
    from trainwright.hooks.base import HookBase as HookBase
    from trainwright.inspect.estimate import Estimate as Estimate
    from trainwright.inspect.estimate import estimate as estimate
    from trainwright.inspect.estimate import fitting_layouts as fitting_layouts
    from trainwright.trainer.trainer import Trainer as Trainer

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __all__, __getattr__ = declared_names(__name__)

"""The engine: the loop, the steps, and the trainers of both APIs."""

from typing import TYPE_CHECKING

from trainwright.lazy_names import declared_names

if TYPE_CHECKING:
    from trainwright.engine.default.default_trainer import DefaultTrainer as DefaultTrainer
    from trainwright.engine.default.eager_trainer import EagerTrainer as EagerTrainer
    from trainwright.engine.default.setup import default_setup as default_setup
    from trainwright.engine.loop import TrainerBase as TrainerBase
    from trainwright.engine.own_loop import TrainingLoop as TrainingLoop
    from trainwright.engine.trainer.trainer import Trainer as Trainer
    from trainwright.graph.graph_trainer import GraphBase as GraphBase
    from trainwright.graph.graph_trainer import GraphTrainer as GraphTrainer
    from trainwright.hooks.base import HookBase as HookBase
    from trainwright.inspect.estimate import Estimate as Estimate
    from trainwright.inspect.estimate import estimate as estimate
    from trainwright.inspect.estimate import fitting_layouts as fitting_layouts

__all__, __getattr__ = declared_names(__name__)

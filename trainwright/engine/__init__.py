"""The engine: the loop, the steps, and the trainers that configurations describe."""

from trainwright.engine.default import DefaultTrainer
from trainwright.engine.graph import GraphBase, GraphTrainer
from trainwright.engine.loop import TrainerBase
from trainwright.engine.setup import default_setup
from trainwright.engine.steps import EagerTrainer
from trainwright.engine.trainer import Trainer
from trainwright.hooks.base import HookBase

__all__ = [
    "TrainerBase",
    "HookBase",
    "EagerTrainer",
    "GraphTrainer",
    "GraphBase",
    "DefaultTrainer",
    "Trainer",
    "default_setup",
]

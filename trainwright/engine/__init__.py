"""The engine: the loop, the steps, and the trainers that configurations describe."""

from typing import TYPE_CHECKING

from trainwright.names import on_first_use

if TYPE_CHECKING:
    from trainwright.engine.default import DefaultTrainer as DefaultTrainer
    from trainwright.engine.graph import GraphBase as GraphBase
    from trainwright.engine.graph import GraphTrainer as GraphTrainer
    from trainwright.engine.loop import TrainerBase as TrainerBase
    from trainwright.engine.setup import default_setup as default_setup
    from trainwright.engine.steps import EagerTrainer as EagerTrainer
    from trainwright.engine.trainer import Trainer as Trainer
    from trainwright.hooks.base import HookBase as HookBase

# The block above says the same to type checkers; tests/house holds the two together.
_NAMES_OF = {
    "default": "DefaultTrainer",
    "graph": "GraphBase GraphTrainer",
    "loop": "TrainerBase",
    "setup": "default_setup",
    "steps": "EagerTrainer",
    "trainer": "Trainer",
    "trainwright.hooks.base": "HookBase",
}

__all__ = [*" ".join(_NAMES_OF.values()).split()]
__getattr__ = on_first_use(__name__, _NAMES_OF)

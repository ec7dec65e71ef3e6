"""trainwright: a PyTorch training library, one engine with two APIs.

Importing it is cheap: a public name loads its room on first use (PEP 562), and torch only with a room that needs it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.config import LazyCall as LazyCall
    from trainwright.config import LazyConfig as LazyConfig
    from trainwright.config import TrainerConfig as TrainerConfig
    from trainwright.config import TrainingConfig as TrainingConfig
    from trainwright.config import configurable as configurable
    from trainwright.config import get_config as get_config
    from trainwright.config import instantiate as instantiate
    from trainwright.engine import DefaultTrainer as DefaultTrainer
    from trainwright.engine import Trainer as Trainer
    from trainwright.events import get_event_storage as get_event_storage

__version__ = "0.1.0"

# Which room holds a public name. The block above says the same to type checkers; tests/house holds the two together.
_ROOM_OF = {
    "LazyCall": "config",
    "LazyConfig": "config",
    "configurable": "config",
    "get_config": "config",
    "instantiate": "config",
    "TrainingConfig": "config",
    "TrainerConfig": "config",
    "DefaultTrainer": "engine",
    "Trainer": "engine",
    "get_event_storage": "events",
}

_ROOMS = ("ops",)  # reached by attribute too: trainwright.ops.image_embedding.timm(...)

__all__ = ["__version__", *_ROOM_OF]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

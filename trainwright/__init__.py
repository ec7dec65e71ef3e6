"""trainwright: a PyTorch training library, one engine with two APIs.

Importing it is cheap: a public name loads its room on first use (PEP 562), and torch only with a room that needs it.
"""

import os
from typing import TYPE_CHECKING

from trainwright.base.lazy_names import declared_names

if TYPE_CHECKING:
    from trainwright import ops as ops
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

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __all__, __getattr__ = declared_names(__name__)
    __all__ += ["__version__"]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun has started this process
    from trainwright.base.error_file import report_errors

    report_errors()

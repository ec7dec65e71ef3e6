"""Hooks: code that runs around the steps of a training."""

from typing import TYPE_CHECKING

from trainwright.base.lazy_names import on_first_use
from trainwright.hooks.base import CallbackHook, HookBase
from trainwright.hooks.callbacks import (
    Callback,
    CallbackList,
    EarlyStoppingCallback,
    Logs,
    ModelCheckpointCallback,
    PrintCallBack,
    PrintCallback,
    ProgressBarCallBack,
    ProgressBarCallback,
    RunCallbacks,
    TensorBoardCallBack,
    TensorBoardCallback,
    TrainerControl,
)
from trainwright.hooks.checkpoint import BestCheckpointer, PeriodicCheckpointer
from trainwright.hooks.due import Moment
from trainwright.hooks.evaluation import EvalHook
from trainwright.hooks.lr_scheduler import LRScheduler, ReduceOnPlateau
from trainwright.hooks.nan_check import FiniteCheck, NonFiniteError
from trainwright.hooks.profile import ProfileHook
from trainwright.hooks.signals import Interruptions
from trainwright.hooks.timer import IterationTimer
from trainwright.hooks.torch_settings import DeterministicAlgorithms, Float32MatmulPrecision
from trainwright.hooks.writers import PeriodicWriter

__all__ = [
    "HookBase",
    "Moment",
    "CallbackHook",
    "IterationTimer",
    "ProfileHook",
    "LRScheduler",
    "ReduceOnPlateau",
    "PeriodicWriter",
    "PeriodicCheckpointer",
    "BestCheckpointer",
    "EvalHook",
    "FiniteCheck",
    "DeterministicAlgorithms",
    "Float32MatmulPrecision",
    "NonFiniteError",
    "Interruptions",
    "Callback",
    "CallbackList",
    "TrainerControl",
    "Logs",
    "RunCallbacks",
    "EarlyStoppingCallback",
    "ModelCheckpointCallback",
    "TensorBoardCallBack",
    "TensorBoardCallback",
    "PrintCallBack",
    "PrintCallback",
    "ProgressBarCallBack",
    "ProgressBarCallback",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __getattr__ = on_first_use(__name__, {})  # its error names the module of a public name

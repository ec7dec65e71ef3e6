"""Hooks: code that runs around the steps of a training."""

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
    "TensorBoardCallback",
    "TensorBoardCallBack",
    "PrintCallback",
    "PrintCallBack",
    "ProgressBarCallback",
    "ProgressBarCallBack",
]

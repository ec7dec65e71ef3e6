"""Callbacks: twelve methods that are called around epochs, batches and evaluations."""

from trainwright.hooks.callbacks.base import Callback, CallbackList, TrainerControl
from trainwright.hooks.callbacks.bridge import RunCallbacks
from trainwright.hooks.callbacks.early_stopping import EarlyStoppingCallback
from trainwright.hooks.callbacks.logs import Logs
from trainwright.hooks.callbacks.model_checkpoint import ModelCheckpointCallback
from trainwright.hooks.callbacks.progress import PrintCallback, ProgressBarCallback
from trainwright.hooks.callbacks.tensorboard import TensorBoardCallback

# Towhee's spelling.
TensorBoardCallBack = TensorBoardCallback
PrintCallBack = PrintCallback
ProgressBarCallBack = ProgressBarCallback

__all__ = [
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

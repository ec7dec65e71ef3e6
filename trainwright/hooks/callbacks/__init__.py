"""Callbacks: twelve methods that are called around epochs, batches and evaluations."""

from typing import TYPE_CHECKING

from trainwright.base.lazy_names import declared_names

if TYPE_CHECKING:
    from trainwright.hooks.callbacks.base import Callback as Callback
    from trainwright.hooks.callbacks.base import CallbackList as CallbackList
    from trainwright.hooks.callbacks.base import TrainerControl as TrainerControl
    from trainwright.hooks.callbacks.bridge import RunCallbacks as RunCallbacks
    from trainwright.hooks.callbacks.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
    from trainwright.hooks.callbacks.logs import Logs as Logs
    from trainwright.hooks.callbacks.model_checkpoint import ModelCheckpointCallback as ModelCheckpointCallback
    from trainwright.hooks.callbacks.progress import PrintCallBack as PrintCallBack
    from trainwright.hooks.callbacks.progress import PrintCallback as PrintCallback
    from trainwright.hooks.callbacks.progress import ProgressBarCallBack as ProgressBarCallBack
    from trainwright.hooks.callbacks.progress import ProgressBarCallback as ProgressBarCallback
    from trainwright.hooks.callbacks.tensorboard import TensorBoardCallBack as TensorBoardCallBack
    from trainwright.hooks.callbacks.tensorboard import TensorBoardCallback as TensorBoardCallback

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __all__, __getattr__ = declared_names(__name__)

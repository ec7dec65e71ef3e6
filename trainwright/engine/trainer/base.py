"""Attributes of the Python API's trainer, and the methods that its modules call on each other."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from trainwright.engine.loss_fn import Contract
from trainwright.engine.run_methods import RunMethods
from trainwright.engine.state import TrainerState
from trainwright.engine.step import Step
from trainwright.engine.trainer.train_metrics import TrainMetrics
from trainwright.hooks.callbacks import CallbackList, RunCallbacks
from trainwright.hooks.method_overrides import Overrides
from trainwright.parallel.pipeline import Pipeline

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig


# An override of one of these is a step of the user's own.
OWN_STEP_METHODS = ("run_step", "train_step", "training_step", "optimization_step")
# An override of one of these computes the loss itself.
STEP_METHODS = ("train_step", "training_step", "compute_loss")


class TrainerShared(RunMethods):
    """Base of :class:`~trainwright.Trainer`, which sets and documents these attributes."""

    config: "TrainingConfig"
    train_dataloader: Any
    loss: Any
    callbacks: CallbackList
    state: TrainerState
    _step_model: Any
    _contract: Contract | None
    _criterion: Callable[..., Any] | None
    _own_loss: Callable[..., Any] | None
    _train_metrics: TrainMetrics | None
    _overrides: Overrides
    _records_outputs = True  # pass the model's outputs to the loss weights and the training metrics
    _scalars: dict[str, Any] | None = None  # those that the model returned for the current micro-batch
    _pipeline: Pipeline | None = None  # if the model is cut into stages
    _step: Step | None = None  # during training
    _methods_of_step: tuple[Any, Any] = (None, None)  # attributes of the trainer that the step was chosen with
    _prepared_update: Any = None  # the trainer's attribute optimization_step, if there is one
    _compute_loss: Any = None  # during training: the loss of a batch, by the contract or the user's override
    _run_callbacks: RunCallbacks
    accelerator: Any

    def _has_train_metrics(self) -> bool:
        raise NotImplementedError

    def _after_batch(self) -> Callable[[Any, Any], None] | None:
        raise NotImplementedError

    def _is_padding_batch(self) -> bool:
        raise NotImplementedError

    def prepare_input_batch(self, batch: Any) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any) -> Any:
        raise NotImplementedError

    def optimization_step(self) -> None:
        raise NotImplementedError

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        raise NotImplementedError

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        raise NotImplementedError

    def update_metrics(self, model: Any, inputs: Any, step_loss: Any, training: bool = True) -> tuple[float, float]:
        raise NotImplementedError

    def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
        raise NotImplementedError

    def set_train_mode(self, model: nn.Module | None = None) -> None:
        raise NotImplementedError

"""What the files of the objects door share: its attributes, and the methods that they call on each other."""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.engine.comparison import Comparison
from trainwright.engine.loop import TrainerBase
from trainwright.engine.loss_fn import Contract
from trainwright.engine.run_directory import RunFolder
from trainwright.engine.schedule_plan import StepPlan
from trainwright.engine.state import TrainerState
from trainwright.engine.trainer.optim import Autocast
from trainwright.engine.trainer.parts import build_metrics_handler
from trainwright.hooks.callbacks import Callback, CallbackList, RunCallbacks, TrainerControl

if TYPE_CHECKING:
    from trainwright.config.training.training_config import TrainingConfig


# Overrides of these compute the loss by themselves.
OF_THE_STEP = ("train_step", "training_step", "compute_loss")


class TrainerShared(TrainerBase):
    """The trainer itself is :class:`~trainwright.Trainer`, which makes these and says what they are."""

    # Given.
    config: "TrainingConfig"
    model: nn.Module
    train_dataset: Any
    eval_dataset: Any
    preprocessor: Any
    model_card: Any
    # Built.
    output_dir: Path  # absolute: the working folder may change while it trains
    device: torch.device
    train_dataloader: Any
    eval_dataloader: Any
    optimizer: Optimizer
    lr_scheduler: LRScheduler | None
    loss: Any
    callbacks: CallbackList
    trainercontrol: TrainerControl
    state: TrainerState
    checkpointer: Checkpointer
    total_steps: int
    _is_given_schedule: bool = False
    _collator: Callable[[list[Any]], Any] | None
    _plan: StepPlan
    _save_steps: int
    _log_steps: int
    _step_model: Any
    _contract: Contract | None
    _criterion: Callable[..., Any] | None
    _own_loss: Callable[..., Any] | None
    _shows_outputs = True  # the model's, to what weighs and counts them in training
    _autocast: Autocast | None
    _grad_scaler: torch.amp.GradScaler | None
    _folder: RunFolder
    _batches: Iterator[Any]
    _inputs: Any = None  # the batch of now
    _evaluated_step: int | None = None  # what state.global_step was at the last evaluation
    _run_callbacks: RunCallbacks
    accelerator: Any
    _built_in_callbacks: list[Callback]

    @cached_property
    def metrics_handler(self) -> Any:
        """What computes the metrics of evaluations; by default made when it is first needed."""
        return build_metrics_handler(self.config, self)

    def _is_borrowed(self) -> bool:
        raise NotImplementedError

    def _find_comparison_in_training(self, outputs: Any, inputs: Any, loss: Any) -> Comparison:
        raise NotImplementedError

    def _share_of(self, loader: Any) -> Any:
        raise NotImplementedError

    def prepare_input_batch(self, batch: Any) -> Any:
        raise NotImplementedError

    def optimization_step(self) -> None:
        raise NotImplementedError

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        raise NotImplementedError

    def compute_metric(self, model: Any, inputs: Any) -> float:
        raise NotImplementedError

    def update_metrics(self, model: Any, inputs: Any, step_loss: Any, training: bool = True) -> tuple[float, float]:
        raise NotImplementedError

    def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
        raise NotImplementedError

    def set_train_mode(self, model: nn.Module | None = None) -> None:
        raise NotImplementedError

"""Attributes of the Python API's trainer, and the methods that its modules call on each other."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainwright.engine.loss_fn import Contract
from trainwright.engine.run_methods import RunMethods
from trainwright.engine.state import TrainerState
from trainwright.engine.step import Step
from trainwright.engine.step_plan import StepPlan
from trainwright.engine.trainer.best_metric import BestMetric
from trainwright.engine.trainer.evaluation import Evaluation
from trainwright.engine.trainer.model_card import RunCard
from trainwright.engine.trainer.parts import build_metrics_handler
from trainwright.engine.trainer.periods import Periods
from trainwright.engine.trainer.saving import Saving
from trainwright.engine.trainer.train_metrics import TrainMetrics, after_batch_calls
from trainwright.hooks.callbacks import Callback, CallbackList, RunCallbacks, TrainerControl
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

    # Arguments of the constructor.
    config: "TrainingConfig"
    train_dataset: Any
    eval_dataset: Any
    preprocessor: Any
    model_card: Any
    # Built from them.
    output_dir: Path  # absolute: the working directory may change during training
    train_dataloader: Any
    eval_dataloader: Any
    loss: Any
    callbacks: CallbackList
    trainercontrol: TrainerControl
    state: TrainerState
    total_steps: int
    _is_given_schedule: bool = False
    _collator: Callable[[list[Any]], Any] | None
    _plan: StepPlan
    _periods: Periods
    _output_dir_of_user: str
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
    _evaluation: Evaluation
    _saving: Saving
    _card: RunCard
    _evaluated_step: int | None = None  # state.global_step at the last evaluation
    _run_callbacks: RunCallbacks
    accelerator: Any
    _built_in_callbacks: list[Callback]

    def _has_train_metrics(self) -> bool:
        """Whether metrics of the training batches are computed."""
        config = self.config
        asks = bool(config.metrics) or (config.metrics is None and config.task is not None)
        return asks and config.eval_strategy != "eval_epoch"

    @cached_property
    def metrics_handler(self) -> Any:
        """Computes the metrics of evaluations. Built on first use by default."""
        return build_metrics_handler(self.config, self)

    @property
    def _evaluates(self) -> bool:
        """Whether the training evaluates."""
        return self.config.eval_strategy != "no" and self.eval_dataloader is not None

    @property
    def _best_metric(self) -> BestMetric:
        loaders = self.eval_dataloader
        return BestMetric(
            self.config,
            lambda: self.metrics_handler,
            loaders if isinstance(loaders, Mapping) else (),
            evaluates=self._evaluates,
            has_own_results=partial(self._overrides.has, "evaluate", "evaluate_step", "compute_metric"),
        )

    def _after_batch(self) -> Callable[[Any, Any], None] | None:
        """What the step calls after each micro-batch, with the callbacks and overrides that there are now."""
        return after_batch_calls(
            self._overrides,
            self._run_callbacks,
            self._train_metrics if self._pipeline is None else None,  # on its last stage, with its outputs
            model=self.model,
            set_train_mode=self.set_train_mode,
            is_stored=self.config.gradient_accumulation_steps == 1 and self._pipeline is None,
            is_pipeline=self._pipeline is not None,
        )

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

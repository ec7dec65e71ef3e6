"""The metrics of the batches that are trained on, from what the model gave for them: no second forward pass."""

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainwright.config.errors import ConfigError
from trainwright.engine.comparison import Comparison, predictions_of, shifted
from trainwright.engine.loss_fn import target_of
from trainwright.hooks.base import HookBase
from trainwright.parallel.dist import all_gather_object, get_rank, get_world_size

logger = logging.getLogger("trainwright.engine")


class TrainMetrics(HookBase):
    """Metrics over the epoch so far. Computed when somebody reads them, and when ``is_due`` put into the storage.

    ``note`` is shown what the model returns; ``add`` then takes it in, with the batch that it was for.

    Each process counts its own batches. What is put is over those of all; so is what is read right then, since who
    reads may be one process alone. At other times that is over the process's own.

    Args:
        make_handler: makes what has ``reset``, ``update(predictions, labels)``, ``compute`` and a state; called when
            there is something to count.
        find_comparison: of a model's outputs, a batch and its loss (None: not known), how they are compared.
        is_borrowed: whether the newest batch does not count; asked where there are several processes.
    """

    def __init__(
        self,
        make_handler: Callable[[], Any],
        is_due: Callable[[], bool],
        is_epoch_end: Callable[[], bool],
        find_comparison: Callable[[Any, Any, Any], Comparison],
        is_borrowed: Callable[[], bool],
    ) -> None:
        self._make_handler = make_handler
        self._is_due = is_due
        self._is_epoch_end = is_epoch_end
        self._find_comparison = find_comparison
        self._comparison: Comparison | None = None  # None until the first batch
        self._outputs: Any = None
        self._is_epoch_over = False
        self._has_values = False
        self._is_counted = False
        self.is_on = True
        self._of_all: dict[str, float] = {}  # over the batches of all processes, after
        self._read_at = -1  # so many updates
        self._watching: RemovableHandle | None = None
        self._is_borrowed = is_borrowed
        is_alone = get_world_size() == 1
        # Functions of the class: a bound method would make a circle that outlives the training.
        self._count: Callable[[TrainMetrics, Any, Any], None]
        self._count = TrainMetrics._count_batch if is_alone else TrainMetrics._count_unless_borrowed
        self._put: Callable[[TrainMetrics], None]
        self._put = TrainMetrics._put_own if is_alone else TrainMetrics._put_of_all

    @cached_property
    def _handler(self) -> Any:
        return self._make_handler()

    def note(self, outputs: Any) -> None:
        """What the model has returned for the batch whose ``add`` comes next."""
        self._outputs = outputs

    def watch(self, model: nn.Module) -> None:
        """Note each output of ``model`` in training, for steps of the user's own; until the training ends."""

        def note(module: nn.Module, _: Any, outputs: Any) -> None:
            # A program gives the outputs by itself.
            if module.training and not torch.compiler.is_compiling():
                self._outputs = outputs

        self._watching = model.register_forward_hook(note)

    def after_train(self) -> None:
        if self._watching is not None:
            self._watching.remove()
            self._watching = None

    def add_now(self, inputs: Any) -> None:
        """Count a batch before its step is over; the ``add`` that follows finds it counted."""
        self.add(None, inputs)
        self._is_counted = True

    def add(self, step_logs: Any, inputs: Any) -> None:
        """Count a batch. Of ``step_logs`` the ``step_loss`` of the first batch is read."""
        self._count(self, step_logs, inputs)

    def _count_batch(self, step_logs: Any, inputs: Any) -> None:
        if self._is_counted:
            self._is_counted = False
            return
        outputs, self._outputs = self._outputs, None
        if not self.is_on:
            return
        scores, labels = predictions_of(outputs), target_of(inputs)
        if scores is None or labels is None:
            self._turn_off("the model's output holds no scores" if scores is None else "the batch holds no labels")
            return
        if self._comparison is None:
            self._comparison = self._find_comparison(outputs, inputs, (step_logs or {}).get("step_loss"))
            if self._comparison.refusal is not None:
                self._turn_off(self._comparison.refusal)
                return
        if self._comparison.is_shifted:
            scores, labels = shifted(scores, labels)
        if self._is_epoch_over:
            self._is_epoch_over = False
            self._handler.reset()
        self._handler.update(scores, labels)
        self._has_values = True

    def _turn_off(self, why: str) -> None:
        logger.info("No metric is computed in training: %s.", why)
        self.is_on = False

    def read(self) -> dict[str, float]:
        """The metrics of this epoch so far, by name."""
        if self._read_at == self.trainer.iterations_done:
            return self._of_all
        return self._handler.compute() if self._has_values else {}

    def first(self) -> float:
        """The first metric; NaN where there is none."""
        return next(iter(self.read().values()), float("nan"))

    def after_step(self) -> None:
        self._put(self)

    def _put_own(self) -> None:
        if not self._has_values:
            return
        self._is_epoch_over = self._is_epoch_end()
        if self._is_due() or self._is_epoch_over:
            self.trainer.storage.put_scalars(**self.read(), smoothing_hint=False)

    def _count_unless_borrowed(self, step_logs: Any, inputs: Any) -> None:
        if not self._is_borrowed():
            self._count_batch(step_logs, inputs)
            return
        self._is_counted = False
        if self._is_epoch_over and self._has_values:
            self._is_epoch_over = False
            self._handler.reset()

    def _put_of_all(self) -> None:
        is_over = self._is_epoch_end()
        self._is_epoch_over = is_over or self._is_epoch_over
        if not (is_over or self._is_due()) or not any(all_gather_object(self._has_values)):
            return
        if hasattr(self._handler, "all_ranks"):
            self._handler.all_ranks = True
            try:
                self._of_all = self._handler.compute()
            finally:
                self._handler.all_ranks = False
        else:
            self._of_all = self.read()
        self._read_at = self.trainer.iterations_done
        self.trainer.storage.put_scalars(**self._of_all, smoothing_hint=False)

    def state_dict(self) -> dict[str, Any]:
        state = self._handler.state_dict() if self._has_values else None
        return {"ranks": all_gather_object({"handler": state, "is_epoch_over": self._is_epoch_over})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["ranks"]) != get_world_size():
            logger.info("Metrics of training begin anew: the checkpoint is of %d processes.", len(state["ranks"]))
            return
        state = state["ranks"][get_rank()]
        self._is_epoch_over = state["is_epoch_over"]
        self._has_values = state["handler"] is not None
        if not self._has_values:
            return
        try:
            self._handler.load_state_dict(state["handler"])
        except ConfigError as error:  # other metrics than before
            self._has_values = False
            self._handler.reset()
            logger.warning("The metrics of the training start fresh: %s", error)

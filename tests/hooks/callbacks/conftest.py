"""Small trainers that call callbacks."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint import Checkpointer
from trainwright.engine.loop import TrainerBase
from trainwright.engine.state import TrainingState
from trainwright.hooks import (
    Callback,
    CallbackList,
    EarlyStoppingCallback,
    EvalHook,
    Logs,
    PeriodicCheckpointer,
    RunCallbacks,
    TrainerControl,
)

METHODS = [name for name in vars(Callback) if name.startswith("on_")]
STEPS = 3  # batches of an epoch
ALWAYS_BETTER = [0.1 * n for n in range(1, 30)]
# The best is that of epoch 2, so with patience 2 the training ends after epoch 4.
SCORES = [0.1, 0.5, 0.4, 0.3, 0.9, 0.9, 0.9]


def stopper(monitor: str = "eval_epoch_metric", **how: Any) -> EarlyStoppingCallback:
    return EarlyStoppingCallback(TrainerControl(), monitor, **how)


class SmallTrainer(TrainerBase):
    """Its model's weight counts the batches; its loss is the number of the batch, from 1 on.

    The evaluation after epoch n gives the accuracy ``scores[n - 1]``. It saves after every iteration if it ``saves``.
    """

    def __init__(
        self,
        callbacks: Any = (),
        folder: Path | str = "",
        *,
        fails_at: int | None = None,
        window: int = 1,
        scores: list[float] | None = None,
        saves: bool = False,
        **how: Any,
    ) -> None:
        super().__init__()
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
        self.fails_at = fails_at
        self.window = window
        self.scores = scores
        self.num_evaluations = 0
        progress = TrainingState(self)
        self.checkpointer = Checkpointer(self.model, folder, asynchronous=False, progress=progress)
        self._progress = progress
        self.callbacks = callbacks if isinstance(callbacks, CallbackList) else CallbackList(callbacks)
        self.bridge = RunCallbacks(self.callbacks, **{"steps_per_epoch": STEPS, **how})
        evaluate = self.bridge.evaluating(self.evaluate)
        self.register_hooks([EvalHook(STEPS // window or 1, evaluate), self.bridge])
        if saves:
            self.register_hooks([PeriodicCheckpointer(self.checkpointer, 1)])

    def _before_first_step(self) -> None:
        self._progress.restore()
        done = int(self.model.weight.item())
        self.bridge.is_fed = True
        self.batches = ([torch.tensor(n), "label"] for n in range(done + 1, 1000))

    def run_step(self) -> None:
        for place in range(self.window):
            if place:
                self.bridge.end_batch()
            batch = next(self.batches)
            self.bridge.begin_batch(batch)
            number, _ = batch
            if self.iter == self.fails_at:
                raise ZeroDivisionError
            with torch.no_grad():
                self.model.weight += 1
        self.storage.put_scalar("total_loss", number)

    def evaluate(self) -> dict[str, float]:
        self.num_evaluations += 1
        for _ in self.bridge.eval_batches([["a", "b"]]):
            self.bridge.record({"eval_step_loss": torch.tensor(0.5)})
        epoch = max(1, int(self.model.weight.item()) // STEPS)
        return {"loss": 1 / epoch, "accuracy": self.scores[epoch - 1] if self.scores else epoch / 10}


class Recorder(Callback):
    """Writes down every call, with epochs and batches."""

    def __init__(self, name: str = "", calls: list[str] | None = None) -> None:
        self.name = name
        self.calls: list[str] = [] if calls is None else calls

    def write(self, method: str, *given: Any) -> None:
        self.calls.append(" ".join([self.name, method.removeprefix("on_"), *map(str, given)]).strip())


def recording(method: str) -> Any:
    def on(self: Recorder, *arguments: Any) -> None:
        *given, logs = arguments
        assert isinstance(logs, Logs)
        self.write(method, *given)

    return on


for method in METHODS:
    setattr(Recorder, method, recording(method))

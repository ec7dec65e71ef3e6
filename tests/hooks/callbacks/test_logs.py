"""What callbacks see: numbers that are read from the device only when they are used."""

from typing import Any

import pytest
import torch

from tests.hooks.callbacks.conftest import SmallTrainer
from trainwright.hooks import Callback, Logs


def test_what_logs_show() -> None:
    seen: dict[str, dict[str, Any]] = {}

    class Look(Callback):
        def on_train_begin(self, logs: Any) -> None:
            seen["train_begin"] = dict(logs)

        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            seen[f"batch {logs['global_step']}"] = dict(logs)

        def on_eval_end(self, logs: Any) -> None:
            seen[f"eval {logs['epoch']}"] = dict(logs)

    trainer = SmallTrainer([Look()])
    trainer.train(0, 6)
    assert seen["train_begin"] == {"global_step": 0, "epoch": 1, "eval_global_step": 0, "lr": 0.25}
    first = {"global_step": 1, "epoch": 1, "epoch_step": 1, "eval_global_step": 0, "lr": 0.25}
    assert seen["batch 1"] == {**first, "step_loss": 1.0, "epoch_loss": 1.0}
    assert seen["batch 3"]["epoch_loss"] == 2.0
    results = {
        "eval_step_loss": 0.5,
        "eval_loss": 0.5,
        "eval_accuracy": 0.2,
        "eval_epoch_loss": 0.5,
        "eval_epoch_metric": 0.2,
    }
    last = {"global_step": 6, "epoch": 2, "epoch_step": 3, "eval_global_step": 2, "lr": 0.25}
    assert seen["eval 2"] == {**last, "step_loss": 6.0, "epoch_loss": 5.0, **results}


def test_values_that_a_step_records_take_precedence_over_those_of_the_storage() -> None:
    losses = []

    class Look(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            losses.append((logs["step_loss"], logs["epoch_metric"]))

    class Recording(SmallTrainer):
        def run_step(self) -> None:
            super().run_step()
            self.bridge.record({"step_loss": torch.tensor(0.5), "epoch_metric": 7})

    Recording([Look()]).train(0, 1)
    assert losses == [(0.5, 7)]


def test_a_tensor_is_waited_for_when_it_is_read_and_is_a_copy() -> None:
    loss = torch.tensor(0.5, requires_grad=True)
    logs = Logs(step_loss=loss, note="text")
    with torch.no_grad():
        loss += 1
    assert isinstance(logs.unread("step_loss"), torch.Tensor)
    assert "step_loss" in logs
    assert logs["step_loss"] == 0.5
    assert type(logs.unread("step_loss")) is float
    asked = []
    logs.defer("lr", lambda: asked.append(1) or 0.25)
    assert (len(logs), list(logs), asked) == (3, ["step_loss", "note", "lr"], [])
    assert "{lr} {note}".format(**logs) == "0.25 text"
    assert logs.copy() == {"step_loss": 0.5, "note": "text", "lr": 0.25}
    assert logs.numbers() == {"step_loss": 0.5}
    del logs["lr"]
    with pytest.raises(KeyError, match="lr"):
        logs["lr"]
    with pytest.raises(KeyError, match="lr"):
        del logs["lr"]

"""If torch stores the state of a schedule elsewhere, the training completes with the schedule's own step."""

from typing import Any

import pytest
import torch

from tests._torch_compat.conftest import Trained
from trainwright._torch_compat import (
    schedule_step,
)


@pytest.mark.parametrize("name", ["_step_count", "_last_lr"])
def test_where_a_schedule_keeps_its_state(
    name: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    kind: Any = torch.optim.lr_scheduler.LambdaLR
    original = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        vars(self)[f"other{name}"] = vars(self).pop(name)  # as if torch called it by another name

    def to_other(self: Any, key: str, value: Any) -> None:
        vars(self)[f"other{key}" if key == name and f"other{name}" in vars(self) else key] = value

    def from_other(self: Any, key: str) -> Any:
        if key == name:
            return vars(self)[f"other{name}"]
        raise AttributeError(key)

    def only_torch(step: Any) -> Any:
        def checked(scheduler: Any) -> bool:
            if f"other{name}" in vars(scheduler):
                raise AttributeError(name)
            return bool(step(scheduler))

        return checked

    monkeypatch.setattr(kind, "__init__", init)
    monkeypatch.setattr(kind, "__setattr__", to_other, raising=False)
    monkeypatch.setattr(kind, "__getattr__", from_other, raising=False)
    monkeypatch.setattr(schedule_step, "step_lambda", only_torch(schedule_step.step_lambda))
    (line,) = lines_of_training(warmup_steps=2)
    assert "using the public API for the step of a learning rate schedule" in line

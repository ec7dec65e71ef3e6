"""The order of the built-in hooks of both APIs, and that of hooks which a user adds to them."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.toys import file_config, points, quiet
from trainwright import DefaultTrainer, Trainer
from trainwright.hooks import Callback, HookBase
from trainwright.hooks.base import SLOTS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
        return {"loss": nn.functional.cross_entropy(self.linear(inputs), labels)}


class First(HookBase): ...


class BeforeWriter(HookBase): ...


class Shown(HookBase):
    slot = "show"


class Registered(HookBase): ...


def with_own_hooks(kind: Any) -> Any:
    class Own(kind):  # type: ignore[misc]
        def build_hooks(self) -> list[HookBase | None]:
            hooks = [First(), *super().build_hooks()]
            writer = next(place for place, hook in enumerate(hooks) if type(hook).__name__ == "PeriodicWriter")
            hooks.insert(writer, BeforeWriter())
            timer = hooks.pop(1)  # wherever the list has it, its slot is "step"
            return [*hooks, timer]

    return Own


@pytest.mark.parametrize("api", ["python", "config"])
def test_the_order_of_hooks_is_that_of_the_slots(api: str, tmp_path: Path) -> None:
    if api == "python":
        data = points()
        kind = with_own_hooks(Trainer)
        trainer = kind(Net(), quiet(tmp_path, num_epochs=1, batch_size=4), train_dataset=data, eval_dataset=data)
    else:
        trainer = with_own_hooks(DefaultTrainer)(
            file_config(tmp_path, Net, points, train_iter=3, train_micro_batch_size=4)
        )
    trainer.register_hooks([Registered(), Shown()])
    names = [type(hook).__name__ for hook in trainer.hooks]
    documented = ["LRScheduler", "IterationTimer", "FiniteCheck", "PeriodicCheckpointer"]
    documented += ["EvalHook", "BestCheckpointer"] if api == "python" else []
    documented += ["BeforeWriter", "PeriodicWriter", "RunSummary", "Shown", "Interruptions", "Registered"]
    assert [name for name in names if name in documented] == documented
    assert names.index("RunRecord") < names.index("First") < names.index("LRScheduler") < names.index("FiniteCheck")
    slots = [[*SLOTS].index(hook.slot) for hook in trainer.hooks if hook.slot is not None]
    assert slots == sorted(slots)


@pytest.mark.parametrize("api", ["python", "config"])
def test_a_list_of_the_users_own_without_the_callbacks_gets_them_before_the_writers(api: str, tmp_path: Path) -> None:
    ended: list[int] = []

    class Ends(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            ended.append(int(logs["global_step"]))

    def without_callbacks(kind: Any) -> Any:
        class Own(kind):  # type: ignore[misc]
            def build_hooks(self) -> list[HookBase | None]:
                return [hook for hook in super().build_hooks() if type(hook).__name__ != "RunCallbacks"]

        return Own

    if api == "python":
        config = quiet(tmp_path, num_epochs=1, batch_size=4, max_steps=3)
        trainer = without_callbacks(Trainer)(Net(), config, points(), callbacks=[Ends()])
    else:
        cfg = file_config(tmp_path, Net, points, train_iter=3, train_micro_batch_size=4)
        trainer = without_callbacks(DefaultTrainer)(cfg)
        trainer.add_callback(Ends())
    names = [type(hook).__name__ for hook in trainer.hooks]
    assert names.index("RunCallbacks") < names.index("PeriodicWriter")
    trainer.train()
    assert ended == [1, 2, 3]

"""A learning rate that is a formula of the steps taken and of the group's first learning rate."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainwright._torch_compat.schedule_step import is_usable, step_lambda

# (optimizer steps taken, the group's first learning rate) -> learning rate of the next step
Formula = Callable[[int, float], float]


class FormulaLR(LambdaLR):
    """``lr = formula(step, base_lr)`` in every group; a group whose first rate is 0 stays at 0.

    The formula is not part of the state: a scheduler that is built with other arguments and loads a state continues
    with its own formula. The state holds numbers and lists of numbers, even if the optimizer keeps its learning rates
    as tensors.
    """

    def __init__(self, optimizer: Optimizer, formula: Formula) -> None:
        for group in optimizer.param_groups:
            # As a float, once: a formula of a tensor would wait for the device at every step.
            group["initial_lr"] = float(group.get("initial_lr", group["lr"]))
        super().__init__(optimizer, [_factor(formula, group["initial_lr"]) for group in optimizer.param_groups])

    def step(self, epoch: int | None = None) -> None:
        """As torch's."""
        if epoch is not None or not (is_usable() and step_lambda(self)):
            super().step(epoch)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        del state["lr_lambdas"]
        return {
            key: [float(rate) for rate in value] if isinstance(value, list) else value for key, value in state.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "lr_lambdas": [None] * len(self.lr_lambdas)})


def _factor(formula: Formula, base_lr: float) -> Callable[[int], float]:
    if base_lr == 0:
        return lambda step: 0.0
    return lambda step: formula(step, base_lr) / base_lr

"""The backward pass of a scalar, without the checks in front of it.

``loss.backward()`` ends in one call of torch's engine, after checks that take a tenth of a small network's pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainwright._torch_compat.probing import check_close, is_usable


def plain_backward(loss: Tensor, batch: Any = None, *, retain_graph: bool = False) -> None:
    """``loss.backward()``. ``batch`` is not looked at."""
    run = _engine_call()
    if retain_graph:
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    elif run is None or loss.dim() or type(loss) is not Tensor:  # torch says what is wrong, or knows what to do
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def probe(run: Callable[..., Any]) -> None:
    """Compare the gradient of a square with the known one; the second pass adds to the first."""
    weight = torch.tensor([0.5, -1.5], dtype=torch.float32, device="cpu", requires_grad=True)
    for _ in range(2):
        loss = weight.square().sum()
        run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    gradient = weight.grad
    assert gradient is not None, "no gradient was computed"
    check_close("the backward call", gradient.tolist(), [2.0, -6.0])


@functools.cache
def _engine_call() -> Callable[..., Any] | None:
    """Torch's engine; None where it is to be called as ``loss.backward()`` does."""
    found: list[Callable[..., Any]] = []

    def find() -> None:
        found.append(torch.autograd.graph._engine_run_backward)
        probe(found[0])

    return found[0] if is_usable("the backward pass", find) else None

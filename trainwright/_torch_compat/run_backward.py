"""The backward pass of a scalar, without the checks of ``loss.backward()``.

``loss.backward()`` ends in one call of the autograd engine, after checks that take a tenth of a small network's pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainwright._torch_compat.probing import check_close, probed


def plain_backward(loss: Tensor, batch: Any = None, **options: Any) -> None:
    """``loss.backward(**options)``. ``batch`` is not used."""
    run = _engine_call()
    if options:
        loss.backward(**options)  # type: ignore[no-untyped-call]
    elif run is None or loss.dim() or type(loss) is not Tensor:  # torch raises its error, or handles the subclass
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
    """The call of the autograd engine; None if ``loss.backward()`` is to be used."""
    return probed("the backward pass", lambda: torch.autograd.graph._engine_run_backward, probe, None)

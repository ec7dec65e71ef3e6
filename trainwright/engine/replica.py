"""The model of one of several processes: wrapped so that their gradients are averaged, whatever a step does with it."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.parallel.data_parallel import watch_wrapped, wrap_data_parallel
from trainwright.parallel.dist import all_gather_object, get_world_size

_UNNECESSARY = "find_unused_parameters=True was specified in DDP constructor"


class Replica:
    """Gradients travel with the last backward pass of each update, while it runs.

    The first update after wrapping also finds out which parameters take no part in a step, which
    DistributedDataParallel must know; where all do, later steps are spared that search. Parameters that are frozen or
    thawed are noticed before the next update. Where a step has not called the wrapped model but the plain one, the
    gradients are averaged when the update uses them.

    Args:
        on_wrap: is given the wrapped model whenever it is another one.
        called: what to wrap: the model, or the same compiled.
        prepared: the wrapped model, if somebody else has wrapped it already.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        on_wrap: Callable[[Any], None],
        *,
        called: Any,
        prepared: Any = None,
    ) -> None:
        self._plain = model
        self._called = called
        self._device = device
        self._on_wrap = on_wrap
        self._trainable: tuple[bool, ...] = ()
        self._wrapped: Any = None
        self._is_searching = False
        self._is_entered = False  # the wrapped model has been called since the gradients last travelled
        if prepared is not None:
            self._trainable = self._trainable_now()
            watch_wrapped(prepared)
            self._take(prepared)

    def before_batch(self, *, is_last: bool) -> None:
        """Call this before each forward pass; ``is_last``: of the update."""
        if self._trainable_now() != self._trainable:
            self._trainable = self._trainable_now()
            self._wrap(searching=True)
        self._wrapped.require_backward_grad_sync = is_last
        self._is_entered = False

    def finish(self) -> None:
        """Call this with all gradients of an update there, before they are used."""
        if not self._is_entered:
            average_gradients(self._plain)
        elif self._is_searching:
            is_unused = any(p.requires_grad and p.grad is None for p in self._plain.parameters())
            self._is_searching = False
            if not any(all_gather_object(is_unused)):
                self._wrap(searching=False)
        self._is_entered = False

    def _trainable_now(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self._plain.parameters())

    def _wrap(self, *, searching: bool) -> None:
        self._is_searching = searching
        if searching:  # torch says so in the forward pass, once; here the search ends with the first update
            warnings.filterwarnings("ignore", _UNNECESSARY)
        self._take(wrap_data_parallel(self._called, self._device, find_unused_parameters=searching))

    def _take(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        wrapped.register_forward_pre_hook(self._note_call)
        self._on_wrap(wrapped)

    def _note_call(self, module: nn.Module, arguments: Any) -> None:
        self._is_entered = True


def average_gradients(model: nn.Module) -> None:
    """Make each gradient the mean of all ranks'; a rank without one counts as 0."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    there = [parameter.grad is not None for parameter in parameters]
    for parameter, everywhere in zip(parameters, zip(*all_gather_object(there), strict=True), strict=True):
        if any(everywhere):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= get_world_size()
            dist.all_reduce(parameter.grad)


def share_state(model: nn.Module, *, buffers_only: bool = False) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    if get_world_size() == 1:
        return
    tensors: list[Tensor] = [*model.buffers(), *(() if buffers_only else model.parameters())]
    for tensor in tensors:
        dist.broadcast(tensor.detach(), 0)

"""The forward pass of DistributedDataParallel without the label that it has for profilers.

The label takes 40 of 1,500 us of a step of a tiny network on two processes. A profiler that records gets it. The mark
for torch's compiler is set only if that is imported.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright._torch_compat.probing import check_close, is_usable
from trainwright._torch_compat.profiler_state import is_profiling


class DirectReplica(DistributedDataParallel):
    """See the module.

    Attributes:
        on_forward: called before each forward pass; None: not needed.
    """

    on_forward: Callable[[], None] | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.on_forward is not None:
            self.on_forward()
        torchs: Any = super()  # without types
        if is_profiling():
            return torchs.forward(*inputs, **named)
        inputs, named = torchs._pre_forward(*inputs, **named)
        call = torchs._run_ddp_forward if "torch._dynamo" in sys.modules else self.module
        return torchs._post_forward(call(*inputs, **named))


def replica_class(device: torch.device) -> type[DistributedDataParallel]:
    """`DirectReplica`, or torch's class if torch's methods have changed. All processes must call it together."""
    return DirectReplica if _is_usable(device) else DistributedDataParallel


@functools.cache
def _is_usable(device: torch.device) -> bool:
    return is_usable("the forward pass of several processes", lambda: probe(device))


def probe(device: torch.device) -> None:
    """The gradient of one weight on all processes: averaged, kept apart, and averaged again."""
    own, size = dist.get_rank() + 1.0, dist.get_world_size()
    # Of the modules with one weight, it draws no random number: w x, for x < 0.
    replica: Any = DirectReplica(nn.PReLU(device=device, dtype=torch.float32), gradient_as_bucket_view=True)
    (weight,) = replica.parameters()
    inputs = torch.full((1, 1), -own, device=device, dtype=torch.float32)
    for averages in (True, False, True):
        weight.grad, replica.require_backward_grad_sync = None, averages
        replica(inputs).sum().backward()
        expected = (size + 1) / 2 if averages else own
        check_close("the average of gradients", (-weight.grad).tolist(), [expected])

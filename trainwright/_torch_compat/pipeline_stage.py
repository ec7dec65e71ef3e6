"""A stage of torch's pipelines that counts its times, and averages gradients when it is told to."""

import time
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage


class TimedStage(PipelineStage):
    """Torch's stage.

    Attributes:
        forward_s, backward_s: seconds in its forward and backward passes so far.
        averages: whether the gradients are averaged over the data ranks at the end of a schedule; False: more of them
            follow before the update.
    """

    forward_s = backward_s = 0.0
    averages = True

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = super().forward_one_chunk(*arguments, **named)
        self.forward_s += time.perf_counter() - start
        return result

    def backward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = super().backward_one_chunk(*arguments, **named)
        self.backward_s += time.perf_counter() - start
        return result

    def backward_weight_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = super().backward_weight_one_chunk(*arguments, **named)
        self.backward_s += time.perf_counter() - start
        return result

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing: shapes are given. Torch would free parameters, and gradients of earlier micro-batches."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Not for the last stage, whose output is the loss, before torch 2.12: it may be of any type."""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]  # only older ones call it and have it

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """The first exchange with the neighbours, before torch 2.12: not with a neighbour on this process.

        ZBVZeroBubble has one, to which gloo cannot send.
        """
        operations: list[Any] = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.peer != torch.distributed.get_rank()]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        start = time.perf_counter()
        if self.averages:
            super().perform_reduce_grad(grad_scale_factor)
        self.backward_s += time.perf_counter() - start

"""On CUDA all launches of a program are recorded once, and replayed as one: the host has one thing to do per step.

A replay reads and writes the memory that it was recorded with. Parameters, buffers and states have theirs for good;
those of a batch are copied into memory that stays. Where any tensor has moved, it is recorded anew.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

logger = logging.getLogger("trainwright.engine")

Call = Callable[[list[Tensor]], Sequence[Tensor]]
# (what launches) -> what replays it, and the outputs that each replay writes to
Recorder = Callable[[Callable[[], Sequence[Tensor]]], tuple[Callable[[], object], Sequence[Tensor]]]

_CALLS_BEFORE = 2  # libraries make their plans and take their memory in the first calls


def record_cuda(launch: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], object], Sequence[Tensor]]:
    """Record with a CUDA graph. Nothing is computed; random numbers go on with each replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # loaders' threads go on with their copies
        outputs = launch()
    return graph.replay, outputs


class Replayed:
    """``call``, recorded after its first calls.

    ``moving``: the places of inputs that are other tensors at each call. What a call gives belongs to the caller.
    """

    def __init__(self, call: Call, moving: Sequence[int], record: Recorder = record_cuda) -> None:
        self._call = call
        self._moving = moving
        self._record = record
        self._calls = 0
        self._can_record = True
        self._addresses: list[int] = []
        self._places: list[Tensor] = []
        self._replay: Callable[[], object] | None = None
        self._outputs: Sequence[Tensor] = ()

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        self._calls += 1
        if self._calls <= _CALLS_BEFORE or not self._can_record:
            return self._call(inputs)
        if self._places:
            inputs = self._with_places(inputs)
        if self._replay is None or [tensor.data_ptr() for tensor in inputs] != self._addresses:
            inputs = self._recorded(inputs)
        if self._replay is None:
            return self._call(inputs)
        self._replay()
        return [output.clone() for output in self._outputs]

    def _with_places(self, inputs: list[Tensor]) -> list[Tensor]:
        """The inputs, those of the batch copied to where the recording reads them."""
        inputs = [*inputs]
        for place, kept in zip(self._moving, self._places, strict=True):
            kept.copy_(inputs[place], non_blocking=True)
            inputs[place] = kept
        return inputs

    def _recorded(self, inputs: list[Tensor]) -> list[Tensor]:
        if not self._places:
            self._places = [inputs[place].clone() for place in self._moving]
            inputs = self._with_places(inputs)
        self._addresses = [tensor.data_ptr() for tensor in inputs]
        try:
            self._replay, self._outputs = self._record(lambda: self._call([*inputs]))
        except RuntimeError as error:  # nothing has been computed
            logger.warning("Graph mode: the launches of a step are not recorded in a CUDA graph: %s.", error)
            self._replay, self._can_record = None, False
        return inputs

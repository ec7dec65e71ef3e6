"""The programs of one forward pass: for the last micro-batch of a window, and for the others.

They and eager steps use the same parameters, buffers, states and gradients, so that a window may have both.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import mark_stepped
from trainwright.engine.accumulation import TOKENS, WindowMean
from trainwright.graph.capture import BatchStructure, Capture, LossOf, shapes_of
from trainwright.graph.optimizer import OptimizerInputs, TrainedParameters
from trainwright.graph.program import Part, Program, Results

Inputs = tuple[list[Any], list[Tensor]]  # arguments of the forward pass, and the optimizer's states

_ONE: Any = 1.0  # in place of a loss: its share is then the factor
_GRADIENT = attrgetter("grad")


class Programs:
    """The programs for batches like ``batch``.

    ``parts``: what the program of the last micro-batch of a window computes, and that of the others if there are any.

    Attributes:
        made: the programs; steps: whether the step of the optimizer is part of them.

    Raises:
        NotReady: the optimizer has not created the state that a program needs.
        NotCapturable: an operation cannot be in a program, or the compiler rejects it.
    """

    def __init__(
        self,
        loss_of: LossOf,
        structure: BatchStructure,
        batch: Any,
        optimizer: Optimizer,
        parts: Sequence[Part],
        backend: str,
    ) -> None:
        tensors = structure.take(batch)
        assert tensors is not None
        self._structure, self._shapes = structure, shapes_of(tensors)
        self._capture = capture = Capture(loss_of, structure, tensors)
        self.steps, self._adds = parts[0].steps, parts[0].adds
        self._inputs = OptimizerInputs(optimizer) if self.steps else TrainedParameters(optimizer)
        arguments = capture.arguments(tensors)
        assert arguments is not None  # it was captured with this batch
        self.made = [Program(capture, arguments, optimizer, self._inputs, part, backend) for part in parts]
        self._last, self._add = self.made[0], self.made[-1]
        self._is_by_tokens = self._adds and (TOKENS in capture.outputs or capture.constants.get(TOKENS) is not None)
        trainable = self._last.trainable
        self._sums = [torch.zeros_like(p, requires_grad=False) for p in trainable] if self._adds else []
        self._are_sums_zero = True
        self._with_gradient = [pair for pair in enumerate(trainable) if self._last.has_gradient[pair[0]]]
        used = {id(parameter) for _, parameter in self._with_gradient}
        everything = self._inputs.parameters
        # Parameters whose gradients a program would not use, in the last micro-batch of a window and in the others.
        self._ignored, self._ignored_before = everything, everything
        if self._adds:
            self._ignored = [parameter for parameter in everything if self.steps and id(parameter) not in used]
            self._ignored_before = []
        mark_stepped(optimizer)  # schedules warn if no optimizer step seems to precede theirs

    def inputs_of(self, batch: Any) -> Inputs | None:
        """The programs' inputs; None if they do not apply to this batch, or to the current model."""
        tensors = self._structure.take(batch)
        arguments = None if tensors is None else self._capture.arguments(tensors)
        states = None if arguments is None else self._inputs.tensors()
        return None if arguments is None or states is None else (arguments, states)

    def fit(self, batch: Any) -> bool:
        """Whether the batch has the shapes of the programs."""
        tensors = self._structure.take(batch)
        return tensors is not None and shapes_of(tensors) == self._shapes

    def run(self, batch: Any, inputs: Inputs, mean: WindowMean | None, *, is_last: bool) -> Results | None:
        """Run a micro-batch's part of an update. ``mean`` weighs the micro-batches of a window, if it has several.

        None: nothing ran, as there are gradients that the program would not use.
        """
        program, ignored = (self._last, self._ignored) if is_last else (self._add, self._ignored_before)
        if not all(map(is_, map(_GRADIENT, ignored), repeat(None))):
            return None
        share: float | Tensor = 1.0
        if mean is not None:
            share = _sum_of_tokens(mean) if self._is_by_tokens else mean.share(_ONE, batch)
        if self._adds:
            self._take_gradients()
        results = program.run(*inputs, self._sums, share)
        if is_last and (self._adds or not self.steps):
            self._set_gradients(results[2])
        if mean is not None and self._is_by_tokens:
            mean.record({TOKENS: results[1][TOKENS]})
            mean.share(results[0], batch)
        return results

    def _take_gradients(self) -> None:
        """Use the sums as gradients, so that an eager micro-batch adds to them."""
        for number, parameter in self._with_gradient:
            total, gradient = self._sums[number], parameter.grad
            if gradient is None and not self._are_sums_zero:
                total.zero_()
            elif gradient is not None and gradient is not total:
                total.copy_(gradient.to_dense())  # as it is, but for a sparse one
            parameter.grad = total
        self._are_sums_zero = False

    def release_sums(self) -> None:
        """Before an eager step, which may keep the gradients: they become tensors of their own."""
        for number, parameter in self._with_gradient if self._adds and not self.steps else ():
            if parameter.grad is self._sums[number]:
                parameter.grad = self._sums[number].clone()

    def _set_gradients(self, found: dict[str, Any]) -> None:
        """Leave the gradients as an eager micro-batch would: new tensors for the step, which an optimizer may keep.

        None after the step of a program, which sets the sums to 0.
        """
        self._are_sums_zero = self.steps
        for number, parameter in self._with_gradient:
            if self.steps:
                parameter.grad = None
            else:
                parameter.grad = self._sums[number].clone() if self._adds else found.pop(f"grad.{number}")


def _sum_of_tokens(mean: WindowMean) -> float | Tensor:
    """The tokens of this window's micro-batches so far."""
    return torch.stack([*mean.weights]).sum() if mean.weights else 0.0

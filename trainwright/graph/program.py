"""A complete update as one compiled program: forward, backward, clipping, optimizer.

Its inputs are the tensors of the batch, the model's parameters and buffers, the optimizer's states, and numbers that
change (learning rates, the share of a micro-batch in its window). Parameters, buffers and states are updated in place,
so nothing is copied back.
"""

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from trainwright.engine.accumulation import TOKENS
from trainwright.graph import compile_graph
from trainwright.graph.ahead_of_time import ahead_of_time
from trainwright.graph.capture import Capture, NotCapturable, NotReady, reason, trace_reason
from trainwright.graph.optimizer import OptimizerInputs, TrainedParameters, clipping_groups, trace_step
from trainwright.optim.clip import gradient_clipper, gradient_norm

logger = logging.getLogger("trainwright.engine")

Call = Callable[[list[Tensor]], Sequence[Tensor]]

# (launch) -> replay, and the outputs that each replay writes
Recorder = Callable[[Callable[[], Sequence[Tensor]]], tuple[Callable[[], object], Sequence[Tensor]]]

# The loss, further outputs by name, and by name what else is computed.
Results = tuple[Tensor, dict[str, Any], dict[str, Any]]

_CALLS_BEFORE = 2  # libraries create plans and allocate memory in the first calls


def record_cuda(launch: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], object], Sequence[Tensor]]:
    """Record with a CUDA graph. Computes nothing; random numbers advance with each replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # loaders' threads may keep copying
        outputs = launch()
    return graph.replay, outputs


class Replayed:
    """``call``, recorded after its first calls.

    ``moving``: the indices of inputs that are other tensors at each call. Outputs belong to the caller.
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
        """The inputs, with those of the batch copied to the recorded addresses."""
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
        except RuntimeError as error:  # nothing was computed
            logger.warning("Graph mode: the launches of a step are not recorded in a CUDA graph: %s.", error)
            self._replay, self._can_record = None, False
        return inputs


@dataclass(frozen=True)
class Part:
    """The part of an update that a program computes: all of it with one micro-batch.

    ``adds``: gradients are added to those of other micro-batches; ``steps``: it updates the weights, as the last
    micro-batch does, unless the step of the optimizer is not part of programs. ``skips``: skip updates whose loss or
    gradients are not finite. ``max_norm``, ``max_value``: as in ``gradient_clipper``.
    """

    adds: bool
    steps: bool
    skips: bool = False
    max_norm: float | None = None
    max_value: float | None = None


class Program:
    """``run(arguments, sums, share)`` computes one micro-batch's part of an update, and returns its results.

    Attributes:
        num_operations: of the program, before fusion; is_from_disk: it was compiled by an earlier start.
        trainable: the optimizer's parameters that the forward pass reads, in the order of the ``sums`` of their
            gradients; has_gradient: for each, whether the loss depends on it.
    """

    def __init__(
        self,
        capture: Capture,
        arguments: Sequence[Any],
        optimizer: Optimizer,
        inputs: TrainedParameters,
        part: Part,
        backend: str,
    ) -> None:
        """Trace and compile the program for ``arguments`` of the capture. Computes nothing.

        Raises:
            NotReady: the optimizer has not created the state that the program needs.
            NotCapturable: an operation cannot be in a program, or the compiler rejects it.
        """
        self._capture, self._optimizer, self._inputs, self._part = capture, optimizer, inputs, part
        self._share = torch.ones((), dtype=torch.float64, device=inputs.parameters[0].device)
        self._known_share: float | None = 1.0
        owned = {id(p): number for number, p in enumerate(inputs.parameters)}
        # For each argument that is a trainable parameter: its index in the optimizer.
        self._number_of = {
            place: owned[id(value)]
            for place, value in enumerate(arguments)
            if id(value) in owned and value.requires_grad
        }
        self.trainable = [arguments[place] for place in self._number_of]
        if not self.trainable:
            raise NotCapturable("the optimizer has no parameter that the loss depends on")
        sums = [torch.zeros_like(p, requires_grad=False) for p in self.trainable] if part.adds else []
        states = inputs.tensors()
        assert states is not None
        flat = [*arguments, *sums, *states, self._share]
        self._num_arguments, self._num_sums = len(arguments), len(sums)
        self._output_names, self._other_names = list[str](), list[str]()
        self.has_gradient: list[bool] = []
        with torch.no_grad(), compile_graph.quiet():
            written = self._traced(flat, backend)
            self.num_operations = sum(node.op == "call_function" for node in written.graph.nodes)
            self._call, self.is_from_disk = _compiled(written, flat, backend)
        if backend == "inductor" and all(tensor.is_cuda for tensor in flat):
            self._call = Replayed(self._call, [place for place, _ in capture.places])

    def run(self, arguments: list[Any], states: list[Tensor], sums: Sequence[Tensor], share: float | Tensor) -> Results:
        """Return the loss, the requested outputs, and ``grad_norm`` and ``skipped_update`` if computed. Without a step,
        and if gradients are not added up, also ``grad.N`` for each parameter that has a gradient.

        ``share``: the factor of the loss; or, if tokens are counted, the tokens of the window so far.
        """
        if isinstance(share, Tensor):
            self._share.copy_(share)
            self._known_share = None
        elif share != self._known_share:
            self._share.fill_(share)
            self._known_share = share
        grad_was_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            results = self._call([*arguments, *sums, *states, self._share])
        finally:
            torch.set_grad_enabled(grad_was_enabled)
        first_other = 1 + len(self._output_names)
        outputs = dict(zip(self._output_names, results[1:first_other], strict=True))
        outputs.update(self._capture.constants)
        return results[0], outputs, dict(zip(self._other_names, results[first_other:], strict=True))

    def _traced(self, flat: list[Tensor], backend: str) -> torch.fx.GraphModule:
        """The operations as one flat graph, decomposed for the backend."""
        from torch.fx.experimental.proxy_tensor import make_fx

        try:
            table = compile_graph.decompositions(backend)
            writer = make_fx(self._operations, decomposition_table=table, tracing_mode="fake")
            try:
                graph: torch.fx.GraphModule = writer(*flat)
            except AttributeError:  # max_pool2d needs a part of inductor, which takes 0.4 s to import
                importlib.import_module("torch._inductor.lowering")
                graph = writer(*flat)
        except (NotReady, NotCapturable):
            raise
        except Exception as error:
            raise NotCapturable(trace_reason(error)) from error
        compile_graph.write_factors_out(graph)
        return graph

    def _operations(self, *flat: Tensor) -> list[Tensor]:
        """The update in plain PyTorch, on fake tensors."""
        count, num_sums = self._num_arguments, self._num_sums
        arguments, sums = [*flat[:count]], flat[count : count + num_sums]
        num_rates = len(self._inputs.rates)
        states, rates = flat[count + num_sums : -1 - num_rates], flat[-1 - num_rates : -1]
        kept = self._kept(arguments, states) if self._part.skips else []
        trained = [arguments[place] for place in self._number_of]
        loss, outputs, gradients = self._backward(arguments, flat[-1])
        others: dict[str, Tensor] = {}
        self.has_gradient = [gradient is not None for gradient in gradients]
        if self._part.adds:
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total.add_(gradient)
            gradients = [total if has else None for total, has in zip(sums, self.has_gradient, strict=True)]
        if self._part.steps and self._tokens is not None:
            for total in sums:
                total.div_((flat[-1] + self._tokens).clamp(min=1))
        if self._part.steps:
            others = self._update(loss, trained, gradients, states, rates, kept)
            for total in sums:
                total.zero_()
        elif not self._part.adds:
            others = {f"grad.{number}": grad for number, grad in enumerate(gradients) if grad is not None}
        self._output_names, self._other_names = [*outputs], [*others]
        return [loss, *outputs.values(), *others.values()]

    def _backward(
        self, arguments: list[Tensor], share: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], list[Tensor | None]]:
        """The loss, further outputs, and the gradients."""
        leaves = []
        for place in self._number_of:
            arguments[place] = arguments[place].detach().requires_grad_()
            leaves.append(arguments[place])
        with torch.enable_grad():
            returned = self._capture.graph(*arguments)
            loss = returned[self._capture.loss]
            self._tokens = self._tokens_of(returned) if self._part.adds else None
            weighed = loss * share.to(loss.dtype) if self._part.adds else loss
            if self._tokens is not None:  # the mean over zero tokens is NaN and must not contribute
                weighed = torch.where(self._tokens > 0, loss * self._tokens, torch.zeros_like(loss))
            gradients = _apart(torch.autograd.grad(weighed, leaves, allow_unused=True))
        outputs = {name: returned[place].detach() for name, place in self._capture.outputs.items()}
        return loss.detach(), outputs, gradients

    def _tokens_of(self, returned: Sequence[Tensor]) -> Tensor | None:
        """The number of tokens that the loss averages, if the model returns it."""
        outputs, constants = self._capture.outputs, self._capture.constants
        if TOKENS in outputs:
            tokens = returned[outputs[TOKENS]]
        elif constants.get(TOKENS) is not None:
            tokens = torch.full((), constants[TOKENS], device=self._share.device)
        else:
            return None
        return tokens.detach().reshape(()).to(torch.float64)

    def _update(
        self,
        loss: Tensor,
        trained: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        states: Sequence[Tensor],
        rates: Sequence[Tensor],
        kept: Sequence[tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        """Clip the gradients and update the weights; return the norm, and whether the update is skipped."""
        results = {}
        fakes = self._fake_parameters(trained)
        for fake, gradient in zip(trained, gradients, strict=True):
            fake.grad = gradient
        groups = clipping_groups(self._optimizer, fakes)
        limits = self._part.max_norm, self._part.max_value
        clip = gradient_norm(groups, *limits) if self._part.skips else gradient_clipper(groups, *limits)
        if clip is not None:
            results["grad_norm"] = clip().clone()
        assert isinstance(self._inputs, OptimizerInputs), "a program that steps"
        trace_step(self._optimizer, self._inputs, fakes, states, rates)
        if self._part.skips:
            judged = torch.stack([loss.isfinite().reshape(()), results["grad_norm"].isfinite().reshape(())])
            results["skipped_update"] = is_bad = ~judged.all()
            for tensor, before in kept:
                tensor.copy_(torch.where(is_bad, before, tensor))
        return results

    def _fake_parameters(self, trained: Sequence[Tensor]) -> list[Any]:
        """One fake parameter for each of the optimizer's; it skips those without a gradient."""
        by_number = dict(zip(self._number_of.values(), trained, strict=True))
        return [
            by_number[number] if number in by_number else _WithoutGradient()
            for number in range(len(self._inputs.parameters))
        ]

    def _kept(self, arguments: Sequence[Tensor], states: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The values that a skipped update must restore. Integer buffers, such as counters, keep their update."""
        in_batch = {place for place, _ in self._capture.places}
        changed = [
            value for place, value in enumerate(arguments) if place not in in_batch and value.is_floating_point()
        ]
        return [(tensor, tensor.clone()) for tensor in (*changed, *states)]


def _apart(gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The gradients, each with memory of its own, since they are changed in place.

    Autograd passes one tensor to both terms of a sum, and one number to all elements of a mean. In an eager step the
    parameters copy them.
    """
    own, known = list[Tensor | None](), set[StorageWeakRef]()
    for gradient in gradients:
        if gradient is not None and gradient.layout is torch.strided:  # a sparse one has no storage
            storage = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
            if storage in known or any(not stride for stride in gradient.stride()):
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            known.add(storage)
        own.append(gradient)
    return own


class _WithoutGradient:
    """Placeholder for a parameter that takes no part in the step."""

    grad = None


def _compiled(graph: torch.fx.GraphModule, flat: Sequence[Tensor], backend: str) -> tuple[compile_graph.Compiled, bool]:
    """The compiled graph, and whether it was on disk."""
    try:
        ahead = ahead_of_time(graph, flat, compile_graph.INDUCTOR) if backend == "inductor" else None
    except Exception as error:  # it can still be called from Python
        logger.info("Graph mode: the program is called from Python, not compiled ahead of time: %s", reason(error))
        ahead = None
    if ahead is not None:
        return ahead
    try:
        return compile_graph.compiled(graph, flat, backend), False
    except Exception as error:
        raise NotCapturable(f"the backend {backend!r} failed: {reason(error)}") from error

"""A whole update as one compiled program: forward, backward, clipping, optimizer.

Its inputs are the tensors of the batch, the model's parameters and buffers, the optimizer's states, and numbers that
change (learning rates, the share of a micro-batch in its window). Parameters, buffers and states are written to in
place: they are those of the model and the optimizer, and nothing is copied back.
"""

import importlib
import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright._torch_compat import compile_graph
from trainwright._torch_compat.ahead_of_time import ahead_of_time
from trainwright._torch_compat.grad_mode import grad_switch
from trainwright.engine.accumulation import TOKENS
from trainwright.engine.compiled.capture import Capture
from trainwright.engine.compiled.errors import NotCapturable, NotReady, reason, trace_reason
from trainwright.engine.compiled.optimizer import OptimizerInputs, clipping_groups, step_written_down
from trainwright.optim.clip import gradient_clipper, gradient_norm

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


@dataclass(frozen=True)
class Part:
    """Which part of an update a program is: with one micro-batch, all of it.

    ``adds``: gradients are added up with those of other micro-batches; ``steps``: the last one, which uses them.
    ``skips``: an update whose loss or gradients are not finite changes nothing. ``max_norm``: as ``gradient_clipper``
    takes it.
    """

    adds: bool
    steps: bool
    skips: bool = False
    max_norm: float | None = None


class Program:
    """``run(arguments, sums, share)`` makes one micro-batch's part of an update, and gives its figures by name.

    Attributes:
        num_operations: of the program, before the compiler has fused them; is_from_disk: it was compiled at an earlier
            start.
        trainable: the parameters of the optimizer that the forward pass reads, in the order of the ``sums`` of their
            gradients; has_gradient: of each, whether the loss depends on it, where gradients are added up.
    """

    def __init__(
        self,
        capture: Capture,
        arguments: Sequence[Any],
        optimizer: Optimizer,
        inputs: OptimizerInputs,
        part: Part,
        backend: str,
    ) -> None:
        """Write the program down and compile it, for ``arguments`` of the capture. Nothing is computed.

        Raises:
            NotReady: the optimizer has not made its state yet.
            NotCapturable: an operation has no place in a program, or the compiler refuses it.
        """
        self._capture, self._optimizer, self._inputs, self._part = capture, optimizer, inputs, part
        self._share = torch.ones((), dtype=torch.float64, device=inputs.parameters[0].device)
        self._known_share: float | None = 1.0
        self._set_grad_enabled = grad_switch()
        owned = {id(p): number for number, p in enumerate(inputs.parameters)}
        # Of each argument that is a parameter to train, which one of the optimizer's it is.
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
        self._figures: list[str] = []
        self.has_gradient: list[bool] = []
        with torch.no_grad(), compile_graph.quiet():
            written = self._written(flat, backend)
            self.num_operations = sum(node.op == "call_function" for node in written.graph.nodes)
            self._call, self.is_from_disk = _compiled(written, flat, backend)
        if backend == "inductor" and all(tensor.is_cuda for tensor in flat):
            self._call = Replayed(self._call, [place for place, _ in capture.places])

    def run(
        self, arguments: list[Any], states: list[Tensor], sums: Sequence[Tensor], share: float | Tensor
    ) -> dict[str, Any]:
        """The figures: ``loss``, the outputs that are wanted, ``grad_norm`` and ``skipped_update`` if there are any.

        ``share``: by which the loss counts; or, where tokens are counted, how many there were in the window so far.
        """
        if isinstance(share, Tensor):
            self._share.copy_(share)
            self._known_share = None
        elif share != self._known_share:
            self._share.fill_(share)
            self._known_share = share
        grad_was_enabled = torch.is_grad_enabled()
        self._set_grad_enabled(False)
        try:
            figures = self._call([*arguments, *sums, *states, self._share])
        finally:
            self._set_grad_enabled(grad_was_enabled)
        return dict(zip(self._figures, figures, strict=True))

    def _written(self, flat: list[Tensor], backend: str) -> torch.fx.GraphModule:
        """The operations, as one flat graph; for inductor those that it is made for."""
        from torch.fx.experimental.proxy_tensor import make_fx

        try:
            table = compile_graph.decompositions(backend)
            writer = make_fx(self._operations, decomposition_table=table, tracing_mode="fake")
            graph: torch.fx.GraphModule = _with_what_it_imports(lambda: writer(*flat))
        except (NotReady, NotCapturable):
            raise
        except Exception as error:
            raise NotCapturable(trace_reason(error)) from error
        return graph

    def _operations(self, *flat: Tensor) -> list[Tensor]:
        """The update in plain PyTorch, on stand-ins."""
        count, num_sums = self._num_arguments, self._num_sums
        arguments, sums = [*flat[:count]], flat[count : count + num_sums]
        num_rates = len(self._inputs.rates)
        states, rates = flat[count + num_sums : -1 - num_rates], flat[-1 - num_rates : -1]
        kept = self._kept(arguments, states) if self._part.skips else []
        trained = [arguments[place] for place in self._number_of]
        figures, gradients = self._backward(arguments, flat[-1])
        if self._part.adds:
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total.add_(gradient)
            self.has_gradient = [gradient is not None for gradient in gradients]
            gradients = [total if has else None for total, has in zip(sums, self.has_gradient, strict=True)]
        if self._part.steps and self._tokens is not None:
            for total in sums:
                total.div_((flat[-1] + self._tokens).clamp(min=1))
        if self._part.steps:
            self._update(trained, gradients, states, rates, figures, kept)
            for total in sums:
                total.zero_()
        self._figures = [*figures]
        return [*figures.values()]

    def _backward(self, arguments: list[Tensor], share: Tensor) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        leaves = []
        for place in self._number_of:
            arguments[place] = arguments[place].detach().requires_grad_()
            leaves.append(arguments[place])
        with torch.enable_grad():
            returned = self._capture.graph(*arguments)
            loss = returned[self._capture.loss]
            self._tokens = self._tokens_of(returned) if self._part.adds else None
            weighed = loss * share.to(loss.dtype) if self._part.adds else loss
            if self._tokens is not None:  # a mean over no token at all is NaN, and no part of the mean over all
                weighed = torch.where(self._tokens > 0, loss * self._tokens, torch.zeros_like(loss))
            gradients = torch.autograd.grad(weighed, leaves, allow_unused=True)
        figures = {"loss": loss.detach()}
        for name, place in self._capture.outputs.items():
            figures[f"output.{name}"] = returned[place].detach()
        return figures, [*gradients]

    def _tokens_of(self, returned: Sequence[Tensor]) -> Tensor | None:
        """Over how many tokens the loss is a mean, where the model says it."""
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
        trained: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        states: Sequence[Tensor],
        rates: Sequence[Tensor],
        figures: dict[str, Tensor],
        kept: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        stand_ins = self._stand_ins(trained)
        for stand_in, gradient in zip(trained, gradients, strict=True):
            stand_in.grad = gradient
        groups = clipping_groups(self._optimizer, stand_ins)
        norm = self._part.max_norm
        clip = gradient_norm(groups, norm) if self._part.skips else gradient_clipper(groups, norm)
        if clip is not None:
            figures["grad_norm"] = clip().clone()
        step_written_down(self._optimizer, self._inputs, stand_ins, states, rates)
        if self._part.skips:
            judged = torch.stack([figures["loss"].isfinite().reshape(()), figures["grad_norm"].isfinite().reshape(())])
            figures["skipped_update"] = is_bad = ~judged.all()
            for tensor, before in kept:
                tensor.copy_(torch.where(is_bad, before, tensor))

    def _stand_ins(self, trained: Sequence[Tensor]) -> list[Any]:
        """One for each of the optimizer's parameters; those without a gradient are left alone by it."""
        by_number = dict(zip(self._number_of.values(), trained, strict=True))
        return [
            by_number[number] if number in by_number else _WithoutGradient()
            for number in range(len(self._inputs.parameters))
        ]

    def _kept(self, arguments: Sequence[Tensor], states: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What an update that is left out must not change, and what it is before. Counters in buffers go on."""
        in_batch = {place for place, _ in self._capture.places}
        changed = [
            value for place, value in enumerate(arguments) if place not in in_batch and value.is_floating_point()
        ]
        return [(tensor, tensor.clone()) for tensor in (*changed, *states)]


class _WithoutGradient:
    """Stands in for a parameter that takes no part in the step."""

    grad = None


def _with_what_it_imports(write: Callable[[], torch.fx.GraphModule]) -> torch.fx.GraphModule:
    """``write()``, begun again where torch looks for a part of itself that nobody has imported, as max_pool2d does.

    To import all of inductor beforehand would take a second at each start; a program from disk does without.
    """
    imported = set[str]()
    while True:
        try:
            return write()
        except AttributeError as error:
            package = error.obj
            if not isinstance(package, types.ModuleType) or package.__name__.partition(".")[0] != "torch":
                raise
            name = f"{package.__name__}.{error.name}"
            if name in imported:
                raise
            imported.add(name)
            try:
                importlib.import_module(name)
            except ImportError:
                raise error from None


def _compiled(graph: torch.fx.GraphModule, flat: Sequence[Tensor], backend: str) -> tuple[compile_graph.Compiled, bool]:
    """What runs the graph, and whether it was on disk."""
    try:
        ahead = ahead_of_time(graph, flat, compile_graph.INDUCTOR) if backend == "inductor" else None
    except Exception as error:  # what cannot be called without Python can with it
        logger.info("Graph mode: the program is not compiled ahead of time, and called from Python: %s", reason(error))
        ahead = None
    if ahead is not None:
        return ahead
    try:
        return compile_graph.compiled(graph, flat, backend), False
    except Exception as error:
        raise NotCapturable(f"the backend {backend!r} refuses it: {reason(error)}") from error

"""Choose for each step between a program and eager: both use the same parameters, buffers and states.

The first update is eager, since the optimizer creates its state in it; so are batches of another shape than the
programs'. The conditions of a program are checked before each step; if they have changed, it is compiled again, up to
a limit.
"""

import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import mark_stepped
from trainwright.data.batch import count_samples
from trainwright.engine.accumulation import TOKENS, WindowMean
from trainwright.events.phases import activity
from trainwright.graph import dynamo, traced_step
from trainwright.graph.capture import (
    Capture,
    Layout,
    LossOf,
    NotCapturable,
    NotReady,
    layout_of,
    reason,
    shapes_of,
)
from trainwright.graph.compile_graph import cpp_compilers, refusal_of_compiler
from trainwright.graph.optimizer import (
    OptimizerInputs,
    TrainedParameters,
    has_state,
    reason_outside,
    refusal,
)
from trainwright.graph.program import Part, Program
from trainwright.optim.clip import gradient_clipper
from trainwright.optim.named import each_optimizer

_Inputs = tuple[list[Any], list[Tensor]]  # arguments of the forward pass, and the optimizer's states

logger = logging.getLogger("trainwright.engine")

_MOST_CAPTURES = 8
_MANY_MISFITS = 20
_ONE: Any = 1.0  # in place of a loss: its share is then the factor


def usable_backend(backend: str, device: torch.device) -> str:
    """``backend``, or "aot_eager" in place of inductor on a CPU without a C++ compiler."""
    if backend != "inductor" or device.type != "cpu" or any(map(shutil.which, cpp_compilers())):
        return backend
    logger.info("Graph mode: no C++ compiler found for inductor; using the backend aot_eager.")
    return "aot_eager"


def refusal_of_torch() -> str | None:
    """Why this release of torch cannot compile programs; None if it can."""
    why = dynamo.fault() or traced_step.fault()
    return None if why is None else f"torch {torch.__version__} is not as expected ({why})"


class CompiledUpdate:
    """The micro-batches of updates, each in one call.

    Args:
        loss_of: computes the loss of a batch and further outputs; run once per capture, never in a step.
        names: the fields of a batch that ``loss_of`` reads; None: all.
        adds: whether windows have several micro-batches.
        skips: skip updates whose loss or gradients are not finite.
        max_norm, max_value: as in ``gradient_clipper``.
        batch_size: the number of samples of a full batch; None: unknown.
        on_compiled: called with the seconds of each compilation, also of a failed one.

    Attributes:
        num_captures: the number of captures of the forward pass.
        is_refused: whether the run continues without programs.
        has_stepped: whether the latest ``run`` with ``is_last`` has updated the weights: the step of the optimizer is
            part of the program.
    """

    def __init__(
        self,
        loss_of: LossOf,
        optimizer: Optimizer,
        *,
        backend: str,
        adds: bool = False,
        skips: bool = False,
        max_norm: float | None = None,
        max_value: float | None = None,
        names: Sequence[str] | None = None,
        batch_size: int | None = None,
        on_compiled: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._loss_of = loss_of
        self._optimizer = optimizer
        self._backend = backend
        self._names = names
        self._batch_size = batch_size
        self._adds = adds
        self._parts = [Part(adds=adds, steps=True, skips=skips, max_norm=max_norm, max_value=max_value)] + (
            [Part(adds=True, steps=False)] if adds else []
        )
        self._on_compiled = on_compiled
        self._programs: _Programs | None = None
        self._others: list[_Programs] = []
        self.is_refused = self.has_stepped = self._is_warned = False
        self._misfits = 0
        self.num_captures = 0

    def run(self, batch: Any, *, is_last: bool = True, mean: WindowMean | None = None) -> dict[str, Any] | None:
        """Run this micro-batch's part of an update and return its metrics; None: it must run eagerly.

        ``is_last``: of its window, so that the weights change. ``mean``: weights the micro-batches of a window; needed
        if windows have several.
        """
        found = self._find(batch)
        if found is None or found[0].passes_over_gradients(is_last):
            if is_last:
                for programs in self._others:
                    programs.release_sums()
            return None
        self.has_stepped = found[0].steps
        return found[0].run(batch, found[1], is_last, mean)

    def _find(self, batch: Any) -> tuple["_Programs", "_Inputs"] | None:
        """The programs for this batch, and their inputs."""
        if self._programs is not None:
            inputs = self._programs.inputs_of(batch)
            if inputs is not None:
                self._misfits = 0
                return self._programs, inputs
        if self.is_refused:
            return None
        if self._programs is not None and not self._programs.fit(batch):
            self._count_misfit()
            return None
        for programs in self._others:
            inputs = programs.inputs_of(batch)
            if inputs is not None:
                self._programs = programs
                return programs, inputs
        return self._find_after_compiling(batch)

    def _count_misfit(self) -> None:
        """Count batches without a program: a single shorter batch is normal, a sequence of them is not."""
        self._misfits += 1
        if self._misfits == _MANY_MISFITS and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "Graph mode: %d consecutive batches do not have the shape of the program; they run eagerly. Give all"
                " batches one shape, for example by padding texts to one length.", _MANY_MISFITS,
            )  # fmt: skip

    def _find_after_compiling(self, batch: Any) -> tuple["_Programs", "_Inputs"] | None:
        if self._batch_size and count_samples(batch) not in (0, self._batch_size):
            return None
        try:
            programs = self._compile_for(batch)
            inputs = programs.inputs_of(batch)
            if inputs is None:
                raise NotCapturable("the inputs of the forward pass change at each read")
        except NotReady:
            return None
        except NotCapturable as why:
            self.refuse(str(why))
            return None
        except Exception as error:  # of torch's compiler: any type of error is possible
            self.refuse(reason(error))
            return None
        self._programs = programs
        return programs, inputs

    def _compile_for(self, batch: Any) -> "_Programs":
        if self.num_captures >= _MOST_CAPTURES:
            raise NotCapturable(f"what a step depends on, in model or optimizer, has changed {_MOST_CAPTURES} times")
        start = time.perf_counter()
        try:
            with activity("compile"), _preserved_rng():
                why = refusal_of_compiler() or refusal_of_torch() or refusal(self._optimizer)
                if why is not None:
                    raise NotCapturable(why)
                why_outside = reason_outside(self._optimizer)
                steps = why_outside is None
                if steps and not has_state(self._optimizer):
                    raise NotReady
                layout = layout_of(batch, self._names)
                programs = _Programs(self._loss_of, layout, batch, self._optimizer, steps=steps)
                self._backend = usable_backend(self._backend, self._optimizer.param_groups[0]["params"][0].device)
                parts = self._parts if steps else [Part(adds=self._adds, steps=False)]
                programs.compile(batch, parts, self._backend)
        finally:
            seconds = time.perf_counter() - start
            self._on_compiled(seconds)
        self.num_captures += 1
        self._others.append(programs)
        is_kept = all(program.is_from_disk for program in programs.made)
        operations = " and ".join(str(program.num_operations) for program in programs.made)
        limits = self._parts[0].max_norm, self._parts[0].max_value
        step = f"the step of {' and '.join(type(one).__name__ for one in each_optimizer(self._optimizer))}"
        what = "forward and backward"
        if steps:
            clipping = ", clipping" if gradient_clipper(self._optimizer, *limits) else ""
            what = f"forward, backward{clipping} and {step}"
        logger.info(
            "Graph mode: %s are one program (%s operations, no graph break), %s in %.1f s.%s", what, operations,
            f"compiled by {self._backend}" if not is_kept else "loaded from disk", seconds,
            "" if steps else f" It is followed by {step}, which {why_outside}.",
        )  # fmt: skip
        return programs

    def refuse(self, why: str) -> None:
        """Continue the run without programs, and log why."""
        if not self.is_refused:
            logger.warning("Graph mode: the steps stay eager: %s.", why)
        self._programs, self._others, self.is_refused = None, [], True


class _Programs:
    """The programs of one forward pass: for the last micro-batch of a window, and for the others.

    ``steps``: the step of the optimizer is part of them.
    """

    def __init__(self, loss_of: LossOf, layout: Layout, batch: Any, optimizer: Optimizer, *, steps: bool) -> None:
        tensors = layout.take(batch)
        assert tensors is not None
        self._layout = layout
        self._shapes = shapes_of(tensors)
        self._optimizer = optimizer
        self._capture = Capture(loss_of, layout, tensors)
        self.steps = steps
        self._inputs = OptimizerInputs(optimizer) if steps else TrainedParameters(optimizer)
        self.made: list[Program] = []

    def compile(self, batch: Any, parts: Sequence[Part], backend: str) -> None:
        arguments = self._capture.arguments(self._layout.take(batch) or ())
        assert arguments is not None  # it was captured with this batch
        settings = self._capture, arguments, self._optimizer, self._inputs
        self.made = [Program(*settings, part, backend) for part in parts]
        self._last, self._add = self.made[0], self.made[-1]
        self._adds = parts[0].adds
        self._trainable = self._last.trainable
        capture = self._capture
        returns_tokens = TOKENS in capture.outputs or capture.constants.get(TOKENS) is not None
        self._is_by_tokens = self._adds and returns_tokens
        self._constants = {f"output.{name}": value for name, value in capture.constants.items()}
        self._sums = [torch.zeros_like(p, requires_grad=False) for p in self._trainable] if self._adds else []
        self._are_sums_zero = True
        self._with_gradient = [
            (number, parameter) for number, parameter in enumerate(self._trainable) if self._last.has_gradient[number]
        ]
        used = {id(parameter) for _, parameter in self._with_gradient}
        self._others = [parameter for parameter in self._inputs.parameters if id(parameter) not in used]
        # Schedules warn if no optimizer step seems to precede theirs.
        mark_stepped(self._optimizer)

    def inputs_of(self, batch: Any) -> "_Inputs | None":
        """The programs' inputs; None if they do not apply to this batch, or to the current model."""
        tensors = self._layout.take(batch)
        if tensors is None:
            return None
        arguments = self._capture.arguments(tensors)
        if arguments is None:
            return None
        states = self._inputs.tensors()
        return None if states is None else (arguments, states)

    def passes_over_gradients(self, is_last: bool) -> bool:
        """Whether there are gradients that the programs would not use: then the micro-batch must run eagerly."""
        if not self._adds:
            return self._inputs.has_gradients()
        if not (self.steps and is_last):
            return False
        # Of an earlier micro-batch, which another program has computed.
        return any(parameter.grad is not None for parameter in self._others)

    def fit(self, batch: Any) -> bool:
        """Whether the batch has the shapes of the programs."""
        tensors = self._layout.take(batch)
        return tensors is not None and shapes_of(tensors) == self._shapes

    def run(self, batch: Any, inputs: "_Inputs", is_last: bool, mean: WindowMean | None) -> dict[str, Any]:
        program = self._last if is_last else self._add
        share: float | Tensor = 1.0
        if mean is not None:
            share = _sum_of_tokens(mean) if self._is_by_tokens else mean.share(_ONE, batch)
        if self._adds:
            self._take_gradients()
        results = program.run(*inputs, self._sums, share)
        if is_last and (self._adds or not self.steps):
            self._set_gradients(results)
        results.update(self._constants)
        if mean is not None and self._is_by_tokens:
            mean.record({TOKENS: results[f"output.{TOKENS}"]})
            mean.share(results["loss"], batch)
        return results

    def _take_gradients(self) -> None:
        """Use the sums as gradients, so that an eager micro-batch adds to them."""
        for number, parameter in self._with_gradient:
            total, gradient = self._sums[number], parameter.grad
            if gradient is None and not self._are_sums_zero:
                total.zero_()
            elif gradient is not None and gradient is not total:
                total.copy_(gradient)
            parameter.grad = total
        self._are_sums_zero = False

    def release_sums(self) -> None:
        """Before an eager step, which may keep the gradients: they become tensors of their own."""
        for number, parameter in self._with_gradient if self._adds and not self.steps else ():
            if parameter.grad is self._sums[number]:
                parameter.grad = self._sums[number].clone()

    def _set_gradients(self, results: dict[str, Any]) -> None:
        """Leave the gradients as an eager micro-batch would: new tensors for the step, which an optimizer may keep.

        None after the step of a program, which sets the sums to 0.
        """
        self._are_sums_zero = self.steps
        for number, parameter in self._with_gradient:
            if self.steps:
                parameter.grad = None
            else:
                parameter.grad = self._sums[number].clone() if self._adds else results.pop(f"grad.{number}")


def _sum_of_tokens(mean: WindowMean) -> float | Tensor:
    """The tokens of this window's micro-batches so far."""
    return torch.stack([*mean.weights]).sum() if mean.weights else 0.0


@contextmanager
def _preserved_rng() -> Iterator[None]:
    """A run that compiles draws the same random numbers as one that does not."""
    state = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(state)

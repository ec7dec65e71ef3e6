"""Whether a step is made by a program or eagerly: both work on the same parameters, buffers and states.

The first update is eager, in which the optimizer makes its state; so are batches of another shape than the programs'.
What the programs stand for is checked before each step; where it has changed they are made anew, a few times.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright._torch_compat import graph_capture, traced_step
from trainwright._torch_compat.optimizer_import import mark_stepped
from trainwright.engine.accumulation import TOKENS, WindowMean, count_samples
from trainwright.engine.compiled.batch import Layout, layout_of, shapes_of
from trainwright.engine.compiled.capture import Capture, LossOf
from trainwright.engine.compiled.errors import NotCapturable, NotReady, reason
from trainwright.engine.compiled.optimizer import OptimizerInputs, has_state, refusal
from trainwright.engine.compiled.program import Part, Program
from trainwright.optim.clip import gradient_clipper

_Inputs = tuple[list[Any], list[Tensor]]  # arguments of the forward pass, and states of the optimizer

logger = logging.getLogger("trainwright.engine")

_MOST_CAPTURES = 8
_MANY_MISFITS = 20
_ONE: Any = 1.0  # in place of a loss: what its share is then is the factor


def say_refusal(why: str) -> None:
    """Say, in one line, why steps are no programs."""
    logger.warning("Graph mode: the steps stay eager: %s.", why)


def refusal_of_torch() -> str | None:
    """Why programs cannot be made with this release of torch; None where they can."""
    why = graph_capture.fault() or traced_step.fault()
    return None if why is None else f"torch {torch.__version__} is not as expected ({why})"


class CompiledUpdate:
    """The micro-batches of updates, each in one call.

    Args:
        loss_of: makes the loss of a batch and what else is wanted of it; run once per capture, never in a step.
        names: the fields of a batch that ``loss_of`` looks at; None: all.
        adds: whether windows have several micro-batches.
        skips: leave updates out whose loss or gradients are not finite.
        max_norm: as ``gradient_clipper`` takes it.
        batch_size: how many samples a batch has that is no shorter one; None: nobody knows.
        on_refusal: called once if the run is to go on without programs.
        on_compiled: is told the seconds of each making of programs, also of one that failed.

    Attributes:
        num_captures: how often the forward pass was read.
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
        names: Sequence[str] | None = None,
        batch_size: int | None = None,
        on_refusal: Callable[[], object] = lambda: None,
        on_compiled: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._loss_of = loss_of
        self._optimizer = optimizer
        self._backend = backend
        self._names = names
        self._batch_size = batch_size
        self._adds = adds
        self._parts = [Part(adds=adds, steps=True, skips=skips, max_norm=max_norm)] + (
            [Part(adds=True, steps=False)] if adds else []
        )
        self._on_refusal, self._on_compiled = on_refusal, on_compiled
        self._programs: _Programs | None = None
        self._others: list[_Programs] = []
        self._is_off = self._has_told = False
        self._misfits = 0
        self.num_captures = 0

    def run(self, batch: Any, *, is_last: bool = True, mean: WindowMean | None = None) -> dict[str, Any] | None:
        """The part of an update that is this micro-batch's, and its figures; None: make it eagerly.

        ``is_last``: of its window, so that the weights change. ``mean``: weighs the micro-batches of a window, which it
        knows the beginning of; needed where windows have several.
        """
        found = self._find(batch)
        if found is None or (not self._adds and found[0].has_gradients()):
            return None
        return found[0].run(batch, found[1], is_last, mean)

    def _find(self, batch: Any) -> tuple["_Programs", "_Inputs"] | None:
        """The programs of this batch, and what they take."""
        if self._programs is not None:
            inputs = self._programs.inputs_of(batch)
            if inputs is not None:
                self._misfits = 0
                return self._programs, inputs
        if self._is_off:
            return None
        if self._programs is not None and not self._programs.fit(batch):
            self._count_misfit()
            return None
        for programs in self._others:
            inputs = programs.inputs_of(batch)
            if inputs is not None:
                self._programs = programs
                return programs, inputs
        return self._find_after_making(batch)

    def _count_misfit(self) -> None:
        """A shorter batch at an epoch's end is none to speak of; a row of them is."""
        self._misfits += 1
        if self._misfits == _MANY_MISFITS and not self._has_told:
            self._has_told = True
            logger.warning(
                "Graph mode: %d batches in a row are not of the shape that the program is made for; they are made"
                " eagerly. Give all batches one shape: pad texts to one length, for example.", _MANY_MISFITS,
            )  # fmt: skip

    def _find_after_making(self, batch: Any) -> tuple["_Programs", "_Inputs"] | None:
        if self._batch_size and count_samples(batch) not in (0, self._batch_size):
            return None
        try:
            programs = self._made_for(batch)
            inputs = programs.inputs_of(batch)
            if inputs is None:
                raise NotCapturable("what the forward pass reads is another at each look")
        except NotReady:
            return None
        except NotCapturable as why:
            self.refuse(str(why))
            return None
        except Exception as error:  # of torch's compiler, whose ways of failing are not known beforehand
            self.refuse(reason(error))
            return None
        self._programs = programs
        return programs, inputs

    def _made_for(self, batch: Any) -> "_Programs":
        if self.num_captures >= _MOST_CAPTURES:
            raise NotCapturable(f"what a step depends on, in model or optimizer, has changed {_MOST_CAPTURES} times")
        why = refusal_of_torch() or refusal(self._optimizer)
        if why is not None:
            raise NotCapturable(why)
        if not has_state(self._optimizer):
            raise NotReady
        start = time.perf_counter()
        try:
            with _randomness_kept():
                programs = _Programs(self._loss_of, layout_of(batch, self._names), batch, self._optimizer)
                programs.compile(batch, self._parts, self._backend)
        finally:
            seconds = time.perf_counter() - start
            self._on_compiled(seconds)
        self.num_captures += 1
        self._others.append(programs)
        is_kept = all(program.is_from_disk for program in programs.made)
        operations = " and ".join(str(program.num_operations) for program in programs.made)
        clipping = ", clipping" if gradient_clipper(self._optimizer, self._parts[0].max_norm) else ""
        logger.info(
            "Graph mode: forward, backward%s and the step of %s are one program (%s operations, no graph break), %s"
            " in %.1f s.", clipping, type(self._optimizer).__name__, operations,
            f"made by {self._backend}" if not is_kept else "taken from disk", seconds,
        )  # fmt: skip
        return programs

    def refuse(self, why: str) -> None:
        say_refusal(why)
        self._programs, self._others, self._is_off = None, [], True
        self._on_refusal()


class _Programs:
    """Those of one forward pass: the last micro-batch of a window, and, of longer ones, the others."""

    def __init__(self, loss_of: LossOf, layout: Layout, batch: Any, optimizer: Optimizer) -> None:
        tensors = layout.take(batch)
        assert tensors is not None
        self._layout = layout
        self._shapes = shapes_of(tensors)
        self._optimizer = optimizer
        self._capture = Capture(loss_of, layout, tensors)
        self._inputs = OptimizerInputs(optimizer)
        self.made: list[Program] = []

    def compile(self, batch: Any, parts: Sequence[Part], backend: str) -> None:
        arguments = self._capture.arguments(self._layout.take(batch) or ())
        assert arguments is not None  # it was made for this batch
        settings = self._capture, arguments, self._optimizer, self._inputs
        self.made = [Program(*settings, part, backend) for part in parts]
        self._last, self._add = self.made[0], self.made[-1]
        self._trainable = self._last.trainable if len(self.made) > 1 else []
        capture = self._capture
        tells_tokens = TOKENS in capture.outputs or capture.constants.get(TOKENS) is not None
        self._is_by_tokens = bool(self._trainable) and tells_tokens
        self._constants = {f"output.{name}": value for name, value in capture.constants.items()}
        self._sums = [torch.zeros_like(p, requires_grad=False) for p in self._trainable]
        # Schedules warn where no step seems to have come before theirs.
        mark_stepped(self._optimizer)

    def inputs_of(self, batch: Any) -> "_Inputs | None":
        """What the programs take; None where they do not stand for this batch, or for the model as it is now."""
        tensors = self._layout.take(batch)
        if tensors is None:
            return None
        arguments = self._capture.arguments(tensors)
        if arguments is None:
            return None
        states = self._inputs.tensors()
        return None if states is None else (arguments, states)

    def has_gradients(self) -> bool:
        """Whether somebody has left gradients, to be added to."""
        return self._inputs.has_gradients()

    def fit(self, batch: Any) -> bool:
        """Whether the batch has the shapes of the programs, so that something else has changed."""
        tensors = self._layout.take(batch)
        return tensors is not None and shapes_of(tensors) == self._shapes

    def run(self, batch: Any, inputs: "_Inputs", is_last: bool, mean: WindowMean | None) -> dict[str, Any]:
        program = self._last if is_last else self._add
        share: float | Tensor = 1.0
        if mean is not None:
            share = _sum_of_tokens(mean) if self._is_by_tokens else mean.share(_ONE, batch)
        if self._sums:
            self._take_gradients()
        figures = program.run(*inputs, self._sums, share)
        figures.update(self._constants)
        if mean is not None and self._is_by_tokens:
            mean.share(figures["loss"], batch, figures[f"output.{TOKENS}"])
        return figures

    def _take_gradients(self) -> None:
        """Have the sums be the gradients: a micro-batch that is made eagerly adds to them."""
        for parameter, total, has_gradient in zip(self._trainable, self._sums, self._last.has_gradient, strict=True):
            if not has_gradient:
                continue
            gradient = parameter.grad
            if gradient is total:
                continue
            if gradient is None:
                total.zero_()
            else:
                total.copy_(gradient)
            parameter.grad = total


def _sum_of_tokens(mean: WindowMean) -> float | Tensor:
    """Of the micro-batches of this window so far."""
    return torch.stack([*mean.weights]).sum() if mean.weights else 0.0


@contextmanager
def _randomness_kept() -> Iterator[None]:
    """A run that compiles draws the same numbers as one that does not."""
    state = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(state)

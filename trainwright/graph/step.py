"""Graph mode of both APIs: a step trains with compiled programs where possible, and eagerly otherwise.

A program is a complete micro-batch as one compiled function: forward, backward, and the update at a window's end. With
other optimizers than torch's, and with many parameters, it is forward and backward; the update follows eagerly.

The first update is eager, since the optimizer creates its state in it; so are batches of another shape than the
programs'. The conditions of a program are checked before each step; if they have changed, it is compiled again, up to
a limit.
"""

import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.base.batch import num_rows
from trainwright.base.dist import get_world_size
from trainwright.engine.step import Step
from trainwright.engine.update import Update
from trainwright.events.phases import activity
from trainwright.events.storage import get_event_storage, has_event_storage
from trainwright.graph import dynamo, traced_step
from trainwright.graph.capture import LossOf, NotCapturable, NotReady, reason, structure_of
from trainwright.graph.compile_graph import cpp_compilers, refusal_of_compiler
from trainwright.graph.optimizer import has_state, reason_outside, refusal
from trainwright.graph.program import Part
from trainwright.graph.programs import Inputs, Programs
from trainwright.models.outputs import scalars_of
from trainwright.optim.clip import gradient_clipper
from trainwright.optim.named import each_optimizer

logger = logging.getLogger("trainwright.engine")

_MOST_CAPTURES = 8
_MANY_MISFITS = 20


class CompiledStep:
    """In place of the ``train`` of a :class:`~trainwright.engine.step.Step`: a program, or ``eager`` without one.

    Its ``finish`` is called in place of that of the step: it does nothing where a program has updated the weights.

    Args:
        eager: the ``train`` of batches that no program fits.
        losses_of: computes the loss of a batch and further outputs; called when a program is captured, never in a step.
        logs_of: the logs of a micro-batch, from its loss and outputs.
        update: the update that eager steps use.
        accumulates: whether windows have more than one micro-batch.
        names: the fields of a batch that ``losses_of`` reads; None: all.
        batch_size: the number of samples of a full batch; None: unknown.
        on_compiled: called with the seconds of each compilation, also of a failed one.

    Attributes:
        has_stepped: whether a program that updates the weights at a window's end ran for the latest micro-batch. Where
            the step of the optimizer is not part of programs, they compute the gradients only.
        is_refused: whether the run continues without programs.
    """

    def __init__(
        self,
        eager: Callable[[Any, Any], Any],
        losses_of: LossOf,
        logs_of: Callable[[Tensor, dict[str, Any]], Any],
        update: Update,
        optimizer: Optimizer,
        *,
        accumulates: bool,
        backend: str,
        names: Sequence[str] | None = None,
        batch_size: int | None = None,
        on_compiled: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._eager, self._losses_of, self._logs_of = eager, losses_of, logs_of
        self._update, self._optimizer, self._backend = update, optimizer, backend
        self._adds, self._mean = accumulates, update.mean if accumulates else None
        self._on_compiled = on_compiled
        self._finish: Callable[[], object] | None = None  # without a program
        self._names, self._batch_size = names, batch_size
        self._programs: Programs | None = None  # of the latest batch
        self._others: list[Programs] = []
        self.is_refused = self.has_stepped = self._is_warned = False
        self._misfits = self._num_captures = 0
        refusal = _refusal_of_run(update, accumulates)
        if refusal is not None:
            self._refuse(refusal)

    def use_in(self, step: Step, refusal: str | None) -> None:
        """Let ``step`` train with programs, unless there is a reason against it."""
        if refusal is not None:
            self._refuse(refusal)
        if not self.is_refused:
            self._finish, step.train, step.finish = step.finish, self, self.finish

    def finish(self) -> None:
        """Update the weights, unless a program has."""
        if not self.has_stepped and self._finish is not None:
            self._finish()

    def __call__(self, model: Any, batch: Any) -> Any:
        """One micro-batch, and the update at the end of its window."""
        is_last, programs = self._update.is_window_end, self._programs
        inputs = None if programs is None else programs.inputs_of(batch)
        if inputs is None:
            programs, inputs = self._find(batch)
        else:
            self._misfits = 0
        results = None
        if programs is not None and inputs is not None:
            results = programs.run(batch, inputs, self._mean, is_last=is_last)
        if programs is None or results is None:
            self.has_stepped = False
            for one in self._others if is_last else ():
                one.release_sums()
            return self._eager(model, batch)
        self.has_stepped = programs.steps
        loss, outputs, others = results
        if self._update.count_batch is not None:
            self._update.count_batch(loss, batch)
        if not self.has_stepped and self._update.record_loss is not None:
            self._update.record_loss(loss)
        if others and has_event_storage():  # not in a user's own loop
            for name, value in others.items():
                get_event_storage().put_scalar(name, value)
        return self._logs_of(loss, outputs)

    def _find(self, batch: Any) -> tuple[Programs | None, Inputs | None]:
        """Other programs than the latest that apply to this batch, perhaps new ones, and their inputs."""
        if self.is_refused:
            return None, None
        if self._programs is not None and not self._programs.fit(batch):
            self._count_misfit()
            return None, None
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

    def _find_after_compiling(self, batch: Any) -> tuple[Programs | None, Inputs | None]:
        if self._batch_size and num_rows(batch) not in (None, self._batch_size):
            return None, None
        try:
            programs = self._compile_for(batch)
            inputs = programs.inputs_of(batch)
            if inputs is None:
                raise NotCapturable("the inputs of the forward pass change at each read")
        except NotReady:
            return None, None
        except Exception as error:  # of torch's compiler: any type of error is possible
            self._refuse(reason(error))
            return None, None
        self._programs = programs
        return programs, inputs

    def _compile_for(self, batch: Any) -> Programs:
        if self._num_captures >= _MOST_CAPTURES:
            raise NotCapturable(f"what a step depends on, in model or optimizer, has changed {_MOST_CAPTURES} times")
        start, optimizer = time.perf_counter(), self._optimizer
        try:
            with activity("compile"), _preserved_rng():
                why = refusal_of_compiler() or _refusal_of_torch() or refusal(optimizer)
                if why is not None:
                    raise NotCapturable(why)
                why_outside = reason_outside(optimizer)
                is_weighed = self._mean is None or self._mean.counter.is_decided
                if not is_weighed or (why_outside is None and not has_state(optimizer)):
                    raise NotReady
                self._backend = _usable_backend(self._backend, optimizer.param_groups[0]["params"][0].device)
                structure, parts = structure_of(batch, self._names), self._parts(steps=why_outside is None)
                programs = Programs(self._losses_of, structure, batch, optimizer, parts, self._backend)
        finally:
            seconds = time.perf_counter() - start
            self._on_compiled(seconds)
        self._num_captures += 1
        self._others.append(programs)
        self._log(programs, seconds, why_outside)
        return programs

    def _parts(self, *, steps: bool) -> list[Part]:
        """What the programs compute: of the last micro-batch of a window, and of the others if that differs."""
        adds, update = self._adds, self._update
        if not steps:
            return [Part(adds=adds, steps=False)]
        last = Part(adds=adds, steps=True, skips=update.skips, max_norm=update.max_norm, max_value=update.max_value)
        return [last, Part(adds=True, steps=False)] if adds else [last]

    def _log(self, programs: Programs, seconds: float, why_outside: str | None) -> None:
        is_kept = all(program.is_from_disk for program in programs.made)
        operations = " and ".join(str(program.num_operations) for program in programs.made)
        step = f"the step of {' and '.join(type(one).__name__ for one in each_optimizer(self._optimizer))}"
        what = "forward and backward"
        if programs.steps:
            update = self._update
            clipping = ", clipping" if gradient_clipper(self._optimizer, update.max_norm, update.max_value) else ""
            what = f"forward, backward{clipping} and {step}"
        logger.info(
            "Graph mode: %s are one program (%s operations, no graph break), %s in %.1f s.%s", what, operations,
            "loaded from disk" if is_kept else f"compiled by {self._backend}", seconds,
            "" if programs.steps else f" It is followed by {step}, which {why_outside}.",
        )  # fmt: skip

    def _refuse(self, why: str) -> None:
        """Continue the run without programs, and log why."""
        if not self.is_refused:
            logger.warning("Graph mode: the steps stay eager: %s.", why)
        self._programs, self._others, self.is_refused = None, [], True


def copied_scalars(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the scalars: an output may be a parameter, which the update changes."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in scalars_of(outputs).items()}


def batch_size_of(loader: Any) -> int | None:
    """The number of samples of a full batch of the loader; None if it is unknown."""
    for holder in (getattr(loader, "batch_sampler", None), loader):
        for name in ("micro_batch_size", "batch_size"):
            size = getattr(holder, name, None)
            if isinstance(size, int):
                return size
    return None


def refusal_of_overrides(own: Sequence[str], name: str) -> str | None:
    """The reason that a class of this name has its ``own`` methods, which a program would not call; None if none."""
    return f"{name} has its own {' and '.join(own)}" if own else None


def _refusal_of_run(update: Update, accumulates: bool) -> str | None:
    """The reason that no step of this run can be a program; None if there is none."""
    if get_world_size() > 1:
        return "several processes exchange gradients while the backward pass runs"
    if update.grad_scaler is not None:
        return "the gradient scaler of float16 decides on the host whether to step"
    if accumulates and update.skips:
        return "non_finite='skip' over several micro-batches keeps the values to restore outside of programs"
    return None


def _refusal_of_torch() -> str | None:
    """Why this release of torch cannot compile programs; None if it can."""
    why = dynamo.fault() or traced_step.fault()
    return None if why is None else f"torch {torch.__version__} is not as expected ({why})"


def _usable_backend(backend: str, device: torch.device) -> str:
    """``backend``, or "aot_eager" in place of inductor on a CPU without a C++ compiler."""
    if backend != "inductor" or device.type != "cpu" or any(map(shutil.which, cpp_compilers())):
        return backend
    logger.info("Graph mode: no C++ compiler found for inductor; using the backend aot_eager.")
    return "aot_eager"


@contextmanager
def _preserved_rng() -> Iterator[None]:
    """A run that compiles draws the same random numbers as one that does not."""
    state = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(state)

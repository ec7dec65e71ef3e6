"""The cost of a deep model from the costs of shorter ones: each of its repeated blocks needs the same.

A run of equal blocks (the layers of a transformer) is cut to a few of them. The memory at every point of a step is
linear in the number of blocks, so that two lengths give that of any other; a third one is compared.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from trainwright.data.batch import tensors
from trainwright.inspect.simulation.blocks import KEPT, Run, containers_of, layers_of, remove, runs_of
from trainwright.inspect.simulation.step_cost import Phase, TensorBytes, Trace
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.pipeline_cut import Stage
from trainwright.parallel.simulated import simulated, simulation

TOLERANCE = 1e-2  # of the result, for what a third length differs by


class UnequalBlocksError(Exception):
    """Blocks that look alike need different amounts."""


class Depths:
    """Shortens the runs of a model, and marks in which of their blocks a step is.

    Args:
        extra: units that a run keeps beyond ``KEPT``, in the order of the runs.
        runs: to be filled with the complete runs, by the name of their first block.
    """

    def __init__(self, counted: TensorBytes, extra: Sequence[int], runs: dict[str, Run]) -> None:
        self._counted, self._extra, self.runs = counted, extra, runs
        self._blocks: list[list[nn.Module]] = []

    def shorten(self, model: nn.Module) -> None:
        """Remove blocks, in place."""
        for name, container in [*containers_of(model, model)]:
            for run in reversed(runs_of(container, model)):  # the last first: positions stay
                self._remove(run, f"{name}.{run.first}".lstrip("."), container, None)

    def shorten_stage(self, stage: Stage) -> None:
        """Replace blocks of a pipeline stage by placeholders that return their input."""
        name = layers_of(stage)
        container: Any = stage.model.get_submodule(name)
        for run in runs_of(container, stage.model):
            self._remove(run, f"{name}.{run.first}", container, stage)

    def _remove(self, run: Run, name: str, container: Any, stage: Stage | None) -> None:
        number = len(self.runs)
        kept = KEPT + (self._extra[number] if number < len(self._extra) else 0)
        blocks = [*container][run.first :][: kept * run.period]
        end = run.first + run.units * run.period
        remove(container, range(run.first + len(blocks), end), stage)
        self.runs[name] = run
        self._blocks.append(blocks)
        for i, block in enumerate(blocks):
            self._mark(block, _place(i, len(blocks), run.period), number)

    def _mark(self, block: nn.Module, place: int | None, number: int) -> None:
        counted = self._counted
        forward, after, backward = (None if place is None else (kind, number, place) for kind in _KINDS)

        # Functions, as a copy of the model shares them.
        def before_forward(*_: Any) -> None:
            counted.mark(forward)

        def after_forward(_: nn.Module, __: Any, output: Any) -> None:
            counted.mark(after)
            first = next((one for one in tensors(output) if one.requires_grad), None)
            if first is not None:
                first.register_hook(before_backward)  # type: ignore[no-untyped-call]

        def before_backward(_: Tensor) -> None:
            counted.mark(backward)

        block.register_forward_pre_hook(before_forward)
        block.register_forward_hook(after_forward)

    def check_alike(self) -> None:
        """Raise if blocks of a run were made different after they were counted, as by freezing some of them."""
        for run, blocks in zip(self.runs.values(), self._blocks, strict=True):
            trained = [[parameter.requires_grad for parameter in block.parameters()] for block in blocks]
            if trained[run.period :] != trained[: -run.period]:
                raise UnequalBlocksError


@contextmanager
def shortened(counted: TensorBytes, extra: Sequence[int], runs: dict[str, Run]) -> Iterator[Depths]:
    """A context in which models are shortened before they are spread over the processes."""
    depths = Depths(counted, extra, runs)
    active = simulation()
    assert active is not None, "tensors are counted in a simulation"

    def shorten(model: nn.Module) -> None:
        mesh = current_mesh()
        if mesh is None or mesh.layout.pipeline == 1:
            depths.shorten(model)

    with simulated(replace(active, before_spread=shorten, after_cut=depths.shorten_stage)):
        yield depths


_KINDS = ("forward", "after", "backward")


def extrapolated(runs: Sequence[Run], trace: Callable[[Sequence[int]], Trace], base: Trace) -> Trace:
    """The trace of a model with complete ``runs``.

    Args:
        trace: of the model whose runs have that many extra units.
        base: the trace without extra units.

    Raises:
        UnequalBlocksError: the cost is not linear in the number of units.
    """
    one_more = [trace([int(i == number) for i in range(len(runs))]) for number in range(len(runs))]
    shorter = trace([-1] * len(runs))
    expected = _sum(base, one_more, [-1] * len(runs))
    found = _sum(base, one_more, [run.units - KEPT for run in runs])
    total = found.cost()
    traffic = {kind: (expected.traffic.get(kind, 0), size) for kind, size in shorter.traffic.items()}
    pairs = [(*both, total.traffic.get(kind, 0)) for kind, both in traffic.items()]
    shared = expected.phases.keys() & shorter.phases.keys()  # the highest phase of few blocks may be another one
    pairs += [(max(expected.phases[key].sizes), max(shorter.phases[key].sizes), total.peak) for key in shared]
    growth = max(run.units for run in runs) ** 2 / 2  # of a difference that is quadratic in the number of units
    if any(abs(one - other) * growth > TOLERANCE * size for one, other, size in pairs):
        raise UnequalBlocksError
    return found


def _sum(base: Trace, one_more: Sequence[Trace], times: Sequence[int]) -> Trace:
    """``base`` with so many units more of each run."""
    traces = [base, *one_more]
    keys = [trace.phases.keys() - {None} for trace in traces]
    if any(other != keys[0] for other in keys):
        raise UnequalBlocksError

    def extended(values: Iterable[int]) -> int:
        first, *others = values
        return first + sum(n * (other - first) for n, other in zip(times, others, strict=True))

    def extended_phase(phases: Sequence[Phase]) -> Phase:
        sizes = [phase.sizes for phase in phases]
        if len({len(one) for one in sizes}) > 1:  # there is an operation for each block
            sizes = [[max(one)] for one in sizes]
        parts = {part: extended(phase.parts[part] for phase in phases) for part in phases[0].parts}
        return Phase([extended(values) for values in zip(*sizes, strict=True)], parts)

    phases = {key: extended_phase([trace.phases[key] for trace in traces]) for key in keys[0]}
    traffic = {kind: extended(trace.traffic.get(kind, 0) for trace in traces) for kind in base.traffic}
    return Trace(phases, traffic, extended(trace.trainable for trace in traces))


def _place(i: int, number: int, period: int) -> int | None:
    """The position of a block from the nearer end of its run; None: between those that every length has."""
    if i < 2 * period:
        return i
    return i - number if i >= number - 2 * period else None

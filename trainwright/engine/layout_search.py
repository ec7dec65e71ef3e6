"""Which layouts of a number of processes fit into a given memory."""

import copy
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from trainwright.config.errors import UserError
from trainwright.config.schema.sections import complete
from trainwright.engine.estimation import Estimate, estimate
from trainwright.parallel.layout import Layout
from trainwright.parallel.step_cost import StepCost

MACHINE = 8  # processes of a machine: those that exchange most, as tensor-parallel ones in each layer, belong on one


@dataclass(frozen=True)
class Candidate:
    """A layout that was examined.

    Attributes:
        estimate: None if it was not needed: the model's states alone need more memory, or the layout is impossible.
        state_bytes: the parameters, gradients and optimizer state of a process, if they were divided evenly.
        fault: why the layout is impossible for this model or configuration.
    """

    layout: Layout
    state_bytes: int
    estimate: Estimate | None = None
    fault: str = ""

    def fits(self, memory: int) -> bool:
        """Whether the tensors of each process fit into ``memory`` bytes."""
        return self.estimate is not None and self.estimate.peak <= memory


def fitting_layouts(
    build: Callable[[Any], Any], config: Any, *, world_size: int, memory: int, wanted: int = 3
) -> list[Candidate]:
    """Examine layouts until ``wanted`` of them fit; those that fit first, best first.

    The best layout has the fewest pipeline stages, which wait for each other, then the fewest tensor-parallel
    processes, which exchange activations in each layer, then the lowest ZeRO stage. Of one stage, copies of the model
    that are each on one machine come before one copy on all; sequence parallelism comes after the same without it.

    Args:
        build, config: as for :func:`~trainwright.engine.estimation.estimate`.
        memory: bytes of each process.
    """
    whole = estimate(build, config).costs[0]
    examined: list[Candidate] = []
    for layout in layouts_of(world_size):
        examined.append(_examine(build, config, layout, _state_bytes(whole, layout), memory))
        if sum(candidate.fits(memory) for candidate in examined) == wanted:
            break
    return sorted(examined, key=lambda candidate: not candidate.fits(memory))


def layouts_of(world_size: int) -> Iterator[Layout]:
    """The layouts of ``world_size`` processes, best first.

    >>> [str(layout) for layout in layouts_of(2)]  # doctest: +NORMALIZE_WHITESPACE
    ['2 data', '2 data (ZeRO 1)', '2 data (ZeRO 2)', '2 data (ZeRO 3)',
     '1 data x 2 tensor', '1 data x 2 tensor (sequence parallel)', '1 data x 2 pipeline']
    """
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for pipeline in divisors:
        for tensor in divisors:
            data, rest = divmod(world_size, pipeline * tensor)
            if rest or tensor > MACHINE:
                continue
            for stage in range(4 if data > 1 else 1):
                for replicate in _copies(data, MACHINE // tensor) if stage else [data]:
                    for sequence in (False, True) if tensor > 1 else (False,):
                        yield Layout(data, tensor, pipeline, replicate, stage, sequence)


def _copies(data: int, at_most: int) -> list[int]:
    """Numbers of copies of the model: with up to ``at_most`` ranks for each copy, and one copy for all."""
    shard = max(size for size in range(1, data + 1) if data % size == 0 and size <= at_most)
    return [data // shard, 1] if 1 < shard < data else [1]


def with_layout(config: Any, layout: Layout) -> Any:
    """A copy of a configuration of either API with the sizes of ``layout``."""
    sizes = {
        "data_parallel_size": layout.data,
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "replicate_size": layout.replicate if layout.zero_stage and layout.replicate > 1 else None,
        "sequence_parallel": layout.sequence_parallel,
    }
    if not isinstance(config, Mapping | DictConfig):
        return config.copy_with(**sizes, zero_stage=layout.zero_stage)
    cfg = complete(copy.deepcopy(config))
    if layout.pipeline != cfg.train.dist.pipeline_parallel_size:
        cfg.train.dist.custom_pipeline_stage_id = None
    cfg.train.dist.update(sizes)
    cfg.train.zero_optimization.update({"enabled": layout.zero_stage > 0, "stage": layout.zero_stage or 1})
    return cfg


def _examine(build: Callable[[Any], Any], config: Any, layout: Layout, state_bytes: int, memory: int) -> Candidate:
    candidate = Candidate(layout, state_bytes)
    if state_bytes > memory:
        return candidate
    try:
        found = estimate(build, with_layout(config, layout), world_size=layout.world_size)
    except (UserError, RuntimeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        return replace(candidate, fault=textwrap.shorten(text, 80, placeholder=" ..."))
    return replace(candidate, estimate=found)


def _state_bytes(whole: StepCost, layout: Layout) -> int:
    parts = layout.tensor * layout.pipeline
    shards = [layout.shard if layout.zero_stage >= first else 1 for first in (3, 1, 1)]
    sizes = (whole.parameters, whole.trainable, whole.optimizer)
    return sum(size // (parts * shard) for size, shard in zip(sizes, shards, strict=True))

"""Estimates: memory and traffic of a run on any number of processes, without these processes and without the memory.

The trainer itself is built, as one of the processes of the run, and makes its own steps, on tensors without data.
"""

import copy
import gc
import logging
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from trainwright._torch_compat.probing import real_tensors
from trainwright.base.dist import get_tensor_parallel_size, use_mesh
from trainwright.base.errors import ConfigError, UserError
from trainwright.config.config_file.sections import complete
from trainwright.engine.logs import logging_only_above
from trainwright.engine.run import Run
from trainwright.events.storage import EventStorage
from trainwright.inspect.simulation.process import simulated_process
from trainwright.inspect.simulation.step_cost import StepCost, TensorBytes, counting, measure
from trainwright.optim.named import each_optimizer
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import current_mesh
from trainwright.trainer.trainer import Trainer


@dataclass(frozen=True)
class Estimate:
    """What one update needs on the processes of a layout.

    Attributes:
        layout: of the processes.
        costs: by rank. All ranks of a pipeline stage need the same; of several stages, those of the first and last.
    """

    layout: Layout
    costs: dict[int, StepCost]

    @property
    def peak(self) -> int:
        """The most bytes of tensors that exist at once, on the process that needs most."""
        return max(cost.peak for cost in self.costs.values())

    @property
    def traffic(self) -> int:
        """The size of the tensors that a process exchanges, on the process that exchanges most."""
        return max(sum(cost.traffic.values()) for cost in self.costs.values())


def estimate(build: Callable[[Any], Any], config: Any, *, world_size: int = 1, rank: int | None = None) -> Estimate:
    """Estimate the memory and the traffic of one update on each of ``world_size`` processes.

    ``build(config)`` returns the trainer of a configuration: ``DefaultTrainer``, a subclass of it, or a function that
    calls ``Trainer(model, config, ...)`` and also builds the model, which then takes no memory. Data sets and loaders
    that the function needs must exist before. One batch is read. It is called once for each rank.

    Tensors are counted as on a CPU. What is not counted: memory inside of kernels, the allocator's unused parts and
    the contexts of CUDA and NCCL. Graph mode is estimated as eager mode. Nothing is written to the output folder.

    ``config`` is of either API; its layout is that of the estimate. The process is ``rank``; by default the first one,
    and of several pipeline stages also the last one.

    Raises:
        ConfigError: the configuration cannot run, a step reads the value of a tensor, or there is no such rank.

    >>> estimate(DefaultTrainer, cfg, world_size=64).peak  # doctest: +SKIP
    1610612736
    """
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(
            f"estimate: got rank={rank} with world_size={world_size}; it must be from 0 to {world_size - 1}."
        )
    layout, cost = _cost_of(build, config, rank or 0, world_size)
    costs = {rank or 0: cost}
    if layout.pipeline > 1 and rank is None:
        costs[world_size - 1] = _cost_of(build, config, world_size - 1, world_size)[1]
    return Estimate(layout, costs)


def _cost_of(build: Callable[[Any], Any], config: Any, rank: int, world_size: int) -> tuple[Layout, StepCost]:
    with (
        logging_only_above(logging.WARNING),
        simulated_process(rank, world_size),
        tempfile.TemporaryDirectory() as folder,
        counting() as counted,
    ):
        gc.freeze()  # keeps objects that exist out of the many collections of a trace
        try:
            trainer = build(_for_estimate(config, folder))
            mesh = current_mesh()
            layout = Layout(data=world_size, replicate=world_size) if mesh is None else mesh.layout
            start = counted.peak
            return layout, replace(_measure_step(trainer.run, counted), start=start)
        finally:
            gc.unfreeze()
            use_mesh(None)


def _for_estimate(config: Any, folder: str) -> Any:
    """A copy of the configuration that reads and writes no run, on a CPU."""
    if not isinstance(config, Mapping | DictConfig):
        changes = {"output_dir": folder, "device_str": "cpu", "resume_from_checkpoint": None, "graph": False}
        changes |= {"init_weights_from": None, "eval_on_start": False, "profile": None, "non_finite": "stop"}
        return config.copy_with(**changes)
    cfg = complete(config)
    cfg.train.update({"output_dir": folder, "resume": False, "load_weight": "", "eval_on_start": False})
    cfg.train.update({"profile": None, "input_placement_device": "cpu", "non_finite": "stop"})
    cfg.train.dist.device_type = "cpu"
    cfg.graph.enabled = False
    return cfg


def _measure_step(run: Run, counted: TensorBytes) -> StepCost:
    trainer = run.trainer
    with real_tensors():
        batches = run.batches.first(1)
    run.batches.repeat(batches)
    with EventStorage(0) as trainer.storage, ExitStack() as stack:
        if get_tensor_parallel_size() > 1:  # as the hook `TensorParallel` in a training
            from torch.distributed.tensor.parallel import loss_parallel

            stack.enter_context(loss_parallel())
        for hook in run.hooks:
            hook.before_estimate()
        run_step = trainer.prepare_steps()

        def step() -> None:
            trainer.iter = trainer.storage.iter = 0  # each is the first of an epoch, with a complete window
            if isinstance(trainer, Trainer):
                trainer.state.global_step = 0
            run_step()

        mesh = current_mesh()
        offloads = mesh is not None and mesh.layout.offload
        return measure(step, run.model, each_optimizer(run.optimizer), counted, offloads=offloads)


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
        build, config: as for :func:`~trainwright.inspect.estimate.estimate`.
        memory: bytes of each process.
    """
    whole = estimate(build, config).costs[0]
    examined: list[Candidate] = []
    for layout in layouts_of(world_size):
        candidate = Candidate(layout, _state_bytes(whole, layout))
        if candidate.state_bytes <= memory:
            try:
                found = estimate(build, with_layout(config, layout), world_size=world_size)
                candidate = replace(candidate, estimate=found)
            except (UserError, RuntimeError, ValueError) as error:
                text = str(error).partition("\n")[0]
                candidate = replace(candidate, fault=textwrap.shorten(text, 80, placeholder=" ..."))
        examined.append(candidate)
        if sum(one.fits(memory) for one in examined) == wanted:
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
        "context_parallel_size": layout.context,
        "expert_parallel_size": layout.expert,
        "replicate_size": layout.replicate if layout.zero_stage and layout.replicate > 1 else None,
        "sequence_parallel": layout.sequence_parallel,
    }
    if not isinstance(config, Mapping | DictConfig):
        stages = config.custom_pipeline_stage_id if layout.pipeline == config.pipeline_parallel_size else None
        return config.copy_with(**sizes, zero_stage=layout.zero_stage, custom_pipeline_stage_id=stages)
    cfg = complete(copy.deepcopy(config))
    if layout.pipeline != cfg.train.dist.pipeline_parallel_size:
        cfg.train.dist.custom_pipeline_stage_id = None
    cfg.train.dist.update(sizes)
    cfg.train.zero_optimization.update({"enabled": layout.zero_stage > 0, "stage": layout.zero_stage or 1})
    return cfg


def _state_bytes(whole: StepCost, layout: Layout) -> int:
    parts = layout.tensor * layout.pipeline
    shards = [layout.shard if layout.zero_stage >= first else 1 for first in (3, 1, 1)]
    sizes = (whole.parameters, whole.trainable, whole.optimizer)
    return sum(size // (parts * shard) for size, shard in zip(sizes, shards, strict=True))

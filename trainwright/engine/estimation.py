"""Estimates: memory and traffic of a run on any number of processes, without these processes and without the memory.

The trainer itself is built, as one of the processes of the run, and makes its own steps, on tensors without data.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from trainwright._torch_compat.probing import real_tensors
from trainwright.config.schema.sections import complete
from trainwright.data.batch_loader import BatchLoader
from trainwright.engine.own_step import OwnStep
from trainwright.engine.trainer.trainer import Trainer
from trainwright.events.storage import EventStorage
from trainwright.optim.named import each_optimizer
from trainwright.parallel.dist import use_mesh
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.step_cost import StepCost, TensorBytes, counted_process, measure


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
    that the function needs must exist before. One batch is read.

    Tensors are counted as on a CPU. What is not counted: memory inside of kernels, the allocator's unused parts and
    the contexts of CUDA and NCCL. Graph mode is estimated as eager mode. Nothing is written to the output folder.

    Args:
        config: of either API; its layout is that of the estimate.
        rank: of the process; by default the first one, and of several pipeline stages also the last one.

    Raises:
        ConfigError: the configuration cannot run, or a step reads the value of a tensor.

    >>> estimate(DefaultTrainer, cfg, world_size=64).peak  # doctest: +SKIP
    1610612736
    """
    first = _measured(build, config, rank or 0, world_size)
    costs, layout = {rank or 0: first[0]}, first[1]
    if rank is None and layout.pipeline > 1:
        costs[world_size - 1] = _measured(build, config, world_size - 1, world_size)[0]
    return Estimate(layout, costs)


def _measured(build: Callable[[Any], Any], config: Any, rank: int, world_size: int) -> tuple[StepCost, Layout]:
    with _quiet(), tempfile.TemporaryDirectory() as folder, counted_process(rank, world_size) as counted:
        try:
            trainer = build(_for_estimate(config, folder))
            mesh = current_mesh()
            layout = Layout(data=world_size, replicate=world_size) if mesh is None else mesh.layout
            return _measure_trainer(trainer, counted), layout
        finally:
            use_mesh(None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of a run that is not made."""
    library, disabled = logging.getLogger("trainwright"), logging.root.manager.disable
    handlers, level = library.handlers[:], library.level
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        library.handlers = handlers
        library.setLevel(level)


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


def _measure_trainer(trainer: Any, counted: TensorBytes) -> StepCost:
    loader = trainer._loader
    with real_tensors():
        batch = next(iter(loader))
        if isinstance(loader, BatchLoader):
            loader.close()
    trainer._train_on([batch])
    if getattr(trainer, "_train_metrics", None) is not None:
        trainer._train_metrics.is_on = False  # they read values, after the peak
    with EventStorage(0) as trainer.storage:
        for hook in trainer._hooks:
            if isinstance(hook, OwnStep):  # a step of the user's own
                hook.before_train()
        trainer._before_first_step()
        _, run_step = trainer._bind_run_step()

        def step() -> None:
            trainer.iter = trainer.storage.iter = 0  # each is the first of an epoch, with a complete window
            if isinstance(trainer, Trainer):
                trainer.state.global_step = 0
            run_step()

        return measure(step, trainer.model, each_optimizer(trainer.optimizer), counted)

"""Graph mode of config files: a complete update as one compiled program."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.base.errors import ConfigError
from trainwright.config_trainer.eager_trainer import EagerTrainer
from trainwright.engine.loss_fn import sum_losses
from trainwright.engine.step import Step
from trainwright.graph.compile_graph import check_backend
from trainwright.graph.step import CompiledStep, batch_size_of, copied_scalars, refusal_of_overrides
from trainwright.hooks.method_overrides import is_overridden, overridable
from trainwright.models.outputs import returned_losses


class GraphBase(nn.Module):
    """A model and its optimizer, whose steps become programs of ``backend``.

    ``backend`` is a backend of ``torch.compile``: "inductor" (fast code; needs a C++ compiler on the CPU,
    without one it is "aot_eager"), "aot_eager" (single operations, no compiler). Dropout draws the same numbers as
    without a graph. Calling it calls the model; its state dict is the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        backend: str = "inductor",
    ) -> None:
        super().__init__()
        check_backend(backend, "graph.backend")
        self.model = model
        self.optimizer = optimizer
        self.backend = backend

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


@overridable
class GraphTrainer(EagerTrainer):
    """Steps as programs: forward, backward, clipping and optimizer in one call.

    ``graph.model`` is the model, ``graph.optimizer`` its optimizer; ``settings`` are those of :class:`EagerTrainer`.
    The first update and shorter batches are eager. If a step cannot be a program, all steps are eager, and a warning
    gives the reason.
    """

    def __init__(
        self, graph: GraphBase, data_loader: Any, grad_acc_steps: int | Mapping[int, int] = 1, **settings: Any
    ) -> None:
        if graph.optimizer is None:
            raise ConfigError("GraphTrainer: the graph has no optimizer; build it with GraphBase(model, optimizer).")
        self.graph = graph
        super().__init__(graph, data_loader, graph.optimizer, grad_acc_steps, **settings)
        self._compiled = CompiledStep(
            self.train_micro_batch,
            self._losses_of,
            self._logs_of,
            self.steps.update,
            graph.optimizer,
            accumulates=self.windows.largest > 1,
            backend=graph.backend,
            batch_size=batch_size_of(data_loader),
            on_compiled=lambda seconds: self.phases.count_compile(seconds),
        )

    def new_step(
        self, get_batch: Any = None, device: Any = None, train_step: Any = None, *, reads_ahead: bool = False
    ) -> Step:
        step = super().new_step(get_batch, device, train_step, reads_ahead=reads_ahead)
        called = [name for name in ("train_micro_batch", "backward", "update") if is_overridden(self, name)]
        own = refusal_of_overrides(called, type(self).__name__)
        self._compiled.use_in(step, own if train_step is None else "the trainer has its own train_step")
        return step

    @property
    def _called_model(self) -> nn.Module:
        return self.graph.model

    def _logs_of(self, loss: Tensor, outputs: dict[str, Any]) -> Mapping[str, Any]:
        self.steps.metrics.loss, self.steps.metrics.scalars = loss, outputs
        return outputs

    def _losses_of(self, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """The outputs of a program: the loss, and the logged scalars."""
        outputs = returned_losses(self.graph.model(**batch))
        return sum_losses(outputs), copied_scalars(outputs)

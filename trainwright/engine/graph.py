"""Graph mode: the model as one compiled program.

Here forward and backward are compiled and the update is eager. The place where the whole step becomes one program is
:class:`GraphTrainer`; nothing outside this file would change.
"""

import logging
from typing import Any

import torch
from torch import nn

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.engine.steps import EagerTrainer
from trainwright.parallel.data_parallel import unwrap_model

logger = logging.getLogger("trainwright.engine")


class GraphBase(nn.Module):
    """A model and its compiled call.

    ``backend`` is a name that ``torch.compile`` knows: "inductor" (fast code; needs a C++ compiler on the CPU),
    "aot_eager" (traced forward and backward, no compiler). Dropout draws the same numbers as without a graph.
    The state dict is the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        backend: str = "inductor",
    ) -> None:
        super().__init__()
        known = [*torch.compiler.list_backends(exclude_tags=()), "eager", "aot_eager"]
        if backend not in known:
            raise ConfigError(f"graph.backend: got {backend!r}. {did_you_mean(backend, known)}")
        self.model = model
        self.optimizer = optimizer
        # Inductor has random numbers of its own; the fallback draws torch's, so that eager and graph agree.
        options: dict[str, Any] | None = {"fallback_random": True} if backend == "inductor" else None
        self._call = torch.compile(model, backend=backend, options=options)

    def forward(self, **batch: Any) -> Any:
        return self._call(**batch)


class GraphTrainer(EagerTrainer):
    """Steps of a compiled model. ``graph.model`` is the model, ``graph.optimizer`` its optimizer."""

    def __init__(
        self,
        graph: GraphBase,
        data_loader: Any,
        grad_acc_steps: int = 1,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        skip_non_finite: bool = False,
    ) -> None:
        if graph.optimizer is None:
            raise ConfigError("GraphTrainer: the graph has no optimizer; make it with GraphBase(model, optimizer).")
        settings: dict[str, Any] = {"grad_scaler": grad_scaler, "skip_non_finite": skip_non_finite}
        super().__init__(graph, data_loader, graph.optimizer, grad_acc_steps, **settings)
        self.graph = graph

    @property
    def _plain_model(self) -> nn.Module:
        return unwrap_model(self.graph.model)

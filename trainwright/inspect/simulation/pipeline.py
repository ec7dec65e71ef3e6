"""Pipeline stages of a simulated process, without the processes of the other stages."""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.inspect.simulation.process import static_pipeline
from trainwright.parallel.pipeline import Pipeline
from trainwright.parallel.pipeline_cut import cut_model


class SimulatedPipeline(Pipeline):
    """A pipeline that learns the shapes of hidden states from a copy of the complete model."""

    def __init__(self, stack: ExitStack, model: nn.Module, *arguments: Any) -> None:
        """``stack``: of contexts that last as long as the simulation."""
        stack.enter_context(static_pipeline())
        self._complete: nn.Module | None = copy.deepcopy(model)  # until it is probed
        super().__init__(model, *arguments)

    def _build_agreement(self) -> Callable[..., list[bool]]:
        return lambda *values: [*values]

    def _compare(self, batches: Sequence[Any]) -> None:
        """Tensors have no values."""

    @torch.no_grad()
    def _probe(self, batch: Any) -> list[tuple[Tensor | None, Any]]:
        """What each stage of this process receives and returns, by running all stages."""
        number, complete = self._number, self._complete
        self._complete = None
        layout = replace(self._mesh.layout, pipeline=number)
        assert complete is not None, "an estimate reads one batch"
        stages, *_ = cut_model(complete, number, range(number), layout.stage_ids)
        has_autocast = hasattr(vars(self.stages[0]).get("forward"), "runs_under_autocast")
        own = {stage.index for stage in self.stages}
        hidden: Any = None
        found: list[tuple[Tensor | None, Any]] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            for stage in stages:
                stage.eval().begin([batch])
                before, hidden = hidden, stage(hidden)
                if stage.index in own:
                    found.append((before, hidden))
        return found

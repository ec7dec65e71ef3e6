"""Pipeline stages of a simulated process, without the processes of the other stages."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from trainwright._torch_compat.simulation import static_pipeline
from trainwright.parallel import pipeline, pipeline_cut
from trainwright.parallel.blocks import keep_different
from trainwright.parallel.pipeline import Pipeline


@contextmanager
def simulated_stages() -> Iterator[None]:
    """A context in which a pipeline learns the shapes of hidden states from a copy of the complete model."""
    build, stack = Pipeline.__init__, ExitStack()

    def keep_copy(self: Pipeline, model: nn.Module, *arguments: Any) -> None:
        stack.enter_context(static_pipeline())
        complete = copy.deepcopy(model)
        build(self, model, *arguments)
        vars(self)["_complete"] = complete

    with (
        stack,
        mock.patch.object(Pipeline, "__init__", keep_copy),
        mock.patch.object(Pipeline, "_probe", _probe),
        mock.patch.object(pipeline, "_agreement", return_value=_agreed),
        mock.patch.object(pipeline, "check_same_on_stages"),  # compares values
        mock.patch.object(pipeline_cut._OfTransformers, "check"),  # compares values
    ):
        yield


@torch.no_grad()
def _probe(self: Any, batch: Any) -> list[tuple[Tensor | None, Any]]:
    """What each stage of this process receives and returns, by running all stages."""
    number = self._number
    layout = replace(self._mesh.layout, pipeline=number)
    stages, *_ = pipeline_cut.cut_model(vars(self).pop("_complete"), number, range(number), layout.stage_ids)
    for stage in stages:
        keep_different(stage)  # blocks that are alike return the same shapes
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


def _agreed(*values: bool) -> list[bool]:
    return [*values]

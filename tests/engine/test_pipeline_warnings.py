"""Warnings about outputs and labels, which only the last stage of a pipeline sees, come to the console, once."""

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.engine.test_pipeline_step import samples
from tests.parallel.test_pipeline import build_gpt
from tests.ranks import on_ranks
from trainwright import Trainer, TrainingConfig
from trainwright.base.dist import get_rank


class Warns(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss = super().compute_loss(model, inputs)
        logging.getLogger("trainwright.mine").warning("about the loss of training")
        warnings.warn("a warning of Python about the loss", stacklevel=1)
        return loss

    def evaluation_step(self, inputs: Any) -> Any:
        logging.getLogger("trainwright.mine").warning("about an evaluation")
        return super().evaluation_step(inputs)


def console_of_a_run(folder: Path) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        config = TrainingConfig(
            output_dir=str(folder), batch_size=2, num_epochs=1, max_steps=2, save_enabled=False, device_str="cpu",
            evaluate_with_generate=False, progress_bar=False, tensorboard=None, pipeline_parallel_size=2,
        )  # fmt: skip
        Warns(build_gpt(), config, samples(8), samples(4)).train()
        logging.getLogger("trainwright.mine").warning("of all processes")
    return get_rank(), said.getvalue()


def test_the_last_stage_warns_on_the_console(tmp_path: Path) -> None:
    first, last = (said for _, said in sorted(on_ranks(console_of_a_run, tmp_path)))
    for text in ("about the loss of training", "about an evaluation", "a warning of Python about the loss"):
        assert text in last
        assert text not in first
    assert "rank 1: " in last
    assert "of all processes" in first
    assert "of all processes" not in last

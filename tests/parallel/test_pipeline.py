"""Pipelines compute what one process does: every schedule, tied weights, changing shapes, the norm of all stages."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import on_ranks
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig
from trainwright.optim.clip import clip_by_norm
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import use_layout
from trainwright.parallel.pipeline import Pipeline

VOCABULARY, LENGTH, STEPS = 32, 12, 6
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
CPU = torch.device("cpu")


def build_gpt(*, tied: bool = True, layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = GPTTextGenerationConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, hidden_dropout_prob=0.0
    )
    model = GPTTextGeneration(config)
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def windows(steps: int = STEPS, length: int = 4, size: int = 2) -> list[list[dict[str, Tensor]]]:
    """The micro-batches of each update."""
    generator = torch.Generator().manual_seed(1)
    return [
        [{"token_ids": torch.randint(VOCABULARY, (size, LENGTH), generator=generator)} for _ in range(length)]
        for _ in range(steps)
    ]


def loss_of(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), batch["token_ids"][:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_alone(
    model: nn.Module, data: list[list[dict[str, Tensor]]], norm_type: float = 2.0
) -> tuple[list[float], list[float]]:
    """Losses and norms of one process, in plain PyTorch."""
    optimizer, losses, norms = adamw(model), [], []
    for window in data:
        total = 0.0
        for batch in window:
            loss = loss_of(model(**batch), batch) / len(window)
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def train_stages(
    model: nn.Module, layout: Layout, data: list[list[dict[str, Tensor]]], norm_type: float = 2.0
) -> tuple[list[float], list[float]]:
    """The same by a pipeline; losses are known where the last stage is."""
    mesh = use_layout(layout, "cpu")
    assert mesh is not None
    pipeline = Pipeline(model, mesh, CPU)
    pipeline.mark_tied_copies()
    optimizer, losses, norms = adamw(model), [], []
    for window in data:
        parts = []

        def finish(outputs: Any, batch: Any, parts: list[float] = parts, count: int = len(window)) -> Tensor:
            loss = loss_of(outputs, batch) / count
            parts.append(loss.item())
            return loss

        pipeline.run(window, finish)
        pipeline.sum_tied_gradients()
        norms.append(clip_by_norm([*model.parameters()], 0.5, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts) if pipeline.is_last else -1)
    return losses, norms


def all_schedules() -> list[Any]:
    return [train_stages(build_gpt(), Layout(pipeline=2, schedule=name), windows()) for name in SCHEDULES]


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], list[float]]:
    return train_alone(build_gpt(), windows())


def test_every_schedule_computes_the_losses_and_norms_of_one_process(alone: tuple[list[float], list[float]]) -> None:
    ranks = on_ranks(all_schedules)
    for schedule, runs in zip(SCHEDULES, zip(*ranks, strict=True), strict=True):
        losses = next(losses for losses, _ in runs if losses[0] >= 0)
        assert losses == pytest.approx(alone[0], abs=1e-5), schedule
        for _, norms in runs:
            assert norms == pytest.approx(alone[1], abs=1e-5), schedule

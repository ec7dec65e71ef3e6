"""Pipelines compute what one process does: every schedule, tied weights, changing shapes, the norm of all stages."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import on_ranks
from trainwright.base.dist import TIED_COPY, get_rank
from trainwright.base.errors import ConfigError
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig
from trainwright.optim.clip import clip_by_norm
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import use_layout
from trainwright.parallel.pipeline import Pipeline, schedule_for
from trainwright.parallel.precision import make_grad_scaler

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
    if "loss" in outputs:
        return outputs["loss"]  # type: ignore[no-any-return]
    return F.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), batch["token_ids"][:, 1:].flatten())


def build_transformers(kind: str = "Llama", task: str = "CausalLM", **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8} | settings
    model: nn.Module = getattr(transformers, f"{kind}For{task}")(getattr(transformers, f"{kind}Config")(**sizes))
    return model


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
    pipeline.complete()
    optimizer, losses, norms = adamw(model), [], []
    for window in data:
        parts = []

        def finish(outputs: Any, batch: Any, parts: list[float] = parts, count: int = len(window)) -> Tensor:
            loss = loss_of(outputs, batch) / count
            parts.append(loss.item())
            return loss

        pipeline.run(window, finish)
        pipeline.tied.sum_gradients()
        norms.append(clip_by_norm([*model.parameters()], 0.5, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts) if pipeline.is_last else -1)
    return losses, norms


def all_schedules() -> list[Any]:
    return [train_stages(build_gpt(), Layout(pipeline=2, schedule=name), windows()) for name in SCHEDULES]


def same_as_alone(ranks: Any, data: Any, norm_type: float = 2.0, build: Any = build_gpt) -> None:
    """Losses where the last stage is, and norms everywhere, are those of one process."""
    losses, norms = train_alone(build(), data, norm_type)
    assert next(own for own, _ in ranks if own[0] >= 0) == pytest.approx(losses, abs=1e-5)
    for _, own in ranks:
        assert own == pytest.approx(norms, abs=1e-5)


def test_every_schedule_computes_the_losses_and_norms_of_one_process() -> None:
    for runs in zip(*on_ranks(all_schedules), strict=True):
        same_as_alone(runs, windows())


def of_transformers() -> list[Any]:
    return [train_stages(build_transformers(**settings), Layout(pipeline=2), by_other_name()) for settings in KINDS]


KINDS: tuple[dict[str, Any], ...] = (
    {"kind": "Llama", "tie_word_embeddings": True},
    {"kind": "Llama", "tie_word_embeddings": False},
    {"kind": "Qwen3", "tie_word_embeddings": True},
    {"kind": "Mixtral", "num_local_experts": 4, "output_router_logits": True},
)


def by_other_name() -> list[list[dict[str, Tensor]]]:
    """The names that models of transformers have for the fields of a batch."""
    return [[{"input_ids": batch["token_ids"], "labels": batch["token_ids"]} for batch in row] for row in windows()]


@pytest.mark.exhaustive
def test_models_of_transformers_train_in_stages() -> None:
    for settings, runs in zip(KINDS, zip(*on_ranks(of_transformers), strict=True), strict=True):
        same_as_alone(runs, by_other_name(), build=lambda settings=settings: build_transformers(**settings))


def ragged() -> list[list[dict[str, Tensor]]]:
    """Windows of other lengths, with batches of other shapes."""
    data = windows(5)
    data[1] = data[1][:1]  # fewer micro-batches than stages
    data[2] = [{"token_ids": batch["token_ids"][:, :9]} for batch in data[2]]
    data[3][1] = {"token_ids": data[3][1]["token_ids"][:, :7]}  # in the middle of a window
    data[4][-1] = {"token_ids": data[4][-1]["token_ids"][:1]}
    return data


def with_ragged_batches(norm_type: float) -> list[Any]:
    return [
        train_stages(build_gpt(), Layout(pipeline=2, schedule=name), ragged(), norm_type)
        for name in ("1F1B", "Interleaved1F1B")
    ]


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
@pytest.mark.exhaustive(every=4)
def test_batches_of_changing_shapes(norm_type: float) -> None:
    """torch's schedules hang, or compute with the wrong values, if a shape changes."""
    for runs in zip(*on_ranks(with_ragged_batches, norm_type), strict=True):
        same_as_alone(runs, ragged(), norm_type)


def infinite_gradients() -> tuple[bool, float]:
    """Whether weights have changed in an update with an infinite gradient on the last stage, and the scale after it."""
    mesh = use_layout(Layout(pipeline=2), "cpu")
    assert mesh is not None
    model = build_gpt()
    pipeline = Pipeline(model, mesh, CPU)
    scaler = make_grad_scaler(CPU)
    scaler.scale(torch.zeros(()))
    optimizer = adamw(model)
    (window,) = windows(1)
    pipeline.run(window, lambda outputs, batch: scaler.scale(loss_of(outputs, batch)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if pipeline.is_last:
        next(model.parameters()).grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    changed = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return changed, scaler.get_scale()


def test_all_stages_skip_an_update_with_infinite_gradients_on_one() -> None:
    """A scaler of torch's would step on the first stage, and scale differently from then on."""
    assert on_ranks(infinite_gradients) == [(False, 32768.0)] * 2


CHOICES = [
    *[("1F1B", 4, "1F1B"), ("1F1B", 3, "GPipe"), ("Interleaved1F1B", 10, "Interleaved1F1B")],
    *[("Interleaved1F1B", 9, "LoopedBFS"), ("ZBVZeroBubble", 1, "ZBVZeroBubble")],
]


@pytest.mark.parametrize(("schedule", "length", "used"), CHOICES)
def test_a_number_of_micro_batches_that_a_schedule_does_not_take(schedule: str, length: int, used: str) -> None:
    assert schedule_for(schedule, 4, length) == used


def cut_in_two() -> tuple[Pipeline, nn.Parameter, int]:
    """The pipeline of this process, its copy of the embedding that is also the head, and its rank."""
    mesh = use_layout(Layout(pipeline=2), "cpu")
    assert mesh is not None
    model = build_gpt()
    pipeline = Pipeline(model, mesh, CPU)
    pipeline.complete()
    name = "head.weight" if pipeline.is_last else "token_embedding.weight"
    return pipeline, model.get_parameter(name), mesh.pipeline_rank


def gradients() -> tuple[list[float], str | None]:
    pipeline, copied, rank = cut_in_two()
    found = []
    for own in ([1.0, 2.0], [None, 5.0]):
        value = own[rank]
        copied.grad = None if value is None else torch.full_like(copied, value)
        pipeline.tied.sum_gradients()
        assert copied.grad is not None
        low, high = copied.grad.aminmax()
        assert low == high
        found.append(low.item())
    return found, getattr(copied, TIED_COPY, None)


def test_copies_have_the_sum_of_their_gradients_and_one_counts_in_the_norm() -> None:
    first, last = on_ranks(gradients)
    assert first == ([3.0, 5.0], None)
    assert last == ([3.0, 5.0], "token_embedding.weight")


def messages_about(decays: tuple[float, float]) -> str:
    """What a process with its own weight decay for the copies raises; empty: nothing."""
    pipeline, copied, rank = cut_in_two()
    try:
        pipeline.tied.check_settings([{"params": [copied], "lr": 0.1, "weight_decay": decays[rank]}])
    except ConfigError as error:
        return str(error)
    return ""


def test_an_optimizer_must_update_the_copies_alike() -> None:
    assert on_ranks(messages_about, (0.1, 0.1)) == ["", ""]
    for message in on_ranks(messages_about, (0.0, 0.1)):
        assert message.startswith("token_embedding.weight and head.weight are one weight on several pipeline stages")
        assert "groups differ in weight_decay" in message


def clip_a_stage() -> tuple[torch.dtype, float, float]:
    use_layout(Layout(pipeline=2), "cpu")
    weight = nn.Parameter(torch.ones(3, dtype=(torch.float32, torch.float64)[get_rank()]))
    weight.grad = torch.full_like(weight, 0.7)
    norm = clip_by_norm([weight], 0.1)
    return norm.dtype, norm.item(), weight.grad[0].item()


def test_stages_of_different_types_are_clipped_by_the_same_norm() -> None:
    (dtype, norm, gradient), (other_dtype, other_norm, other_gradient) = on_ranks(clip_a_stage)
    assert (dtype, norm) == (other_dtype, other_norm)
    assert gradient == pytest.approx(other_gradient, rel=1e-7)

"""Tied parameters of a pipeline: their copies have one gradient, and an optimizer must treat them alike."""

import torch

from tests.parallel.test_pipeline import CPU, build_gpt
from tests.ranks import on_ranks
from trainwright.config.errors import ConfigError
from trainwright.parallel.dist import TIED_COPY
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import use_layout
from trainwright.parallel.pipeline import Pipeline


def cut_in_two() -> tuple[Pipeline, torch.nn.Parameter, int]:
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

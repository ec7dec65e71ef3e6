"""Stages that are called one after another compute what the model computes, and hold its names between them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.test_pipeline import VOCABULARY, build_gpt, build_transformers
from trainwright.base.errors import ConfigError
from trainwright.models import BertTextClassification, BertTextClassificationConfig
from trainwright.parallel.layout import Layout
from trainwright.parallel.pipeline_cut import Stage, cut_model

IDS = torch.arange(20).reshape(2, 10)
MASK = torch.ones_like(IDS)
MASK[0, 7:] = 0


def build_bert() -> nn.Module:
    torch.manual_seed(0)
    return BertTextClassification(
        BertTextClassificationConfig(
            id2label=["a", "b"], vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=16, hidden_dropout_prob=0.0,
        )
    )  # fmt: skip


MODELS = {
    "gpt": (build_gpt, {"token_ids": IDS, "attention_mask": MASK}),
    "bert": (build_bert, {"token_ids": IDS, "attention_mask": MASK}),
    "llama": (build_transformers, {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}),
    "llama, tied": (lambda: build_transformers(tie_word_embeddings=True), {"input_ids": IDS, "labels": IDS}),
    "llama, two scores": (
        lambda: build_transformers(task="QuestionAnswering"),
        {"input_ids": IDS, "start_positions": IDS[:, 1] % 3, "end_positions": IDS[:, 2] % 3 + 3},
    ),
    "llama, tokens": (
        lambda: build_transformers(task="TokenClassification", num_labels=20),
        {"input_ids": IDS, "labels": IDS},
    ),
    "llama, sequences": (
        lambda: build_transformers(task="SequenceClassification", num_labels=3, pad_token_id=0),
        {"input_ids": IDS * MASK, "attention_mask": MASK, "labels": IDS[:, 1] % 3},
    ),
    "qwen3": (lambda: build_transformers("Qwen3"), {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}),
    "mixtral, router loss": (
        lambda: build_transformers("Mixtral", num_local_experts=4, output_router_logits=True),
        {"input_ids": IDS, "attention_mask": MASK, "labels": IDS},
    ),
    "qwen3, routers on the last stage alone": (
        lambda: build_transformers("Qwen3Moe", num_experts=8, mlp_only_layers=[0, 1], output_router_logits=True),
        {"input_ids": IDS, "labels": IDS},
    ),
}


def stages_of(build: Any, number: int) -> list[tuple[nn.Module, Stage]]:
    """The model of each process, and its stage."""
    found = []
    for index in range(number):
        model = build()
        (stage,), _, _ = cut_model(model, number, [index], Layout(pipeline=number).stage_ids)
        found.append((model, stage))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_what_the_model_computes(name: str) -> None:
    build, batch = MODELS[name]
    whole = build().eval()
    expected = whole(**batch)
    hidden: Any = torch.zeros(1)
    for model, stage in stages_of(build, 3):
        model.eval()
        stage.begin([batch])
        hidden = stage(hidden)
    for key in ("logits", "loss", "aux_loss"):
        if key in expected:
            torch.testing.assert_close(hidden[key], expected[key], rtol=0, atol=1e-6)


def test_two_stages_of_one_process_hold_two_copies_of_a_tied_weight() -> None:
    model = build_gpt(layers=4)
    stages, (tie,), _ = cut_model(model, 4, [0, 3], Layout(pipeline=4).stage_ids)
    assert tie.names == {0: ("token_embedding.weight",), 3: ("head.weight",)}
    first, last = model.get_parameter("token_embedding.weight"), model.get_parameter("head.weight")
    assert first is not last
    torch.testing.assert_close(first, last)
    assert stages[1].model.get_parameter("head.weight") is last
    assert [len(list(stage.model.parameters())) > 2 for stage in stages] == [True, True]


def test_both_stages_of_one_process_follow_the_mode_of_the_model() -> None:
    model = build_gpt(layers=4)
    stages, _, ids = cut_model(model, 4, [0, 3], Layout(pipeline=4).stage_ids)
    assert ids == [0, 1, 2, 3]
    model.eval()
    assert not any(module.training for stage in stages for module in stage.model.modules() if module.children() == [])
    stages[0].begin([{"token_ids": IDS}])
    stages[0](torch.zeros(1))
    assert not stages[0].model.training


class Swapped(nn.Module):
    """Uses in its first part a module that it assigns after the layers, and a parameter of its own on both sides."""

    pipeline_layers = "layers"

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layers = nn.Parameter(torch.ones(2)), nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.late = nn.Linear(2, 2)

    def before_layers(self, features: Tensor) -> Tensor:
        return self.late(features) if features.sum() == 0 else features * self.scale

    def after_layers(self, hidden: Tensor, features: Tensor) -> Tensor:
        return hidden if self.scale is None else hidden * self.scale

    forward = before_layers


def test_a_module_of_another_stage_raises_and_names_itself() -> None:
    (_, stage), _ = stages_of(Swapped, 2)
    stage.begin([{"features": torch.zeros(1, 2)}])
    with pytest.raises(ConfigError, match="late is on another pipeline stage") as raised:
        stage(torch.zeros(1))
    assert "pipeline stage 0" in raised.value.__notes__[0]


class Masked(Swapped):
    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        return features


def test_an_argument_that_a_part_of_the_model_does_not_take_is_answered_with_those_of_forward() -> None:
    (_, stage), _ = stages_of(Masked, 2)
    stage.begin([{"features": torch.ones(1, 2), "mask": torch.ones(1)}])
    with pytest.raises(TypeError, match="mask") as raised:
        stage(torch.zeros(1))
    assert "forward takes (features, mask): before_layers takes the same" in raised.value.__notes__[1]


def test_a_parameter_of_another_stage_is_absent_and_the_error_says_where_it_is() -> None:
    (_, first), (model, last) = stages_of(Swapped, 2)
    first.begin([torch.ones(1, 2)])
    last.begin([torch.ones(1, 2)])
    with pytest.raises(AttributeError, match="scale") as raised:
        last(first(None))
    assert "for before_layers only" in raised.value.__notes__[1]
    assert "scale" not in model.state_dict()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "Linear does not say where it can be cut"),
        (lambda: build_gpt(layers=1), "has 1 layers.*2 pipeline stages need at least 2"),
        (lambda: build_transformers("Granite", embedding_multiplier=2.0), "GraniteForCausalLM cannot be cut.*outside"),
    ],
    ids=["no cut", "few layers", "scaled"],
)
def test_what_cannot_be_cut_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut_model(build(), 2, [0], Layout(pipeline=2).stage_ids)

"""The cost of a deep model is that of its complete trace, though it is traced with few blocks."""

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.inspect.test_estimate import LENGTH, VOCABULARY, Pairs, Texts
from trainwright import Trainer, TrainingConfig
from trainwright.engine import estimate
from trainwright.inspect.simulation import blocks
from trainwright.tasks.text_generation.model import GPTTextGeneration, GPTTextGenerationConfig

DEPTH = 10


@pytest.fixture(autouse=True)
def few_blocks_are_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete traces of deep models take long."""
    monkeypatch.setattr(blocks, "WORTHWHILE", 9)


def gpt(depth: int) -> nn.Module:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    return GPTTextGeneration(GPTTextGenerationConfig(vocab_size=VOCABULARY, num_hidden_layers=depth, **sizes))


def bert(depth: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, num_hidden_layers=depth, **sizes))


def llama(depth: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 86, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=depth, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config)


def alternating(depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(256, 64), *layers, nn.Linear(64, 10))


MODELS: dict[str, Any] = {
    "gpt": (gpt, lambda: Texts("token_ids")),
    "bert": (bert, lambda: Texts("input_ids")),
    "llama": (llama, lambda: Texts("input_ids")),
    "alternating": (alternating, lambda: Pairs(256)),
}


def both(name: str, world_size: int = 1, depth: int = DEPTH, **settings: Any) -> tuple[Any, Any]:
    """The estimate from few blocks, and from all."""
    make, data = MODELS[name]
    dataset = data()
    if name == "alternating":
        settings["loss"] = "CrossEntropyLoss"
    settings = {"batch_size": 2, "num_epochs": 9, "max_steps": 8, "save_enabled": False, **settings}
    config = TrainingConfig(output_dir=tempfile.mkdtemp(), device_str="cpu", **settings)
    build = lambda config: Trainer(make(depth), config, train_dataset=dataset)  # noqa: E731
    found = [estimate(build, config, world_size=world_size, extrapolates=short) for short in (True, False)]
    return found[0], found[1]


def check_same(few: Any, complete: Any) -> None:
    assert few.extrapolated
    assert not complete.extrapolated
    assert few.costs.keys() == complete.costs.keys()
    for rank, cost in complete.costs.items():
        assert few.costs[rank].peak == pytest.approx(cost.peak, rel=1e-3, abs=8192)  # a batch of the step before
        assert few.costs[rank].traffic == cost.traffic
        assert few.costs[rank].trainable == cost.trainable


def test_blocks_that_alternate() -> None:
    check_same(*both("alternating"))


@pytest.mark.exhaustive
def test_zero_3_with_recomputed_blocks() -> None:
    settings = {"zero_stage": 3, "gradient_checkpointing": True, "mixed_precision": "bf16"}
    check_same(*both("gpt", 64, **settings))


@pytest.mark.exhaustive
def test_pipeline_stages_of_different_lengths() -> None:
    few, complete = both("gpt", 2, depth=21, pipeline_parallel_size=2, gradient_accumulation_steps=2)
    for rank, cost in complete.costs.items():
        assert few.costs[rank].peak == pytest.approx(cost.peak, rel=2e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "world_size", "settings"),
    [
        ("llama", 1, {}),
        ("gpt", 1, {"gradient_checkpointing": True}),
        ("bert", 1, {"ema": True, "optimizer": "RMSprop", "gradient_accumulation_steps": 2}),
        ("gpt", 4, {"zero_stage": 1, "gradient_accumulation_steps": 2}),
        ("gpt", 4, {"zero_stage": 2}),
        ("llama", 8, {"zero_stage": 3, "replicate_size": 2}),
        ("llama", 4, {"tensor_parallel_size": 2, "zero_stage": 3}),
    ],
    ids=str,
)
def test_layouts(name: str, world_size: int, settings: dict[str, Any]) -> None:
    check_same(*both(name, world_size, **settings))


class Growing(nn.Module):
    """Equal blocks, of which each keeps more than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(24))
        self.last = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x.repeat(i + 1, 1)))[: len(x)]
        result: Tensor = self.last(x)
        return result


@pytest.mark.slow
def test_blocks_that_need_different_amounts_are_all_traced() -> None:
    config = TrainingConfig(output_dir=tempfile.mkdtemp(), device_str="cpu", batch_size=8, loss="CrossEntropyLoss")
    data = Pairs(256)
    found = estimate(lambda config: Trainer(Growing(), config, train_dataset=data), config)
    assert not found.extrapolated
    assert found.costs[0].trainable == 4 * sum(p.numel() for p in Growing().parameters())


def test_a_model_that_needs_all_of_its_blocks_is_traced_with_them() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(24))
            self.last = nn.Linear(256, 10)

        def forward(self, x: Tensor) -> Tensor:
            for i in range(24):
                x = self.blocks[i](x)
            result: Tensor = self.last(x)
            return result

    config = TrainingConfig(output_dir=tempfile.mkdtemp(), device_str="cpu", batch_size=8, loss="CrossEntropyLoss")
    data = Pairs(256)
    found = estimate(lambda config: Trainer(Counted(), config, train_dataset=data), config)
    assert not found.extrapolated
    assert found.peak > found.costs[0].trainable

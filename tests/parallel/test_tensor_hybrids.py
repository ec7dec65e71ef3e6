"""Tensor parallelism of models whose modules compute with parameters of the modules in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.ranks import on_ranks
from tests.toys import quiet
from trainwright import Trainer
from trainwright.base.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
STATES: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_expand": 2,
    "mamba_chunk_size": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
NEXT: dict[str, Any] = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
PERIODS: dict[str, Any] = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "mamba_d_state": 4, "mamba_dt_rank": 2, "use_mamba_kernels": False,
}  # fmt: skip


class Mixed(nn.Module):
    """A block with parameters of its own, which also computes with those of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.mixer = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.scale * self.down(self.up(inputs).tanh()) + inputs @ self.mixer.weight


class Plain(nn.Module):
    tensor_plan: ClassVar[dict[str, str]] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "Bamba": lambda: hf.BambaForCausalLM(hf.BambaConfig(**SIZES, **STATES, attn_layer_indices=[1])),
    "Falcon-H1": lambda: hf.FalconH1ForCausalLM(hf.FalconH1Config(**SIZES, **STATES, mamba_d_ssm=32)),
    "Qwen3-Next": lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SIZES, **EXPERTS, **NEXT)),
    "Jamba": lambda: hf.JambaForCausalLM(hf.JambaConfig(**SIZES, **EXPERTS, **PERIODS)),
}


def train(name: str, folder: Path, **layout: Any) -> dict[str, Tensor]:
    """The complete weights after three updates with the same samples."""
    torch.manual_seed(0)
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    if name in ("plain", "cut"):
        data: Any = TensorDataset(torch.randn(12, 4, generator=generator), torch.arange(12) % 2)
    else:
        ids = torch.randint(1, 32, (12, 8), generator=generator)
        data = [{"input_ids": row, "labels": row} for row in ids]
    settings = {"num_epochs": 1, "batch_size": 4, "metrics": None, "save_enabled": False, "optimizer": "SGD"}
    trainer = Trainer(model, quiet(folder, eval_strategy="no", **{**settings, **layout}), data)
    trainer.train()
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach() for n, p in trainer.model.named_parameters()}


def train_all(folder: Path, calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Tensor]]:
    return [train(name, folder / str(number), **layout) for number, (name, layout) in enumerate(calls)]


def test_modules_may_use_the_parameters_of_replicated_modules_in_them(tmp_path: Path) -> None:
    alone = {name: train(name, tmp_path / name) for name in MODELS}
    tensor = {"tensor_parallel_size": 2}
    calls = [(name, layout) for name in MODELS for layout in (tensor, {**tensor, "gradient_checkpointing": True})]
    for rank in on_ranks(train_all, tmp_path, calls, timeout=200):
        for found, (name, layout) in zip(rank, calls, strict=True):
            for key, value in alone[name].items():
                torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=f"{name}, {layout}: {key}")


class Cut(Plain):
    """Computes with a part of a layer that is divided."""

    def forward(self, inputs: Tensor) -> Tensor:
        block: Any = self.blocks[0]
        return super().forward(inputs + (inputs @ block.up.weight.T).mean())


def refused(folder: Path) -> str:
    MODELS["cut"] = Cut
    with pytest.raises(ConfigError) as caught:
        train("cut", folder, tensor_parallel_size=2)
    return str(caught.value)


def test_one_that_uses_divided_parameters_is_named_with_its_line(tmp_path: Path) -> None:
    for found in on_ranks(refused, tmp_path):
        assert found.startswith(f"the model (Cut), {__file__}:")
        assert "block.up.weight.T" in found
        assert "uses parameters where they are divided between the processes" in found

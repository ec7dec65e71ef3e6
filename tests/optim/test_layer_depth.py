"""Learning rates by depth, and weight decay that leaves out norm layers and biases."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.toys import quiet
from trainwright import LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.models import BertTextClassification, BertTextClassificationConfig
from trainwright.optim import build_optimizer, get_default_optimizer_params, layer_depths

TINY = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 11}


def ours() -> nn.Module:
    return BertTextClassification(BertTextClassificationConfig(id2label={0: "a", 1: "b"}, **TINY))


def bert_of_transformers() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**TINY))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=3, n_head=2, vocab_size=11, n_positions=8))


def vit_of_transformers() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**TINY, image_size=8, patch_size=4))


def vit_of_timm() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", depth=3, embed_dim=12, num_heads=2, img_size=32)


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize(
    ("make", "first", "last"),
    [
        (ours, "embeddings", "classifier"),
        (bert_of_transformers, "bert.embeddings", "classifier"),
        (gpt2, "transformer.wte", "transformer.ln_f"),
        (vit_of_transformers, "vit.embeddings", "classifier"),
        (vit_of_timm, "patch_embed", "head"),
    ],
)
def test_embeddings_are_layer_0_and_what_follows_the_blocks_is_the_last(make: Any, first: str, last: str) -> None:
    depths = layer_depths(make())
    assert set(depths.values()) == set(range(5)), "three blocks"
    assert {depth for name, depth in depths.items() if first in name} == {0}
    assert {depth for name, depth in depths.items() if last in name} == {4}
    for depth in (1, 2, 3):
        names = [name for name, found in depths.items() if found == depth and "norm." not in name.split("blocks")[0]]
        assert all(f".{depth - 1}." in name for name in names), names


def test_rates_of_a_model_of_timm_are_those_of_timm() -> None:
    from timm.optim import param_groups_layer_decay

    model = vit_of_timm()
    expected = {
        id(parameter): (group["lr_scale"], group["weight_decay"])
        for group in param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.75)
        for parameter in group["params"]
    }
    settings = {"base_lr": 1.0, "weight_decay": 0.1, "weight_decay_norm": 0.0, "weight_decay_bias": 0.0}
    groups = get_default_optimizer_params(model, layer_decay=0.75, **settings)
    assert len({id(p) for group in groups for p in group["params"]}) == len(expected)
    for group in groups:
        for parameter in group["params"]:
            assert group["lr"] == pytest.approx(expected[id(parameter)][0])


def test_children_are_the_layers_of_a_model_without_containers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    assert layer_depths(Net()) == {"scale": 0, "first.weight": 1, "first.bias": 1, "last.weight": 2, "last.bias": 2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(self.norm(x))


def data() -> TensorDataset:
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def test_a_trainer_has_these_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainwright")
    decay = {"weight_decay": 0.1, "layer_decay": 0.5, "decay_norm_and_bias": False}
    settings = quiet(tmp_path, batch_size=4, num_epochs=1, metrics=[], optimizer="SGD", lr=0.1, **decay)
    trainer = Trainer(Net(), settings, data())
    trainer.train()
    assert "layer 0: lr 0.0125, 2 parameters" in caplog.text
    assert "layer 3: lr 0.1, 4 parameters" in caplog.text
    rates = {"stem": 0.0125, "blocks.0": 0.025, "blocks.1": 0.05, "norm": 0.1, "head": 0.1}
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = [(names[id(p)], group) for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(groups) == len(names)
    for name, group in groups:
        decays = name.endswith("weight") and not name.startswith("norm")
        assert group["lr"] == next(rate for start, rate in rates.items() if name.startswith(start)), name
        assert group["weight_decay"] == (0.1 if decays else 0.0), name
    assert {value for value, _ in trainer.storage.history("lr").values()} == {0.1}, "the rate of the last layer"


def test_config_files_take_the_rate_of_the_optimizer() -> None:
    model = Net()
    params = LazyCall(get_default_optimizer_params)(layer_decay=0.5, weight_decay_bias=0.0)
    for given in (params, {"layer_decay": 0.5, "weight_decay_bias": 0.0}):
        optimizer = build_optimizer(LazyCall(torch.optim.AdamW)(lr=0.8, params=given), model)
        found = {group["layer"]: group["lr"] for group in optimizer.param_groups}
        assert found == {3: 0.8, 2: 0.4, 1: 0.2, 0: 0.1}


def test_norm_layers_of_other_libraries_are_known_by_their_names() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = nn.Sequential(nn.Linear(2, 2), LlamaRMSNorm(2))
    groups = get_default_optimizer_params(model, weight_decay=0.1, weight_decay_norm=0.0)
    assert [group["weight_decay"] for group in groups for _ in group["params"]] == [0.1, 0.1, 0.0]


@pytest.mark.parametrize(("value", "message"), [(1.5, r"layer_decay.*1\.5.*\(0, 1\]"), (0.0, r"layer_decay.*0\.0")])
def test_a_wrong_value_is_refused(value: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        get_default_optimizer_params(Net(), base_lr=0.1, layer_decay=value)
    with pytest.raises(ConfigError, match=message):
        TrainingConfig(output_dir=str(tmp_path), layer_decay=value)
    with pytest.raises(ConfigError, match="layer_decay: got it without base_lr"):
        get_default_optimizer_params(Net(), layer_decay=0.5)


def test_settings_without_effect_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = TrainingConfig(output_dir=str(tmp_path), filter_bias_and_bn=True)
    Trainer(Net(), settings, data())
    assert "decay_norm_and_bias=False has no effect without weight_decay" in caplog.text
    caplog.clear()
    model = Net()
    Trainer(model, settings, data(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert "decay_norm_and_bias=False (the Trainer uses the passed optimizer, SGD)" in caplog.text

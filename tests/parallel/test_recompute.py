"""Recomputing blocks and mixed precision: memory, numbers, and what a model keeps."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from tests.toys import assert_equal_weights, layers, quiet
from trainwright import Trainer
from trainwright.base.errors import ConfigError
from trainwright.parallel.recompute import compile_blocks, recompute_blocks


class Counting(nn.Module):
    """A block that counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.drop(self.norm(self.linear(x)).relu())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(Counting(), Counting()), nn.ModuleList([]))[:3]


def train_once(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model(torch.randn(16, 4)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("which", [True, "offload"])
def test_gradients_and_running_statistics_are_those_of_a_plain_model(which: Any) -> None:
    plain, recomputed = network(), network()
    recompute_blocks(recomputed, which)
    for a, b in zip(train_once(plain), train_once(recomputed), strict=True):
        assert torch.equal(a, b)


class Changing(nn.Module):
    """A layer whose output depends on buffers that each forward pass changes, in four ways."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(size, 8))
        self.register_buffer("table", torch.arange(2**18 + 1.0))  # larger than what is copied without a comparison
        self.register_buffer("mean", None)
        self.register_buffer("passes", torch.tensor(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            self.codes.data[nearest[0]] = self.codes[nearest[0]] * 0.9 + 0.1 * x[0].detach()
            self.mean = x.detach().mean() if self.mean is None else 0.9 * self.mean + 0.1 * x.detach().mean()
            self.passes += 1
        return (x * self.passes.clone() + self.codes[nearest] - self.mean) * self.table[1]


CHANGING = {
    "codes": Changing,
    "large codes": lambda: Changing(2**15 + 1),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "spectral norm by a hook": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("which", [True, "selective", "offload"])
@pytest.mark.parametrize("kind", CHANGING)
def test_buffers_that_decide_about_the_output_are_those_of_a_plain_model(kind: str, which: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), *(nn.Sequential(CHANGING[kind](), nn.Tanh()) for _ in range(2)))
    recomputed = copy.deepcopy(plain)
    assert recompute_blocks(recomputed, which)
    for model in (plain, recomputed):
        torch.manual_seed(1)
        for _ in range(3):
            first, second = (model(torch.randn(16, 4)).square().mean() for _ in range(2))  # before the backward passes
            first.backward(retain_graph=which is True)
            if which is True:
                first.backward()
            second.backward()
    buffers = [dict(model.named_buffers()) for model in (plain, recomputed)]
    assert buffers[0].keys() == buffers[1].keys()
    for name, value in buffers[0].items():
        assert torch.equal(value, buffers[1][name]), name
    for (name, left), right in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad), name


class Products(TorchDispatchMode):
    """Counts matrix products and copies."""

    number = copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        # torch 2.11 also copies a tensor without elements for each block.
        self.copies += function is torch.ops.aten.copy_.default and args[0].numel() > 0
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("which", "copies"), [(True, 0), ("offload", 2)])
def test_only_the_inputs_of_blocks_are_copied_to_the_host(which: Any, copies: int) -> None:
    model = network()
    assert len(recompute_blocks(model, which)) == 2
    with Products() as counted:
        model(torch.randn(16, 4))
    assert counted.copies == copies


def test_a_selective_recomputation_repeats_no_matrix_product() -> None:
    models = [network() for _ in range(3)]
    recompute_blocks(models[1])
    recompute_blocks(models[2], "selective")
    numbers, found = [], []
    for model in models:
        with Products() as products:
            found.append(train_once(model))
        numbers.append(products.number)
    assert numbers[1] > numbers[0] == numbers[2]
    for left, right in zip(found[0], found[2], strict=True):
        assert torch.equal(left, right)
    assert models[2][2][0].calls == 2  # the rest is computed again


@pytest.mark.exhaustive
def test_equal_blocks_are_compiled_once_with_the_numbers_of_plain_ones() -> None:
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), *(layers([8, 8], dropout=0.3) for _ in range(4)))
    compiled = copy.deepcopy(plain)
    compile_blocks(compiled, torch.device("cpu"))
    for model in (plain, compiled):
        torch.manual_seed(1)
        model(torch.randn(16, 8, requires_grad=True)).square().mean().backward()
    for left, right in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)
    assert counters["stats"]["unique_graphs"] == 1
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_blocks_that_cannot_be_compiled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Sequential(*(layers([8, 8], dropout=0.3) for _ in range(2)))
    with pytest.raises(ConfigError, match="no repeated blocks"):
        compile_blocks(nn.Linear(2, 2), torch.device("cpu"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="install one"):
        compile_blocks(plain, torch.device("cpu"))


@pytest.mark.exhaustive
def test_a_compiled_model_recomputes_with_the_same_numbers() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2)))
    recomputed = copy.deepcopy(plain)
    recompute_blocks(recomputed)
    compiled = torch.compile(recomputed, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(16, 4)
        plain(x).square().mean().backward()
        compiled(x).square().mean().backward()
    assert_equal_weights(plain, recomputed)  # running statistics, too
    for left, right in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_blocks_are_the_outermost_children_with_parameters_or_those_that_a_model_names() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body = nn.Linear(4, 8), Counting()

        def set_activation_checkpoint(self) -> list[nn.Module]:
            return [self.body]

    assert recompute_blocks(network()) == ["0", "2"]
    assert recompute_blocks(nn.Linear(2, 2)) == []
    assert recompute_blocks(Names()) == ["body"]


def test_a_copy_computes_with_its_own_weights_of_the_same_names() -> None:
    model = network()
    names = list(model.state_dict())
    recompute_blocks(model)
    kept = copy.deepcopy(model)
    train_once(kept)
    assert all(parameter.grad is not None for parameter in kept.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert list(model.state_dict()) == names


def test_models_of_transformers_and_timm_do_it_themselves() -> None:
    import timm
    from transformers import BertConfig, BertModel

    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bert = BertModel(BertConfig(**tiny, vocab_size=11))
    assert recompute_blocks(bert) in (["activation_checkpointing_enable"], ["gradient_checkpointing_enable"])
    assert any(getattr(module, "gradient_checkpointing", False) for module in bert.modules())
    recompute_blocks(bert, "offload")
    bert(torch.zeros(1, 2).long())
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=12, num_heads=2, img_size=32)
    assert recompute_blocks(vit) == ["set_grad_checkpointing"]
    assert vit.grad_checkpointing


@pytest.mark.parametrize("kind", ["timm", "transformers", "instance norm", "spectral norm in transformers"])
def test_models_that_do_it_themselves_change_their_buffers_once(kind: str) -> None:
    import timm
    from transformers import BertConfig, BertModel, Wav2Vec2ConformerConfig, Wav2Vec2ConformerModel

    torch.manual_seed(0)
    if kind == "timm":
        model, inputs = timm.create_model("resnet10t", num_classes=2), torch.randn(4, 3, 32, 32)
    elif kind == "transformers":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        convolutions = {"conv_dim": [8], "conv_kernel": [10], "conv_stride": [5], "num_feat_extract_layers": 1}
        others = {"num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0}
        config = Wav2Vec2ConformerConfig(**sizes, **convolutions, **others)
        model, inputs = Wav2Vec2ConformerModel(config), torch.randn(2, 400)
    elif kind == "spectral norm in transformers":
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        model, inputs = BertModel(BertConfig(**sizes, vocab_size=11)), torch.zeros(2, 3).long()
        for layer in model.encoder.layer:
            nn.utils.parametrizations.spectral_norm(layer.intermediate.dense)
    else:
        blocks = [nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Conv1d(2, 2, 1)) for _ in range(2)]
        model = nn.Sequential(*blocks)
        inputs = torch.randn(4, 2, 8)
    recomputed = copy.deepcopy(model)
    assert recompute_blocks(recomputed)
    for one in (model, recomputed):
        torch.manual_seed(1)
        output = one(inputs)
        getattr(output, "last_hidden_state", output).square().mean().backward()
    for (name, left), right in zip(model.named_buffers(), recomputed.buffers(), strict=True):
        assert torch.equal(left, right), name
    for (name, left), right in zip(model.named_parameters(), recomputed.parameters(), strict=True):
        assert left.grad is None or torch.equal(left.grad, right.grad), name


def test_the_setting_of_the_python_api_changes_no_number(tmp_path: Path) -> None:
    trained = []
    for recomputes in (False, True):
        settings: dict[str, Any] = {"batch_size": 4, "num_epochs": 1, "loss": "MSELoss", "metrics": []}
        config = quiet(tmp_path / str(recomputes), gradient_checkpointing=recomputes, save_enabled=False, **settings)
        data = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 8))
        trainer = Trainer(network(), config, data)
        trainer.train()
        trained.append(trainer.model)
    assert trained[1][2][0].calls == 2 * trained[0][2][0].calls
    assert_equal_weights(*trained)

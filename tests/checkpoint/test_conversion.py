"""Initial weights in the form of transformers: every model has those of ``from_pretrained``, in any layout."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.checkpoint.foreign_models import GROUPED, MODELS, build
from tests.distributed.layout_runs import Texts, UnsavedTrainer, file_config, settings
from tests.hub_server import HubServer
from tests.ranks import on_ranks
from trainwright import Trainer
from trainwright.checkpoint import CheckpointError, conversion
from trainwright.config import LazyCall
from trainwright.models import init_weights

NAMES = sorted(MODELS)


def saved(name: str, folder: Path) -> nn.Module:
    model: Any = build(name, seed=0)
    model.save_pretrained(folder)
    return model


def assert_loaded(found: dict[str, Tensor], source: nn.Module) -> None:
    expected = source.state_dict()
    different = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not different
    assert found


@pytest.mark.parametrize("name", NAMES)
def test_all_weights_of_a_saved_model_of_transformers_are_loaded(name: str, tmp_path: Path) -> None:
    model: Any = saved(name, tmp_path)
    assert name == "Llama" or {*load_file(tmp_path / "model.safetensors")} != {
        *model.state_dict()
    }  # so it is converted
    other = build(name, seed=1)
    assert init_weights(other, tmp_path) == []
    assert_loaded(other.state_dict(), type(model).from_pretrained(tmp_path))
    assert_loaded(other.state_dict(), model)


@pytest.mark.parametrize("name", ["Mixtral", "LLaVA", "Swin"])
def test_files_with_the_names_of_the_model_are_not_converted(name: str, tmp_path: Path) -> None:
    model: Any = build(name, seed=0)
    model.config.save_pretrained(tmp_path)
    save_file(
        {n: value.clone() for n, value in model.state_dict().items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    other = build(name, seed=1)
    assert init_weights(other, tmp_path) == []
    assert_loaded(other.state_dict(), model)
    assert_loaded(type(model).from_pretrained(tmp_path).state_dict(), model)  # and the reverse


def complete(model: nn.Module) -> dict[str, Tensor]:
    """The state that this process holds, and of divided tensors all values. Every process must call it."""
    state = model.state_dict()
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in state.items()}


def start(folder: Path, name: str, layout: dict[str, Any], api: str, *, partial: bool = False) -> dict[str, Tensor]:
    node = LazyCall(build)(name=name, seed=1)
    own = {"init_weights_from": str(folder / name), "init_weights_partial": partial}
    if api == "objects":
        config = settings(folder / "out", meta_init=True, gradient_accumulation_steps=2, **own, **layout)
        return complete(Trainer(node, config, train_dataset=Texts(16)).model)
    cfg = file_config(folder / "out", layout, Texts(16), 4, 2, 2, updates=1)
    cfg.model, cfg.train.dist.meta_init, cfg.train.load_weight = node, True, own["init_weights_from"]
    cfg.train.init_weights_partial = partial
    return complete(UnsavedTrainer(cfg).model)


def start_all(folder: Path, calls: list[tuple[str, dict[str, Any], str]]) -> list[dict[str, Tensor]]:
    return [start(folder, *call) for call in calls]


def test_each_process_loads_its_part_of_them(tmp_path: Path) -> None:
    models = {name: saved(name, tmp_path / name) for name in NAMES}
    calls = [(name, {"zero_stage": 3}, api) for name in NAMES for api in ("objects", "files")]
    calls += [(name, {"tensor_parallel_size": 2}, "objects") for name in ("Mixtral", "Qwen3-MoE")]
    calls += [("Mixtral", {"pipeline_parallel_size": 2}, "objects")]
    ranks = on_ranks(start_all, tmp_path, calls, timeout=200)
    for place, (name, layout, _) in enumerate(calls):
        for rank in ranks:
            assert_loaded(rank[place], models[name])
        held = {n for rank in ranks for n in rank[place]}
        assert held == models[name].state_dict().keys(), layout


def without(folder: Path, pattern: str) -> None:
    """Delete the weights whose names match from a file."""
    weights = load_file(folder / "model.safetensors")
    left = {name: value for name, value in weights.items() if not re.search(pattern, name)}
    assert len(left) < len(weights)
    save_file(left, folder / "model.safetensors", {"format": "pt"})


def begin(folder: Path, name: str, api: str, *, partial: bool = False, kind: str = "") -> nn.Module:
    if api == "objects":
        own = {"init_weights_from": name if kind else str(folder / name), "init_weights_partial": partial}
        return Trainer(build(kind or name, seed=1), settings(folder / "out", **own), train_dataset=Texts(16)).model
    cfg = file_config(folder / "out", {}, Texts(16), 4, 1, 2, updates=1)
    cfg.model, cfg.train.load_weight = LazyCall(build)(name=name, seed=1), str(folder / name)
    cfg.train.init_weights_partial = partial
    return UnsavedTrainer(cfg).model


@pytest.mark.parametrize(
    ("api", "setting"),
    [("objects", "TrainingConfig.init_weights_partial"), ("files", "train.init_weights_partial")],
)
def test_a_base_model_without_some_of_its_weights_is_refused_unless_it_may_be_partial(
    api: str, setting: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved("Mixtral", tmp_path / "Mixtral")
    without(tmp_path / "Mixtral", r"layers\.1\.mlp|layers\.1\..*experts|q_proj")
    with pytest.raises(CheckpointError) as caught:
        begin(tmp_path, "Mixtral", api)
    message = str(caught.value)
    assert re.search(r"no values for [45] of the 21 weights of MixtralForCausalLM", message)
    assert re.search(r"[45] in the model, not in the file: .*q_proj.weight.*gate_up_proj", message)
    assert message.endswith(f"To start from what fits, set {setting} = True.")
    caplog.clear()
    found = begin(tmp_path, "Mixtral", api, partial=True).state_dict()
    assert "model.layers.0.self_attn.q_proj.weight" in caplog.text
    different = [name for name, value in found.items() if not torch.equal(value, model.state_dict()[name])]
    assert different
    assert all("q_proj" in name or "layers.1.mlp" in name for name in different)


def test_an_incomplete_list_of_experts_is_refused(tmp_path: Path) -> None:
    saved("Mixtral", tmp_path)
    without(tmp_path, r"layers\.0\..*experts\.11\.w2")
    with pytest.raises(CheckpointError, match=r"experts.down_proj: shape \(11, 16, 24\) there, \(12, 16, 24\) in"):
        init_weights(build("Mixtral", seed=1), tmp_path)


def test_files_that_the_rules_of_transformers_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    saved("Mixtral", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if re.search(r"layers\.0\..*experts\.3\.w2", name))
    save_file({**weights, name: weights[name][:5].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot make model.layers.0.mlp.experts.down_proj of the 12 weights"):
        init_weights(build("Mixtral", seed=1), tmp_path)


def test_a_new_head_is_named_and_nothing_else_may_be_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers as hf

    saved("Llama", tmp_path / "llama")
    other = hf.LlamaForSequenceClassification(hf.LlamaConfig(**GROUPED, num_labels=3))
    assert init_weights(other, tmp_path / "llama") == ["score.weight"]
    assert "in the model, not in the file: score.weight. They keep their initial values" in caplog.text

    saved("Swin", tmp_path / "swin")
    two = hf.SwinForImageClassification(build("Swin", 0).config)  # type: ignore[arg-type]
    two.classifier = nn.Linear(16, 7)
    assert init_weights(two, tmp_path / "swin") == ["classifier.weight", "classifier.bias"]
    without(tmp_path / "swin", r"layers\.1\.blocks\.0\..*query")
    with pytest.raises(
        CheckpointError, match=r"no values for 2 of the 45 weights of SwinForImageClassification, which"
    ):
        init_weights(two, tmp_path / "swin")


def test_the_pooler_of_a_base_model_counts_as_head_and_old_names_of_norms_are_known(tmp_path: Path) -> None:
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    language = hf.BertForMaskedLM(config)
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): v.clone() for name, v in language.state_dict().items()}
    save_file({name: v for name, v in old.items() if "decoder" not in name}, tmp_path / "model.safetensors")
    nn.init.ones_(language.bert.embeddings.LayerNorm.weight)
    model = hf.BertForSequenceClassification(config)
    left = ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"]
    assert init_weights(model, tmp_path) == left


def test_a_model_for_a_task_without_a_base_model_in_it_has_a_head_too(tmp_path: Path) -> None:
    import transformers as hf

    config = hf.HGNetV2Config(
        embedding_size=8, hidden_sizes=[8, 8], stem_channels=[3, 4, 8], stage_in_channels=[8, 8],
        stage_mid_channels=[4, 4], stage_out_channels=[8, 8], stage_num_blocks=[1, 1], stage_numb_of_layers=[1, 1],
        stage_downsample=[False, True], stage_light_block=[False, False], stage_kernel_size=[3, 3], depths=[1, 1],
        stage_downsample_strides=[2, 2],
    )  # fmt: skip
    hf.HGNetV2Backbone(config).save_pretrained(tmp_path)
    model = hf.HGNetV2ForImageClassification(config)
    assert init_weights(model, tmp_path) == ["fc.weight", "fc.bias"]
    without(tmp_path, r"stages\.1\..*convolution\.weight")
    with pytest.raises(CheckpointError, match="HGNetV2ForImageClassification, which are not those of a new head"):
        init_weights(model, tmp_path)


class Plain(nn.Module):
    def __init__(self, classes: int = 2, *, deep: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        head = nn.Linear(8, classes)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), head) if deep else head


@pytest.mark.parametrize("deep", [False, True])
def test_the_head_of_any_model_may_be_new_but_not_a_layer_before_it(deep: bool, tmp_path: Path) -> None:
    save_file(Plain().state_dict(), tmp_path / "model.safetensors")
    left = init_weights(Plain(5, deep=deep), tmp_path)
    assert left
    assert all(name.startswith("head.") for name in left)
    without(tmp_path, r"blocks\.1")
    with pytest.raises(CheckpointError, match=r"2 in the model, not in the file: blocks.1.0.{weight, bias}"):
        init_weights(Plain(), tmp_path)


def test_another_release_of_transformers_converts_by_its_from_pretrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved("Mixtral", tmp_path)

    def changed(*arguments: Any) -> Any:
        raise TypeError("get_model_conversion_mapping() takes 3 arguments")

    monkeypatch.setattr(conversion._Rules, "of", changed)
    other = build("Mixtral", seed=1)
    assert init_weights(other, tmp_path) == []
    assert_loaded(other.state_dict(), model)
    assert "takes 3 arguments" in caplog.text


@pytest.mark.parametrize("in_files", [False, True])
def test_a_model_on_a_hub_is_converted_too_also_in_several_files(
    in_files: bool, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    model: Any = build("Mixtral", seed=0)
    folder = hub.folder("models", "someone/mixtral")
    model.save_pretrained(folder, max_shard_size="20KB" if in_files else "5GB")
    assert in_files is (folder / "model.safetensors.index.json").exists()
    found = begin(tmp_path, "someone/mixtral", "objects", kind="Mixtral")
    assert_loaded(found.state_dict(), model)

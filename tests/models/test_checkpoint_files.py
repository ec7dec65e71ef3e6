"""A checkpoint of either API is a folder that transformers loads, whatever the layout that saved it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.toys import llama
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.checkpoint import Checkpointer
from trainwright.checkpoint.export import export_weights
from trainwright.data import ColumnDataset, build_image_train_loader
from trainwright.models.checkpoint_files import checkpoint_files, class_name


def train_by_objects(model: Any, data: Any, folder: Path) -> Path:
    settings: dict[str, Any] = {"num_epochs": 1, "batch_size": 4, "metrics": []}
    Trainer(model, TrainingConfig(output_dir=str(folder), **settings), data).train()
    return folder / "final_epoch"


def train_by_config(model: Any, data: Any, folder: Path) -> Path:
    cfg: Any = OmegaConf.create(flags={"allow_objects": True})
    loader, _, _ = build_image_train_loader(data, 4, num_workers=0)
    cfg.model, cfg.dataloader = model, LazyCall(dict)(train=loader)
    cfg.optim = LazyCall(torch.optim.AdamW)(lr=0.01)
    cfg.train = {"output_dir": str(folder), "train_iter": 2, "train_micro_batch_size": 4}
    DefaultTrainer(cfg).train()
    return folder / "model_final"


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("train", [train_by_objects, train_by_config])
def test_a_checkpoint_is_a_folder_of_transformers(train: Any, tmp_path: Path) -> None:
    tokens = torch.randint(0, 16, (8, 6))
    model = llama()
    model.generation_config.temperature = 0.5
    checkpoint = train(model, ColumnDataset(input_ids=tokens, labels=tokens), tmp_path)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert type(loaded) is type(model)
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    assert loaded.generation_config.temperature == 0.5
    # As save_pretrained writes it: servers choose their class by it.
    assert json.loads((checkpoint / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert model.config.architectures is None  # of the user's object


class Odd(nn.Linear):
    @property
    def config(self) -> Any:
        raise RuntimeError("not yet")


@pytest.mark.parametrize("config", [{"a": 1}, OmegaConf.create({"a": 1}), "text", nn.Linear])
def test_other_configs_are_left_out(config: Any) -> None:
    model = nn.Linear(1, 1)
    model.config = config  # type: ignore[assignment]
    assert checkpoint_files(model) == {}
    assert checkpoint_files(Odd(1, 1)) == {}


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.config = self.inner.config


def test_names_of_weights_of_others_have_no_config(caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoint_files(Wrapped()) == {}

    peft = pytest.importorskip("peft")
    model = llama()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    assert checkpoint_files(model) == {}

    assert checkpoint_files(llama(), has_all_weights=False) == {}
    # A config that cannot be written is a warning.
    model = llama()
    model.config.setting = object()
    assert checkpoint_files(model) == {}
    assert "Checkpoints have no config.json" in caplog.text


def test_the_files_are_no_state_and_are_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = torch.randint(0, 16, (8, 6))
    data = ColumnDataset(input_ids=tokens, labels=tokens)
    model = llama()
    model.generation_config.temperature = 0.5
    checkpoint = train_by_config(model, data, tmp_path / "run")
    caplog.clear()
    trained = llama()
    Checkpointer(trained).load(checkpoint)
    assert "generation_config" not in caplog.text
    export_weights(checkpoint, tmp_path / "exported")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert loaded.generation_config.temperature == 0.5


def test_the_class_of_a_sharded_model_is_that_of_the_user() -> None:
    model = llama()
    model.__class__ = type(f"FSDP{type(model).__name__}", (FSDPModule, type(model)), {})  # as fully_shard does
    assert class_name(model) == "LlamaForCausalLM"
    assert json.loads(checkpoint_files(model)["config.json"])["architectures"] == ["LlamaForCausalLM"]
    # A name that begins like torchs stays.
    assert class_name(FSDPOfTheUser(1, 1)) == "FSDPOfTheUser"


class FSDPOfTheUser(nn.Linear):
    pass

"""Models of peft: what a checkpoint holds, who can load it, and that a resume is exact."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.ranks import on_ranks
from tests.toys import quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.checkpoint import CheckpointError, verify
from trainwright.data import ColumnDataset, build_image_train_loader
from trainwright.hooks import CallbackHook

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft

TOKENS = torch.randint(11, (24, 5), generator=torch.Generator().manual_seed(0))
DATA = ColumnDataset(input_ids=TOKENS, labels=TOKENS)


def base() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11, "n_positions": 8, "bos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=0))


def with_adapters() -> Any:
    torch.manual_seed(1)
    settings = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(base(), peft.LoraConfig(**settings))


def objects(folder: Path, *, resume: bool = False, **settings: Any) -> Trainer:
    given = TrainingConfig(
        output_dir=str(folder), batch_size=4, num_epochs=1, metrics=[], save_steps=2, lr=0.05, device="cpu",
        progress_bar=False, resume_from_checkpoint=resume or None, **settings,
    )  # fmt: skip
    return Trainer(with_adapters(), given, DATA)


def config(folder: Path, *, resume: bool = False, save_trainable_only: bool = False, **train: Any) -> DefaultTrainer:
    cfg = get_config("common/defaults.py")
    cfg._set_flag("allow_objects", True)
    cfg.model = LazyCall(with_adapters)()
    cfg.dataloader = {"train": LazyCall(build_image_train_loader)(dataset=DATA, num_workers=0)}
    cfg.train.update({"output_dir": str(folder), "train_iter": 6, "train_micro_batch_size": 4, "resume": resume})
    cfg.train.update({"input_placement_device": "cpu", **train})
    cfg.train.checkpointer.update({"period": 2, "save_trainable_only": save_trainable_only})
    return DefaultTrainer(cfg)


APIS = pytest.mark.parametrize("api", [objects, config])


def scores(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS[:2]).logits


def last(trainer: Any) -> Path:
    folder = Path(trainer.checkpointer.save_dir)
    return folder / "model_final" if (folder / "model_final").exists() else folder / "6"


@pytest.mark.exhaustive(every=6)
@APIS
@pytest.mark.parametrize("ema", [None, {"decay": 0.5}], ids=["plain", "averaged"])
@pytest.mark.slow
def test_peft_loads_the_adapters_of_a_checkpoint(api: Any, ema: Any, tmp_path: Path) -> None:
    trainer = api(tmp_path, ema=ema)
    trainer.train()
    loaded = peft.PeftModel.from_pretrained(base(), last(trainer))
    assert torch.equal(scores(loaded), scores(trainer.model))
    assert not (last(trainer) / "config.json").exists(), "from_pretrained of transformers cannot load it"


@pytest.mark.exhaustive(every=8)
@APIS
@pytest.mark.parametrize("ema", [None, {"decay": 0.5}], ids=["plain", "averaged"])
@pytest.mark.slow
def test_adapters_alone_are_saved_and_resumed_exactly(api: Any, ema: Any, tmp_path: Path) -> None:
    whole = api(tmp_path / "whole", ema=ema)
    whole.train()

    class StopError(Exception):
        pass

    def leave(trainer: Any) -> None:
        if trainer.iter == 4:
            raise StopError

    cut = api(tmp_path / "cut", save_trainable_only=True, ema=ema)
    cut.register_hooks([CallbackHook(before_step=leave)])
    with pytest.raises(StopError):
        cut.train()
    resumed = api(tmp_path / "cut", save_trainable_only=True, resume=True, ema=ema)
    resumed.train()
    for left, right in zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(left, right)
    names = [*load_file(last(resumed) / "model.safetensors")]
    assert names
    assert all("lora_" in name for name in names)
    if ema is not None:
        assert all("lora_" in name for name in load_file(last(resumed) / "training_weights.safetensors"))
    files = verify(last(resumed)).files
    assert {"adapter_config.json", "adapter_model.safetensors"} < set(files)
    loaded = peft.PeftModel.from_pretrained(base(), last(resumed))
    assert torch.equal(scores(loaded), scores(whole.model))


def test_the_card_says_how_to_load_it(tmp_path: Path) -> None:
    trainer = objects(tmp_path, save_trainable_only=True, ema={"decay": 0.5})
    trainer.train()
    card = (last(trainer) / "README.md").read_text()
    assert "`peft.PeftModel.from_pretrained(base, folder)` adds the adapters to `base`, the original GPT2LMHead" in card
    assert "has the trained weights only" in card
    assert "training_weights.safetensors" in card


def test_a_checkpoint_of_adapters_does_not_resume_a_complete_model(tmp_path: Path) -> None:
    objects(tmp_path, save_trainable_only=True).train()
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: .*base_layer"):
        objects(tmp_path, resume=True)


def test_a_second_adapter_has_its_own_folder(tmp_path: Path) -> None:
    trainer = objects(tmp_path)
    trainer.model.add_adapter("other", copy.deepcopy(trainer.model.peft_config["default"]))
    trainer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "other" / "adapter_model.safetensors").exists()


def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    settings = TrainingConfig(
        output_dir=str(tmp_path), batch_size=4, num_epochs=2, metrics=[], lr=0.05, device="cpu", progress_bar=False,
        load_best_model_at_end=True, save_trainable_only=True,
    )  # fmt: skip
    trainer = Trainer(with_adapters(), settings, DATA, DATA)
    trainer.train()
    best = load_file(tmp_path / "checkpoints" / "model_best" / "model.safetensors")
    assert all(torch.equal(trainer.model.state_dict()[name], value) for name, value in best.items())


def test_without_frozen_weights_there_is_no_config_for_from_pretrained(tmp_path: Path) -> None:
    model = base()
    model.transformer.wte.requires_grad_(False)
    for only in (False, True):
        settings = TrainingConfig(output_dir=str(tmp_path), save_trainable_only=only, metrics=[], device="cpu")
        Trainer(model, settings, DATA).save(tmp_path / str(only))
        assert (tmp_path / str(only) / "config.json").exists() is not only
        card = (tmp_path / str(only) / "README.md").read_text()
        assert ("GPT2LMHeadModel.from_pretrained(folder)` of transformers" in card) is not only


def test_a_frozen_backbone_is_left_out_of_checkpoints(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    settings = TrainingConfig(output_dir=str(tmp_path), save_trainable_only=True, metrics=[], device="cpu")
    data = torch.utils.data.TensorDataset(torch.randn(16, 5), torch.arange(16) % 2)
    Trainer(model, settings, data).train()
    names = {*load_file(tmp_path / "final_epoch" / "model.safetensors")}
    assert names == {name for name in model.state_dict() if not name.startswith("0.")}


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("ema", [None, {"decay": 0.5}], ids=["plain", "averaged"])
def test_a_layer_that_is_trained_for_a_while_only_is_saved_with_the_trainable_weights(ema: Any, tmp_path: Path) -> None:
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def trainer(name: str, steps: int, **settings: Any) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        model[:2].requires_grad_(False)
        config = TrainingConfig(
            output_dir=tmp_path / name, max_steps=steps, batch_size=4, lr=0.1, lr_scheduler_type=None, optimizer="SGD",
            save_trainable_only=True, ema=ema, **settings,
        )  # fmt: skip
        made = Trainer(model, config, data)

        def freeze(trainer: Any) -> None:
            model[0].requires_grad_(2 <= trainer.iter < 4)

        made.register_hooks([CallbackHook(before_step=freeze)])
        made.train()
        return made

    whole = trainer("whole", 8)
    for steps in (4, 6, 8):
        resumed = trainer("cut", steps, resume_from_checkpoint=steps > 4, save_steps=4)
    for left, right in zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(left, right)
    saved = load_file(tmp_path / "cut/final_epoch/model.safetensors")
    assert {"0.weight", "0.bias", "2.weight", "2.bias"} == saved.keys()


def sharded(folder: str) -> dict[str, Tensor]:
    """The weights after a training with ZeRO stage 3, whose checkpoint has the adapters."""
    trainer = objects(Path(folder), zero_stage=3, save_trainable_only=True)
    trainer.train()
    weights = peft.get_peft_model_state_dict(trainer.model, save_embedding_layers=False)
    return {name: value.full_tensor().detach() for name, value in weights.items()}


@pytest.mark.exhaustive
def test_adapters_of_a_sharded_model_are_complete(tmp_path: Path) -> None:
    weights = on_ranks(sharded, str(tmp_path))[0]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    folder = next(tmp_path / "checkpoints" / name for name in ("final_epoch", "model_final", "3") if name in names)
    assert verify(folder)
    loaded = peft.PeftModel.from_pretrained(base(), folder)
    found = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name], value)


class WithOwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(inputs).tanh())
        return scores

    def compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels)


def test_adapters_of_a_model_with_its_own_loss_get_the_fields_of_its_forward(tmp_path: Path) -> None:
    model = peft.get_peft_model(WithOwnLoss(), peft.LoraConfig(target_modules=["layer"], r=2))
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    data = ColumnDataset(inputs=inputs, labels=(inputs[:, 0] > 0).long())
    config = quiet(tmp_path, num_epochs=2, batch_size=4, learning_rate=0.1)
    trainer = Trainer(model, config, data, data)
    results = trainer.train()
    assert results["accuracy"] > 0.7
    assert results["loss"] < 0.4
    assert trainer.predict(data).shape == (16, 2)

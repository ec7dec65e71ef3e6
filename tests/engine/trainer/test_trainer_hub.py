"""A trained model goes to the hub with all that belongs to it, and comes back from there."""

from pathlib import Path
from typing import Any

import torch

from trainwright import Trainer, TrainerConfig
from trainwright.models import BertTextClassification, BertTextClassificationConfig, Model, ModelCard

SIZES = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 8,
}  # fmt: skip


class Tokens:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"token_ids": torch.arange(5) + index, "attention_mask": torch.ones(5).long(), "labels": index % 2}


def trained(folder: Path, **parts: Any) -> Trainer:
    model = BertTextClassification(BertTextClassificationConfig(id2label={0: "no", 1: "yes"}, **SIZES))
    config = TrainerConfig(output_dir=folder, task="text_classification", num_dataloader_workers=0)
    trainer = Trainer(model, config, Tokens(), Tokens(), **parts)
    trainer.train()
    return trainer


def test_a_model_is_pushed_and_loaded(hub: Any, tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run")
    url = trainer.push_to_hub("me/classifier", commit_message="First")
    assert url.startswith(hub.url)
    loaded = Model.load("me/classifier")
    for left, right in zip(loaded.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(left, right)
    card = (hub.folder("models", "me/classifier") / "README.md").read_text()
    assert "text_classification" in card or "text-classification" in card
    assert str(tmp_path) not in card  # no path of this machine goes out


def test_what_is_on_the_hub_can_be_gone_on_with_and_begun_from(hub: Any, tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run")
    trainer.push_to_hub("me/classifier")
    other = BertTextClassification(BertTextClassificationConfig(id2label={0: "no", 1: "yes"}, **SIZES))
    config = TrainerConfig(
        output_dir=tmp_path / "next", task="text_classification", num_dataloader_workers=0,
        init_weights_from="me/classifier",
    )  # fmt: skip
    begun = Trainer(other, config, Tokens())
    for left, right in zip(begun.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_card_of_ones_own_is_in_every_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, model_card=ModelCard(model_name="Mine", model_overview="Says yes or no."))
    for folder in ("epoch_1", "final_epoch", "checkpoints/model_best"):
        assert "Says yes or no." in (tmp_path / folder / "README.md").read_text()

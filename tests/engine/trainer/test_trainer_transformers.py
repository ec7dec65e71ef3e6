"""Models of the transformers library run as they are: same weights as a loop by hand, loss, metrics, resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from trainwright import Trainer, TrainingConfig
from trainwright.checkpoint import verify
from trainwright.data import EpochSampler

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
LENGTH, WORDS = 12, 40


class Sentences(Dataset[Any]):
    """Class 1 if the first word is in the upper half."""

    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(size))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones(LENGTH).long(), "labels": int(tokens[0] >= WORDS / 2)}


def classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {"lr": 5e-3, "num_epochs": 2, "lr_scheduler_type": None, "progress_bar": False, "early_stopping": None}
    return TrainingConfig(output_dir=folder, **{**given, **settings})


def test_a_classifier_gets_the_weights_of_a_loop_by_hand(tmp_path: Path) -> None:
    data = Sentences(48)
    trainer = Trainer(classifier(), config(tmp_path), data, data)
    results = trainer.train()
    theirs = classifier()
    optimizer = torch.optim.Adam(theirs.parameters(), lr=5e-3, fused=True)
    order = iter(EpochSampler(data, 8, shuffle=True, seed=42))
    torch.manual_seed(42)
    theirs.train()
    for _ in range(12):
        rows = [data[index] for index in next(order)]
        batch = {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
        theirs(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, left), right in zip(trainer.model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(left, right), name
    assert set(results) == {"loss", "accuracy"}


def test_a_classifier_learns_and_its_checkpoint_is_one_of_transformers(tmp_path: Path) -> None:
    settings = {"num_epochs": 20, "batch_size": 16, "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    trainer = Trainer(classifier(), config(tmp_path, **settings), Sentences(256), Sentences(64))
    trainer.train()
    results = trainer.evaluate()
    assert results["accuracy"] > 0.9
    reloaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoints" / "model_best")
    batch = {"input_ids": Sentences(64).tokens}
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(**batch).logits, trainer.model.eval()(**batch).logits)


def test_a_language_model_with_tied_weights_resumes(tmp_path: Path) -> None:
    class Lines(Sentences):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": self.tokens[index], "labels": self.tokens[index]}

    def gpt() -> Any:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
        )

    data = Lines(32)
    whole = Trainer(gpt(), config(tmp_path / "whole"), data, data)
    results = whole.train()
    Trainer(gpt(), config(tmp_path / "cut", max_steps=5), data, data).train()
    resumed = Trainer(gpt(), config(tmp_path / "cut", resume_from_checkpoint=True), data, data)
    assert resumed.train() == results
    for left, right in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_verify_reads_back_a_checkpoint_with_files_of_transformers(tmp_path: Path) -> None:
    Trainer(classifier(), config(tmp_path), Sentences(16)).train()
    assert "config.json" in verify(tmp_path / "final_epoch", deep=True).files

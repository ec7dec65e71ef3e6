"""What the metrics of a run compare, and where the default one is left out."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig

PICTURES = torch.rand(32, 1, 4, 4, generator=torch.Generator().manual_seed(1))
CLASSES = torch.randint(3, (32,), generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(PICTURES, CLASSES)
VOCABULARY = 11
TEXTS = (torch.arange(32)[:, None] + torch.arange(6)) % VOCABULARY  # each token is the one before, plus one


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {"progress_bar": False, "tensorboard": None, "batch_size": 8, "lr": 0.01, "save_enabled": False}
    return TrainingConfig(output_dir=folder, **{**given, **settings})


class AutoEncoder(nn.Module):
    """``gives_pair``: also what a variational one gives."""

    def __init__(self, gives_pair: bool) -> None:
        super().__init__()
        self.layer, self.gives_pair = nn.Linear(16, 16), gives_pair

    def forward(self, x: Tensor) -> Any:
        out = torch.sigmoid(self.layer(x.flatten(1)))
        return (out, out.mean(1)) if self.gives_pair else out


class Reconstructing(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        out = model(inputs[0])
        return F.mse_loss(out[0] if isinstance(out, tuple) else out, inputs[0].flatten(1))


@pytest.mark.parametrize("gives_pair", [True, False])
def test_a_reconstruction_has_no_accuracy_and_none_ends_its_run(
    gives_pair: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainwright")
    settings = config(tmp_path, num_epochs=8, print_steps=1000)
    trainer = Reconstructing(AutoEncoder(gives_pair), settings, DATA, DATA)
    assert set(trainer.train()) == {"loss"}
    assert trainer.epoch == 8
    assert "accuracy" not in trainer.storage.latest()
    assert any("No accuracy is computed" in record.getMessage() for record in caplog.records)


def test_a_loss_that_is_not_of_classes_has_no_accuracy(tmp_path: Path) -> None:
    numbers = TensorDataset(PICTURES.flatten(1), (CLASSES > 0).float()[:, None])
    trainer = Trainer(nn.Linear(16, 1), config(tmp_path, loss="MSELoss"), numbers, numbers)
    assert set(trainer.train()) == {"loss"}
    asked = Trainer(nn.Linear(16, 1), config(tmp_path, loss="MSELoss", metric="Accuracy"), numbers, numbers)
    assert set(asked.train()) == {"loss", "accuracy"}


def test_a_classification_by_a_loss_of_the_users_own_keeps_its_accuracy(tmp_path: Path) -> None:
    class Smoothed(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return F.cross_entropy(model(inputs[0].flatten(1)), inputs[1], label_smoothing=0.1)

    trainer = Smoothed(nn.Linear(16, 3), config(tmp_path), DATA, DATA)
    assert set(trainer.train()) == {"loss", "accuracy"}
    assert "accuracy" in trainer.storage.latest()


class NextToken(nn.Module):
    """Predicts ``input + step`` with certainty; ``shifts``: its loss is that of the next token, as in transformers."""

    def __init__(self, step: int, shifts: bool) -> None:
        super().__init__()
        self.scale, self.step, self.shifts = nn.Parameter(torch.tensor(3.0)), step, shifts

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.scale * F.one_hot((input_ids + self.step) % VOCABULARY, VOCABULARY).float()
        if labels is None:
            return {"logits": scores}
        of, to = (scores[:, :-1], labels[:, 1:]) if self.shifts else (scores, labels)
        return {"loss": F.cross_entropy(of.transpose(1, 2), to), "logits": scores}


@pytest.mark.parametrize(("step", "shifts", "accuracy"), [(1, True, 1.0), (0, True, 0.0), (0, False, 1.0)])
def test_labels_are_shifted_where_the_loss_shifts_them(
    step: int, shifts: bool, accuracy: float, tmp_path: Path
) -> None:
    data = [{"input_ids": row, "labels": row} for row in TEXTS]
    trainer = Trainer(NextToken(step, shifts), config(tmp_path, num_epochs=1, lr=1e-6), data, data)
    assert trainer.train()["accuracy"] == accuracy
    assert trainer.storage.latest()["accuracy"][0] == accuracy  # of the training


def test_a_first_batch_whose_labels_are_all_ignored_does_not_decide_whether_they_are_shifted(tmp_path: Path) -> None:
    data: list[dict[str, Tensor]] = [{"input_ids": row, "labels": row} for row in TEXTS]
    data[0] = {"input_ids": TEXTS[0], "labels": torch.full_like(TEXTS[0], -100)}
    settings = config(tmp_path, eval_batch_size=1)
    assert Trainer(NextToken(1, shifts=True), settings, data, data).evaluate()["accuracy"] == 1.0


def test_labels_that_are_shifted_out_have_no_weight_in_the_loss(tmp_path: Path) -> None:
    rows = [torch.cat([row[: 2 + n % 4], row.new_full((4 - n % 4,), -100)]) for n, row in enumerate(TEXTS)]
    data = [{"input_ids": row, "labels": labels} for row, labels in zip(TEXTS, rows, strict=True)]
    model = NextToken(1, shifts=True)
    losses = [
        Trainer(model, config(tmp_path / str(size), eval_batch_size=size), data, data).evaluate()["loss"]
        for size in (1, 5, 32)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_a_causal_language_model_of_transformers_has_the_accuracy_of_next_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "n_positions": 6, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    data = [{"input_ids": row, "labels": row} for row in TEXTS]
    trainer = Trainer(model, config(tmp_path, num_epochs=1), data, data)
    with torch.no_grad():
        found = model.eval()(TEXTS).logits.argmax(-1)
    assert trainer.evaluate()["accuracy"] == pytest.approx((found[:, :-1] == TEXTS[:, 1:]).float().mean().item())

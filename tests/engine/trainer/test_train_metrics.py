"""Metrics of training batches are computed from the outputs of the step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig

# B batch, F features, C classes.
INPUTS = torch.randn(50, 6, generator=torch.Generator().manual_seed(5))


LABELS = torch.randint(3, (50,), generator=torch.Generator().manual_seed(6))


PAIRS = TensorDataset(INPUTS, LABELS)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {"lr_scheduler_type": None, "learning_rate": 0.01, "dataloader_drop_last": False, "progress_bar": False}
    return TrainingConfig(output_dir=folder, **{**given, **settings})


def trained(kind: type[Trainer], folder: Path, **settings: Any) -> Trainer:
    trainer = kind(make(), config(folder, **settings), PAIRS, PAIRS)
    trainer.train()
    return trainer


def assert_equal_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, left), right in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("metrics", [None, ["accuracy"], [{"name": "accuracy", "ignore_index": 255}]])
def test_metrics_ignore_the_class_that_the_loss_ignores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metrics: Any
) -> None:
    caplog.set_level("INFO", "trainwright")
    labels = LABELS.clone()
    labels[::4] = 255
    data, given = TensorDataset(INPUTS, labels), {} if metrics is None else {"metrics": metrics}
    trainer = Trainer(make(), config(tmp_path, loss=nn.CrossEntropyLoss(ignore_index=255), **given), data, data)
    results = trainer.train()
    kept = labels != 255
    right = trainer.model.eval()(INPUTS).argmax(dim=1) == labels
    assert results["accuracy"] == pytest.approx(right[kept].double().mean().item())
    assert "No training metric" not in caplog.text


def test_soft_labels_in_training_turn_its_metric_off_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = [(x, torch.nn.functional.one_hot(label, 3) * 0.9 + 1 / 30) for x, label in PAIRS]
    trainer = Trainer(make(), config(tmp_path, num_epochs=1, metrics=["Accuracy"]), data, PAIRS)
    assert trainer.train().keys() == {"loss", "accuracy"}
    assert "No training metric is computed: metric Accuracy: cannot count" in caplog.text
    assert "accuracy" not in trainer.storage.latest()


def test_update_metrics_gives_the_means_of_the_epoch_to_a_step_of_ones_own(tmp_path: Path) -> None:
    class Mine(Trainer):
        def train_step(self, model: nn.Module, inputs: Any) -> dict[str, Any]:
            loss = self.compute_loss(model, inputs)
            loss.backward()
            epoch_loss, epoch_metric = self.update_metrics(model, inputs, loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            shown.append((loss.item(), epoch_loss, epoch_metric))
            return {"step_loss": loss.item(), "epoch_loss": epoch_loss, "epoch_metric": epoch_metric}

    shown: list[tuple[float, float, float]] = []
    mine = trained(Mine, tmp_path / "mine")
    assert_equal_weights(mine.model, trained(Trainer, tmp_path / "plain").model)
    for epoch in (shown[:7], shown[7:]):
        losses = [loss for loss, _, _ in epoch]
        for count, (_, mean, metric) in enumerate(epoch, start=1):
            assert mean == pytest.approx(sum(losses[:count]) / count)
            assert 0 <= metric <= 1
    assert shown[6][2] * 50 == pytest.approx(round(shown[6][2] * 50), abs=1e-4)  # of all 50 samples

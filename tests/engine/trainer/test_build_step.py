"""What a step of the Python API consists of: the methods that a user may override, and what each must return."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.engine.trainer.contracts import (
    INPUTS,
    LABELS,
    PAIRS,
    Net,
    assert_equal_weights,
    by_hand,
    config,
    make,
    pair_loss,
)
from trainwright import Trainer
from trainwright.config.errors import ConfigError
from trainwright.data import build_image_train_loader
from trainwright.hooks import Callback


def test_a_step_without_a_loss_is_an_error(tmp_path: Path) -> None:
    class NoLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            model(inputs[0])

    class NoLogs(Trainer):
        def train_step(self, model: Any, inputs: Any) -> Any:
            super().train_step(model, inputs)

    with pytest.raises(ConfigError, match=r"NoLoss.compute_loss .*NoneType"):
        NoLoss(make(Net), config(tmp_path), PAIRS).train()
    with pytest.raises(ConfigError, match=r"NoLogs.train_step returned NoneType; it must return a dict"):
        NoLogs(make(Net), config(tmp_path), PAIRS).train()


def test_every_override_point_is_called_where_the_document_says(tmp_path: Path) -> None:
    calls: list[str] = []

    class Mine(Trainer):
        def prepare_input_batch(self, batch: Any) -> Any:
            calls.append("prepare")
            return super().prepare_input_batch(batch)

        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            calls.append("train_step")
            return super().train_step(model, inputs)

        def training_step(self, batch: Any) -> Tensor:
            calls.append("training_step")
            return super().training_step(batch)

        def optimization_step(self) -> None:
            calls.append("optimization_step")
            super().optimization_step()

        def compute_loss(self, model: Any, inputs: Any) -> Any:
            calls.append("compute_loss")
            return super().compute_loss(model, inputs)

    trainer = Mine(
        make(Net),
        config(tmp_path, num_accumulation_steps=2, max_steps=3),
        train_dataset=PAIRS,
    )
    trainer.train()
    step = ["prepare", "train_step", "training_step", "compute_loss"]
    assert calls == [*step, *step, "optimization_step", *step, "optimization_step"]
    plain = Trainer(
        make(Net),
        config(tmp_path / "b", num_accumulation_steps=2, max_steps=3),
        train_dataset=PAIRS,
    )
    plain.train()
    assert_equal_weights(trainer.model, plain.model)


def test_an_own_train_step_and_an_own_loss_take_any_batch(tmp_path: Path) -> None:
    three = TensorDataset(INPUTS, LABELS, torch.ones(50))

    class Weighted(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            x, y, weight = inputs
            return (F.cross_entropy(model(x), y, reduction="none") * weight).mean()

    class OwnStep(Trainer):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            x, y, _ = inputs
            self.optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            self.optimizer.step()
            return {"step_loss": loss.detach()}

    for kind in (Weighted, OwnStep):
        trainer = kind(make(Net), config(tmp_path / kind.__name__), train_dataset=three)
        trainer.train()
        for left, right in zip(
            trainer.model.parameters(),
            by_hand(make(Net), pair_loss).parameters(),
            strict=True,
        ):
            torch.testing.assert_close(left, right)  # weight 1: another sum, the same mean
    assert Weighted(make(Net), config(tmp_path / "e"), train_dataset=three).evaluate(three)["loss"] > 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_optimization_step_assigned_during_training_receives_unscaled_gradients(
    accumulation: int, tmp_path: Path
) -> None:
    class Assigns(Callback):
        trainer: Any

        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            if logs["global_step"] == 2 * accumulation:  # steps before are the trainer's
                self.trainer.optimization_step = self.step

        def step(self) -> None:
            trainer = self.trainer
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()])))
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

    norms: list[float] = []
    settings = {"mixed_precision": "fp16", "optimizer": "SGD", "num_epochs": 1, "batch_size": 10}
    assigns = Assigns()
    trainer = Trainer(
        make(Net), config(tmp_path, gradient_accumulation_steps=accumulation, **settings), PAIRS, callbacks=[assigns]
    )
    assigns.trainer = trainer
    trainer.train()
    assert len(norms) == trainer.iter - 2
    assert max(norms) < 10  # the scale is 65536


def test_the_mixup_function_of_a_loader_is_applied_to_training_batches(tmp_path: Path) -> None:
    def mixup(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images * 0, labels * 0

    seen: list[tuple[float, float]] = []

    class Sees(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            seen.append((float(inputs[0].abs().sum()), float(inputs[1].sum())))
            return super().compute_loss(model, inputs)

    loader, _, _ = build_image_train_loader(PAIRS, 10, num_workers=0, mixup_func=mixup)
    trainer = Sees(make(Net), config(tmp_path, num_epochs=1, max_steps=3), train_dataloader=loader, eval_dataset=PAIRS)
    trainer.train()
    assert seen[:3] == [(0.0, 0.0)] * 3
    assert seen[3][0] > 0

"""A model in evaluation mode is warned of while it is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.data import build_image_train_loader
from trainwright.engine import TrainerBase
from trainwright.hooks import Callback

DATA = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def config(folder: Path) -> TrainingConfig:
    return TrainingConfig(output_dir=folder, batch_size=4, progress_bar=False, save_enabled=False)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "in evaluation mode" in r.getMessage()]


def test_a_model_that_comes_in_evaluation_mode_is_trained_in_training_mode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    modes: list[bool] = []

    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Tensor:
            if torch.is_grad_enabled():
                modes.append(model.training)
            return F.cross_entropy(model(inputs[0]), inputs[1])

    Mine(make().eval(), config(tmp_path), DATA, DATA).train()
    assert set(modes) == {True}
    assert not warnings_of(caplog)


def test_a_callback_that_leaves_evaluation_mode_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Look(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            self.model.eval()

    Trainer(make(), config(tmp_path), DATA, callbacks=[Look()]).train()
    (warning,) = warnings_of(caplog)
    assert "Sequential is trained in evaluation mode" in warning
    assert "Call model.train()" in warning


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.ones(4), "labels": index % 2}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make()
        self.eval()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layers(x), labels)}


@pytest.mark.parametrize("own_step", [False, True])
def test_a_step_of_the_users_own_that_trains_in_evaluation_mode_is_warned_of(
    own_step: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stepper(TrainerBase):
        def run_step(self) -> None:
            trainer.model(torch.ones(2, 4), torch.tensor([0, 1]))["loss"].backward()
            trainer.optimizer.step()

    cfg = get_config("common/defaults.py")
    cfg.model = LazyCall(Model)()
    cfg.dataloader = {"train": LazyCall(build_image_train_loader)(dataset=LazyCall(Rows)(), num_workers=0)}
    cfg.train.update({"output_dir": str(tmp_path), "train_iter": 4, "train_micro_batch_size": 8})
    trainer = DefaultTrainer(cfg)
    if own_step:
        trainer.model.eval()
        trainer._trainer = Stepper()
    trainer.train()
    assert len(warnings_of(caplog)) == own_step

"""Operators: one call uses a model, one call trains it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import trainwright
from trainwright import TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.ops import NNOperator

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()
DATA = TensorDataset(INPUTS, LABELS)


class Sign(NNOperator):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)

    def __call__(self, values: list[float]) -> bool:
        return bool(self.model(torch.tensor(values)).argmax())


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {"batch_size": 8, "num_epochs": 8, "lr": 0.1, "progress_bar": False, "early_stopping": None, **settings}
    return TrainingConfig(output_dir=folder, **given)


def test_an_operator_of_ones_own_is_trained_where_it_is_used(tmp_path: Path) -> None:
    op = Sign()
    results = op.train(config(tmp_path), train_dataset=DATA, eval_dataset=DATA)
    assert results["accuracy"] > 0.9
    assert op([3.0, 0, 0, 0])
    assert not op([-3.0, 0, 0, 0])
    assert op.trainer.epoch == 8
    other = Sign()
    other.load(tmp_path / "final_epoch")
    assert torch.equal(other.model.weight, op.model.weight)


def test_a_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole, again = Sign(), Sign()
    whole.train(config(tmp_path / "whole", num_epochs=2), DATA)
    again.train(config(tmp_path / "again", num_epochs=2), DATA, resume_checkpoint_path=tmp_path / "whole" / "epoch_1")
    assert again.trainer.run.folder.path == tmp_path / "again"
    assert (tmp_path / "again" / "epoch_2").exists()
    assert not (tmp_path / "again" / "epoch_1").exists()
    assert torch.equal(again.model.weight, whole.model.weight)


def test_what_is_not_there_yet_is_said() -> None:
    with pytest.raises(AttributeError, match=r"NNOperator.model: not set"):
        NNOperator().model  # noqa: B018
    with pytest.raises(AttributeError, match=r"Sign.trainer: none yet; call train"):
        Sign().trainer  # noqa: B018
    with pytest.raises(ConfigError, match=r"got 'resnet19'.*resnet"):
        trainwright.ops.image_embedding.timm(model_name="resnet19").get_op()


def test_an_embedding_is_what_the_classifier_looks_at(tmp_path: Path) -> None:
    import timm

    torch.manual_seed(0)
    op = trainwright.ops.image_embedding.timm(model_name="resnet18", num_classes=10).get_op()
    image = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / "image.png")
    embedding = op(image)
    assert embedding.shape == (512,)
    assert op.model.training
    reference = timm.create_model("resnet18", num_classes=0)
    reference.load_state_dict(op.model.state_dict(), strict=False)
    pixels = op.transform(Image.fromarray(image)).unsqueeze(0)
    with torch.no_grad():
        np.testing.assert_allclose(embedding, reference.eval()(pixels)[0].numpy(), rtol=1e-5, atol=1e-6)
    for same in (tmp_path / "image.png", Image.fromarray(image), pixels[0]):
        np.testing.assert_array_equal(op(same), embedding)

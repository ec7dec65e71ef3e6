"""A setting has the same effect in both APIs: equal weights, which a plain loop of torch has too."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim import lr_scheduler

from tests.toys import Classifier, assert_equal_weights, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.errors import ConfigError
from trainwright.config.settings import place_of
from trainwright.data import CyclicSampler
from trainwright.optim import freeze_bn

APIS = ("Python", "config file")
SAMPLES, MICRO, EPOCHS, RATE = 24, 8, 3, 0.5


def net() -> Classifier:
    torch.manual_seed(0)
    return Classifier(body=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)))


def data() -> Any:
    return points(SAMPLES)


def made(api: str, folder: Path, *, build: Any = net, **settings: Any) -> Any:
    """A trainer with these settings, by their names in ``TrainingConfig``, over data that are not shuffled."""
    if api == "Python":
        usual = {"optimizer": "SGD", "batch_size": MICRO, "num_epochs": EPOCHS, "learning_rate": RATE, "seed": 7}
        usual |= {"dataloader_shuffle": False, "metrics": None, "max_grad_norm": None}
        return Trainer(build(), quiet(folder, **{**usual, **settings}), data())
    cfg = file_config(
        folder, build, data, train_micro_batch_size=MICRO, train_epoch=EPOCHS, log_period=1, seed=7,
        scheduler=LazyCall(lr_scheduler.ConstantLR)(factor=1.0), input_placement_device="cpu",
    )  # fmt: skip
    cfg._set_flag("allow_objects", True)
    cfg.dataloader.train.sampler = partial(CyclicSampler, shuffle=False)
    cfg.optim = LazyCall(torch.optim.SGD)(params={}, lr=RATE)
    for name, value in settings.items():
        OmegaConf.update(cfg, place_of(name), value)
    return DefaultTrainer(cfg)


def change(trainer: Any, **settings: Any) -> None:
    """Between two trainings, as a user changes them."""
    if isinstance(trainer, Trainer):
        trainer.config.update(settings)
    for name, value in {} if isinstance(trainer, Trainer) else settings.items():
        OmegaConf.update(trainer.cfg, place_of(name), value)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, *, epochs: int = EPOCHS) -> nn.Module:
    samples = [data()[number] for number in range(SAMPLES)]
    for first in [*range(0, SAMPLES, MICRO)] * epochs:
        batch = samples[first : first + MICRO]
        labels = torch.tensor([one["labels"] for one in batch])
        model(torch.stack([one["inputs"] for one in batch]), labels)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def with_still_norm() -> Classifier:
    model = net()
    model.body[1].eval()
    return model


@pytest.mark.parametrize("api", APIS)
def test_layer_decay_gives_each_layer_its_rate(api: str, tmp_path: Path) -> None:
    trainer = made(api, tmp_path, layer_decay=0.5)
    trainer.train()
    model = net()
    rates = zip(model.body, (RATE / 4, RATE / 2, 0.0, RATE), strict=True)  # Tanh has no parameters
    optimizer = torch.optim.SGD([{"params": [*layer.parameters()], "lr": rate} for layer, rate in rates])
    assert_equal_weights(trainer.model, plain_loop(model, optimizer))
    assert trainer.run.spec.layer_decay == 0.5


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("value", "text"), [(1.5, "got 1.5"), ("half", "got 'half'"), (True, "got True")])
def test_a_wrong_layer_decay_is_refused_with_its_place(api: str, value: Any, text: str, tmp_path: Path) -> None:
    place = {"Python": r"TrainingConfig\.layer_decay", "config file": r"optim\.params\.layer_decay"}[api]
    with pytest.raises(ConfigError, match=rf"{place}.*{text}.*it must be a number in \(0, 1\]"):
        made(api, tmp_path, layer_decay=value)


@pytest.mark.parametrize("api", APIS)
def test_freeze_bn_keeps_the_statistics(api: str, tmp_path: Path) -> None:
    trainer = made(api, tmp_path, freeze_bn=True)
    trainer.train()
    model = with_still_norm()
    assert_equal_weights(trainer.model, plain_loop(model, torch.optim.SGD(model.parameters(), lr=RATE)))
    assert not torch.equal(trainer.model.body[1].weight, net().body[1].weight)  # its scale is trained


@pytest.mark.parametrize("api", APIS)
def test_freeze_bn_is_used_by_the_next_training(api: str, tmp_path: Path) -> None:
    late, then = made(api, tmp_path / "late"), made(api, tmp_path / "then", freeze_bn=True)
    change(late, freeze_bn=True)
    for one in (late, then):
        one.train()
    assert_equal_weights(late.model, then.model)
    change(late, freeze_bn=False, num_epochs=2 * EPOCHS)
    late.train()
    assert late.model.body[1].num_batches_tracked == EPOCHS * SAMPLES // MICRO  # those of the second training
    model = with_still_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    plain_loop(model, optimizer)
    assert_equal_weights(late.model, plain_loop(model.train(), optimizer))


@pytest.mark.parametrize("api", APIS)
def test_a_norm_that_is_in_evaluation_mode_is_told_the_setting(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for is_frozen in (True, False):
        with caplog.at_level(logging.WARNING, logger="trainwright"):
            made(api, tmp_path, build=with_still_norm, freeze_bn=is_frozen).train()
        told = [one.getMessage() for one in caplog.records if "is in evaluation mode" in one.getMessage()]
        assert len(told) == (not is_frozen)
    assert {"Python": "freeze_bn=True", "config file": "train.freeze_bn=True"}[api] in told[0]


@pytest.mark.parametrize("api", APIS)
def test_a_users_own_freeze_bn_stays(api: str, tmp_path: Path) -> None:
    trainer = made(api, tmp_path)
    freeze_bn(trainer.model)
    trainer.train()
    assert trainer.model.body[1].num_batches_tracked == 0

"""A setting has the same effect in both APIs: equal weights, which a plain loop of torch has too."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

from tests.engine.test_callbacks_of_both_apis import MeanLoss, Net
from tests.toys import Results, assert_equal_weights, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.errors import ConfigError
from trainwright.config.settings import place_of
from trainwright.data import CyclicSampler
from trainwright.hooks import CallbackHook
from trainwright.optim import freeze_bn

APIS = ("Python", "config file")
SAMPLES, MICRO, EPOCHS, RATE = 24, 8, 3, 0.5


def net() -> Net:
    torch.manual_seed(0)
    return Net(body=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)))


def data() -> Any:
    return points(SAMPLES)


def held_out() -> Any:
    return points(12, seed=3)


def made(api: str, folder: Path, *, build: Any = net, evaluator: Any = None, **settings: Any) -> Any:
    """A trainer with these settings, by their names in ``TrainingConfig``, over data that are not shuffled.

    ``evaluator``: of an evaluation after each epoch.
    """
    tests = None if evaluator is None else held_out
    if api == "Python":
        usual = {"optimizer": "SGD", "batch_size": MICRO, "num_epochs": EPOCHS, "learning_rate": RATE, "seed": 7}
        usual |= {"dataloader_shuffle": False, "metrics": None, "max_grad_norm": None}
        usual |= {"eval_batch_size": MICRO, "eval_strategy": "no" if tests is None else "epoch"}
        parts = {"eval_dataset": tests and tests(), "metrics_handler": evaluator}
        return Trainer(build(), quiet(folder, **{**usual, **settings}), data(), **parts)
    cfg = file_config(
        folder, build, data, tests, train_micro_batch_size=MICRO, train_epoch=EPOCHS, log_period=1, seed=7,
        scheduler=LazyCall(lr_scheduler.ConstantLR)(factor=1.0), input_placement_device="cpu",
        test_micro_batch_size=MICRO,
    )  # fmt: skip
    cfg._set_flag("allow_objects", True)
    cfg.dataloader.train.sampler = partial(CyclicSampler, shuffle=False)
    cfg.optim = LazyCall(torch.optim.SGD)(params={}, lr=RATE)
    if evaluator is not None:
        cfg.train.evaluation.update(evaluator=evaluator, eval_after_n_epoch=1)
    if "greater_is_better" in settings:
        settings["greater_is_better"] = "max" if settings["greater_is_better"] else "min"
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


def with_still_norm() -> Net:
    model = net()
    model.body[1].eval()
    return model


def weights_in(folder: Path, name: str) -> dict[str, Any]:
    return load_file(next(folder.rglob(name)) / "model.safetensors")


FIRST_IS_BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
LAST = {"Python": "final_epoch", "config file": "model_final"}


def test_load_best_model_at_end_loads_the_same_weights(tmp_path: Path) -> None:
    found = {}
    for api in APIS:
        trainer = made(api, tmp_path / api, evaluator=MeanLoss(), **FIRST_IS_BEST)
        losses: list[float] = []
        trainer.register_hooks([CallbackHook(after_step=lambda t, to=losses: to.extend(t.last_eval_results.values()))])
        results = trainer.train()
        found[api] = trainer.model.state_dict()
        assert results["loss"] == losses[0] > losses[-1]
        best, last = (weights_in(tmp_path / api, name) for name in ("model_best", LAST[api]))
        assert all(torch.equal(value, best[name]) for name, value in found[api].items())
        assert not torch.equal(best["body.0.weight"], last["body.0.weight"])
    plain = net()
    plain_loop(plain, torch.optim.SGD(plain.parameters(), lr=RATE), epochs=1)
    for weights in found.values():
        assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("api", APIS)
def test_a_training_after_it_continues_with_the_latest_weights(api: str, tmp_path: Path) -> None:
    trainer = made(api, tmp_path / "cut", evaluator=MeanLoss(), **FIRST_IS_BEST)
    best = trainer.train()
    again = made(api, tmp_path / "cut", evaluator=MeanLoss(), **FIRST_IS_BEST, resume_from_checkpoint=True)
    assert again.train() == best  # nothing is left to train
    assert_equal_weights(again.model, trainer.model)
    change(trainer, num_epochs=2 * EPOCHS)
    assert trainer.train() == best
    made(api, tmp_path / "whole", evaluator=MeanLoss(), **FIRST_IS_BEST, num_epochs=2 * EPOCHS).train()
    cut, whole = (weights_in(tmp_path / name, LAST[api]) for name in ("cut", "whole"))
    assert all(torch.equal(value, whole[name]) for name, value in cut.items())


@pytest.mark.parametrize(
    ("api", "text"),
    [("Python", r"TrainingConfig\.load_best_model_at_end: got True, but nothing is eval.*Pass an eval_dataset"),
     ("config file", r"train\.load_best_model_at_end: got True, but nothing is eval.*Set dataloader\.test")],
)  # fmt: skip
def test_a_best_model_that_cannot_be_known_is_an_error(api: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        made(api, tmp_path, load_best_model_at_end=True)
    missing = {**FIRST_IS_BEST, "metric_for_best_model": "score"}
    with pytest.raises(
        ConfigError, match=r"the evaluation computed no 'score', which .*load_best_model_at_end needs.*'scores'"
    ):
        made(api, tmp_path, evaluator=Results(scores=[0.5]), **missing).train()


@pytest.mark.parametrize("api", APIS)
def test_evaluations_each_so_many_epochs_and_at_the_end(api: str, tmp_path: Path) -> None:
    trainer = made(api, tmp_path, evaluator=MeanLoss(), metric_for_best_model="loss", eval_every_n_epoch=2)
    trainer.train()
    at = [iteration for _, iteration in trainer.storage.history("eval_loss").values()]
    assert at == [2 * SAMPLES // MICRO - 1, EPOCHS * SAMPLES // MICRO]


def test_an_evaluation_each_so_many_epochs_needs_epochs(tmp_path: Path) -> None:
    for settings in ({"eval_strategy": "no"}, {"eval_strategy": "step", "eval_steps": 3}):
        with pytest.raises(ConfigError, match=r"TrainingConfig.eval_every_n_epoch: got 2 with eval_strategy="):
            quiet(tmp_path, eval_every_n_epoch=2, **settings)
    assert quiet(tmp_path, check_val_every_n_epoch=2).eval_every_n_epoch == 2


@pytest.mark.parametrize("api", APIS)
def test_the_backend_of_graph_mode(api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = {"Python": "TrainingConfig.graph_backend", "config file": "graph.backend"}[api]
    with pytest.raises(ConfigError, match=rf"^{where}: got 'inducter'. Did you mean 'inductor'"):
        made(api, tmp_path, graph=True, graph_backend="inducter")
    caplog.set_level(logging.INFO, "trainwright")
    made(api, tmp_path, graph=True, graph_backend="aot_eager").train()
    assert "compiled by aot_eager" in caplog.text


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
def test_a_norm_that_is_in_evaluation_mode_names_the_setting(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for is_frozen in (True, False):
        with caplog.at_level(logging.WARNING, logger="trainwright"):
            made(api, tmp_path, build=with_still_norm, freeze_bn=is_frozen).train()
        messages = [one.getMessage() for one in caplog.records if "is in evaluation mode" in one.getMessage()]
        assert len(messages) == (not is_frozen)
    assert {"Python": "freeze_bn=True", "config file": "train.freeze_bn=True"}[api] in messages[0]


def with_frozen_norm() -> nn.Module:
    model = with_still_norm()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.requires_grad_(False)
    return model


@pytest.mark.parametrize("api", APIS)
def test_a_frozen_norm_in_evaluation_mode_stays_so_without_a_warning(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer = made(api, tmp_path, build=with_frozen_norm)
        trainer.train()
    assert trainer.model.body[1].num_batches_tracked == 0
    assert "is in evaluation mode" not in caplog.text


@pytest.mark.parametrize("api", APIS)
def test_a_users_own_freeze_bn_stays(api: str, tmp_path: Path) -> None:
    trainer = made(api, tmp_path)
    freeze_bn(trainer.model)
    trainer.train()
    assert trainer.model.body[1].num_batches_tracked == 0

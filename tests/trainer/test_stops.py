"""Settings of a run's beginning and end, in both APIs: max_time, eval_on_start, deterministic, clipping by value."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.toys import Classifier, file_config, pairs, pairs_net, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.base.errors import ConfigError
from trainwright.config.validation import seconds_of
from trainwright.data import ColumnDataset
from trainwright.hooks import CallbackHook

DATA = pairs(40)
INPUTS, LABELS = DATA.tensors


def model() -> Classifier:
    return Classifier(body=pairs_net())


def columns() -> ColumnDataset:
    return ColumnDataset(inputs=INPUTS, labels=LABELS)


def by_objects(folder: Path, **settings: Any) -> Trainer:
    given = {"num_epochs": 3, "batch_size": 8, "log_steps": 1, "resume_from_checkpoint": True}
    return Trainer(pairs_net(), quiet(folder, **{**given, **settings}), DATA, DATA)


def by_config(folder: Path, *, lazy_optim: Any = None, **settings: Any) -> DefaultTrainer:
    cfg = file_config(folder, model, columns, columns)
    if lazy_optim is not None:
        cfg.optim = lazy_optim
    cfg.train.update({"train_iter": 15, "train_micro_batch_size": 8, "log_period": 1})
    cfg.train.update({"resume": True, "topk": [1], "eval_period": 4, **settings})
    return DefaultTrainer(cfg)


APIS = pytest.mark.parametrize("build", [by_objects, by_config])
Build = Callable[..., Any]


def weights(trainer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


@pytest.mark.exhaustive(every=2)
@APIS
@pytest.mark.slow
def test_max_time_saves_stops_and_continues_exactly(build: Build, tmp_path: Path, read_rows: Any, caplog: Any) -> None:
    caplog.set_level("INFO", "trainwright")
    whole = build(tmp_path / "whole")
    results = whole.train()
    for number in range(3):  # each makes one iteration
        trainer = build(tmp_path / "parts", max_time=1e-6)
        trainer.train()
        assert trainer.iterations_done == number + 1
    assert caplog.text.count("have passed; stopped after iteration") == 3
    trainer.train()  # the same trainer again: one more
    last = build(tmp_path / "parts", max_time="00:10:00")
    assert last.start_iter == 4
    assert last.train() == results
    assert same(last, whole)
    measured = ("time", "data_time", "eta_seconds", "total_throughput")
    rows = [
        [{k: v for k, v in row.items() if k not in measured} for row in read_rows(tmp_path / name)]
        for name in ("whole", "parts")
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("01:30:00", 5400),
        ("00:12:00:00", 43200),
        ("1:00:00:01", 86401),
        (90, 90),
        (timedelta(minutes=2), 120),
        ({"hours": 12}, 43200),
    ],
)
def test_a_time_is_written_in_many_ways(given: Any, seconds: float) -> None:
    assert seconds_of(TrainingConfig(max_time=given).max_time) == seconds


@pytest.mark.parametrize("given", ["90", "1:75:00", "00:00:00", 0, -5, True])
def test_other_times_are_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_time: got .*'01:30:00' \(hours, minutes, seconds\)"):
        TrainingConfig(max_time=given)
    with pytest.raises(ConfigError, match=r"train.max_time.*: got .*'01:30:00'"):
        by_config(tmp_path, max_time=given)
    with pytest.raises(ConfigError, match="a timedelta, or its arguments"):
        TrainingConfig(max_time={"hrs": 12})


@pytest.mark.exhaustive(every=2)
@APIS
@pytest.mark.slow
def test_eval_on_start_adds_an_evaluation_and_changes_no_weight(build: Build, tmp_path: Path, read_rows: Any) -> None:
    plain = build(tmp_path / "plain")
    plain.train()
    trainer = build(tmp_path / "start", eval_on_start=True, max_time=1e-6)
    trainer.train()
    name = "eval_accuracy" if build is by_objects else "Acc@1"
    first = read_rows(tmp_path / "start")[0]
    assert first["iteration"] == 0
    with torch.no_grad():
        right = (pairs_net().eval()(INPUTS).argmax(1) == LABELS).float().mean().item()
    assert first[name] == pytest.approx(right if build is by_objects else 100 * right)
    resumed = build(tmp_path / "start", eval_on_start=True)
    resumed.train()
    assert same(resumed, plain)
    assert sum(name in row for row in read_rows(tmp_path / "start")) == 1 + sum(
        name in row for row in read_rows(tmp_path / "plain")
    )


@APIS
@pytest.mark.parametrize("setting", [True, "warn"])
def test_deterministic_holds_for_the_training_alone(build: Build, setting: Any, tmp_path: Path) -> None:
    seen = []

    def note(trainer: Any) -> None:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        seen.append((torch.are_deterministic_algorithms_enabled(), warns, torch.backends.cudnn.deterministic))

    trainer = build(tmp_path, deterministic=setting, max_time=1e-6)
    trainer.register_hooks([CallbackHook(after_step=note)])
    trainer.train()
    assert seen == [(True, setting == "warn", True)]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG")


def by_hand(value: float, steps: int, batches: Any) -> tuple[list[Tensor], list[float]]:
    model, norms = pairs_net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()  # no dropout
    for numbers in batches[:steps]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(INPUTS[numbers]), LABELS[numbers]).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        torch.nn.utils.clip_grad_value_(model.parameters(), value)
        optimizer.step()
    return [p.detach() for p in model.parameters()], norms


@pytest.mark.parametrize("settings", [{}, {"non_finite": "skip"}, {"graph": True}])
@pytest.mark.exhaustive(every=3)
def test_clipping_by_value_is_that_of_torch_and_its_norm_is_recorded(settings: dict[str, Any], tmp_path: Path) -> None:
    settings |= {"num_epochs": 1, "batch_size": 8, "log_steps": 1, "optimizer": "SGD", "lr": 0.1}
    config = quiet(tmp_path, clip_grad_value=0.01, dataloader_shuffle=False, **settings)
    model = pairs_net()
    model[2].p = 0.0  # type: ignore[union-attr]
    trainer = Trainer(model, config, DATA)
    trainer.train()
    expected, norms = by_hand(0.01, 5, torch.arange(40).view(5, 8))
    if "graph" in settings:
        torch.testing.assert_close([p.detach() for p in model.parameters()], expected)
    else:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
    assert [value for value, _ in trainer.storage.history("grad_norm").values()] == pytest.approx(norms)


def test_clipping_by_value_in_config_files(tmp_path: Path) -> None:
    optim = get_config("common/optim.py").optim
    optim.params.clip_grad_value = 0.01
    with pytest.raises(ConfigError, match=r"clip_grad_value: got 0.5 with max_grad_norm=1.0"):
        TrainingConfig(clip_grad_value=0.5, max_grad_norm=1.0)
    match = r"optim.params.clip_grad_value: got 0.01 with optim.params.clip_grad_max_norm=1.0"
    with pytest.raises(ConfigError, match=match):
        by_config(tmp_path, lazy_optim=optim)
    optim.params.clip_grad_max_norm = None
    trainer = by_config(tmp_path, lazy_optim=optim, max_time=1e-6)
    assert {group["clip_grad_value"] for group in trainer.optimizer.param_groups} == {0.01}
    largest: list[float] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: largest.append(max(p.grad.abs().max().item() for p in trainer.model.parameters()))
    )
    trainer.train()
    assert largest == pytest.approx([0.01])
    assert "grad_norm" in trainer.storage.histories()


def test_a_config_file_overfits_and_limits_evaluations(tmp_path: Path) -> None:
    optim = LazyCall(torch.optim.Adam)(lr=0.05)
    trainer = by_config(tmp_path / "over", lazy_optim=optim, overfit_batches=2, train_iter=0, train_epoch=40)
    assert trainer.max_iter == 80
    trainer.train()
    half = by_config(tmp_path / "half", limit_eval_batches=1, test_micro_batch_size=16)
    half.model.load_state_dict(trainer.model.state_dict())
    right = (trainer.model.body.eval()(INPUTS).argmax(1) == LABELS).float()
    assert trainer.last_eval_results["Acc@1"] == pytest.approx(100 * right[:16].mean().item())
    assert half.test(half.cfg, half.test_loader, half.model)["Acc@1"] == trainer.last_eval_results["Acc@1"]
    assert right[:16].mean() > right[16:].mean()


def test_a_config_file_refuses_a_limit_of_a_loader_that_it_cannot_limit(tmp_path: Path) -> None:
    class Plain(DefaultTrainer):
        @classmethod
        def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
            return torch.utils.data.DataLoader(columns(), 8)

    cfg = by_config(tmp_path, limit_train_batches=2).cfg
    with pytest.raises(ConfigError, match=r"train.limit_train_batches: got 2, .*trainwright.data"):
        Plain(cfg)


def test_periods_of_config_files_may_be_shares(tmp_path: Path) -> None:
    train = by_config(tmp_path, log_period=0.2, eval_period=0.5, checkpointer={"period": 0.34}).cfg.train
    assert (train.log_period, train.evaluation.eval_period, train.checkpointer.period) == (3, 8, 6)

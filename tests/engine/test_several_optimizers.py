"""Several optimizers by name, in both APIs: they step together, or as a step of the user's own decides."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.config import ConfigError, ConfigTypeError
from trainwright.data import build_image_train_loader

# B batch, F features.
INPUTS_BF = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
LABELS_B = torch.randint(2, (24,), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """Two parts, each with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(inputs).relu())
        return {"loss": F.cross_entropy(logits, labels)}


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(LABELS_B)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": INPUTS_BF[index], "labels": LABELS_B[index]}


def optimizers_of(net: Any) -> dict[str, torch.optim.Optimizer]:
    body = torch.optim.SGD(net.body.parameters(), lr=0.5, momentum=0.9)
    return {"body": body, "head": torch.optim.Adam(net.head.parameters(), lr=0.01)}


def python(folder: Path, num_epochs: int = 4, kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    net = Net()
    optimizers = optimizers_of(net)
    schedules = {"body": ExponentialLR(optimizers["body"], 0.9)}
    given: dict[str, Any] = {"batch_size": 6, "lr_scheduling_steps": 1, "metrics": [], "progress_bar": False}
    config = TrainingConfig(
        output_dir=folder, num_epochs=num_epochs, eval_strategy="no", tensorboard=None, **{**given, **settings}
    )
    trainer = kind(net, config, Rows(), optimizers=optimizers, lr_schedulers=schedules)
    trainer.train()
    return trainer


def config_files(folder: Path, train_iter: int = 16, **settings: Any) -> DefaultTrainer:
    trainer = DefaultTrainer(configured(folder, train_iter, **settings))
    trainer.train()
    return trainer


def configured(folder: Path, train_iter: int = 16, **settings: Any) -> DictConfig:
    cfg = get_config("common/defaults.py")
    cfg.model = LazyCall(Net)()
    cfg.dataloader = {"train": LazyCall(build_image_train_loader)(dataset=LazyCall(Rows)(), num_workers=0)}
    cfg.optim = {
        "body": LazyCall(torch.optim.SGD)(params={"part": "body"}, lr=0.5, momentum=0.9),
        "head": LazyCall(torch.optim.Adam)(params={"part": "head"}, lr=0.01),
    }
    cfg.train.scheduler = {"body": LazyCall(ExponentialLR)(gamma=0.9)}
    cfg.train.update({"output_dir": str(folder), "train_iter": train_iter, "train_micro_batch_size": 6})
    cfg.train.update({"log_period": 1, **settings})
    return cfg


def by_hand(trainer: Any, batches: list[Any], max_norm: float | None = None) -> Net:
    """A plain PyTorch loop over ``batches``."""
    net = Net()
    optimizers = optimizers_of(net)
    if isinstance(trainer, DefaultTrainer):  # config files select fused kernels, which round differently
        optimizers["body"] = torch.optim.SGD(net.body.parameters(), lr=0.5, momentum=0.9, fused=True)
        optimizers["head"] = torch.optim.Adam(net.head.parameters(), lr=0.01, fused=True)
    schedule = ExponentialLR(optimizers["body"], 0.9)
    for batch in batches:
        net(**batch)["loss"].backward()
        for optimizer in optimizers.values():
            if max_norm is not None:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return net


class Recording:
    """The batches of a run, recorded by a forward hook."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Any] = []
        forward = Net.forward

        def recorded(net: Net, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            self.batches.append({"inputs": inputs, "labels": labels})
            return forward(net, inputs, labels)

        monkeypatch.setattr(Net, "forward", recorded)


def assert_equal(a: Any, b: Any) -> None:
    for left, right in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(left, right)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


@pytest.mark.parametrize("run", [python, config_files])
def test_without_an_own_step_all_step_on_the_loss(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(monkeypatch)
    trainer = run(tmp_path)
    assert len(recording.batches) == 16
    assert_equal(trainer.model, by_hand(trainer, recording.batches[:16]))
    latest = trainer.storage.latest()
    assert latest["lr/body"][0] == pytest.approx(0.5 * 0.9**15)
    assert latest["lr/head"][0] == 0.01
    assert "lr" not in latest


def test_each_is_clipped_by_its_own_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(monkeypatch)
    trainer = python(tmp_path, max_grad_norm=0.05)
    assert_equal(trainer.model, by_hand(trainer, recording.batches[:16], max_norm=0.05))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"mixed_precision": "fp16", "max_grad_norm": 0.1},
    {"gradient_accumulation_steps": 3, "mixed_precision": "bf16"},
    {"non_finite": "skip"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_resumed_run_continues_bitwise(settings: dict[str, Any], tmp_path: Path) -> None:
    straight = python(tmp_path / "straight", 4, **settings)
    python(tmp_path / "resumed", 2, **settings)
    resumed = python(tmp_path / "resumed", 4, resume_from_checkpoint=True, **settings)
    assert_equal(resumed.model, straight.model)
    assert resumed.lr_schedulers["body"].get_last_lr() == straight.lr_schedulers["body"].get_last_lr()
    for name in ("body", "head"):
        ours, theirs = (run.optimizers[name].state_dict()["state"] for run in (resumed, straight))
        assert all(torch.equal(ours[0][key], theirs[0][key]) for key in ours[0] if isinstance(ours[0][key], Tensor))


def test_a_resumed_run_of_a_config_file_continues_bitwise(tmp_path: Path) -> None:
    straight = config_files(tmp_path / "straight", 16)
    config_files(tmp_path / "resumed", 8)
    resumed = config_files(tmp_path / "resumed", 16, resume=True)
    assert_equal(resumed.model, straight.model)
    rates = [[row["lr/body"] for row in rows_of(tmp_path / name)] for name in ("straight", "resumed")]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == 16


def test_one_schedule_of_a_config_file_is_for_each(tmp_path: Path) -> None:
    cfg = configured(tmp_path)
    cfg.train.scheduler = get_config("common/train.py").train.scheduler
    trainer = DefaultTrainer(cfg)
    assert {name: type(s).__name__ for name, s in trainer.lr_schedulers.items()} == dict.fromkeys(
        ("body", "head"), type(trainer.lr_schedulers["body"]).__name__
    )
    assert trainer.cfg.train.scheduler.max_iter == 16


def test_graph_mode_falls_back_to_eager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiled, eager = python(tmp_path / "graph", 1, graph=True), python(tmp_path / "eager", 1)
    assert_equal(compiled.model, eager.model)
    assert caplog.text.count("NamedOptimizers has its own step") == 1


def test_schedules_by_an_evaluation_result_are_stepped(tmp_path: Path) -> None:
    net = Net()
    optimizers = optimizers_of(net)
    schedules = {"head": ReduceLROnPlateau(optimizers["head"], patience=0, threshold=1e9)}
    config = TrainingConfig(output_dir=tmp_path, num_epochs=3, batch_size=6, metrics=[], progress_bar=False)
    Trainer(net, config, Rows(), Rows(), optimizers=optimizers, lr_schedulers=schedules).train()
    assert optimizers["head"].param_groups[0]["lr"] < 0.01
    assert optimizers["body"].param_groups[0]["lr"] == 0.5


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    def make(**arguments: Any) -> Trainer:
        config = TrainingConfig(output_dir=tmp_path, metrics=[], progress_bar=False)
        return Trainer(net, config, Rows(), **arguments)

    net = Net()
    both = optimizers_of(net)
    with pytest.raises(ConfigError, match=r"lr_schedulers: there is no optimizer 'bodi'. Did you mean 'body'"):
        make(optimizers=both, lr_schedulers={"bodi": ExponentialLR(both["body"], 0.9)})
    with pytest.raises(ConfigError, match="belongs to another optimizer"):
        make(optimizers=both, lr_schedulers={"body": ExponentialLR(both["head"], 0.9)})
    with pytest.raises(ConfigError, match="got optimizers and optimizer"):
        make(optimizers=both, optimizer=both["body"])
    with pytest.raises(ConfigError, match="got optimizers and lr_scheduler"):
        make(optimizers=both, lr_scheduler=ExponentialLR(both["body"], 0.9))
    with pytest.raises(ConfigError, match="needs optimizers="):
        make(lr_schedulers={"body": ExponentialLR(both["body"], 0.9)})
    with pytest.raises(ConfigTypeError, match=r"pair \(optimizer, scheduler\) is passed as"):
        make(optimizers=(both["body"], None))
    with pytest.raises(ConfigTypeError, match=r"optimizers\['body'\]: got 0.1"):
        make(optimizers={"body": 0.1})
    with pytest.raises(ConfigError, match="hold the same parameter"):
        make(optimizers={"a": both["body"], "b": both["body"]})
    with pytest.raises(ConfigError, match="letters, digits"):
        make(optimizers={"a/b": both["body"]})
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        make(optimizers={"a": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)})


def test_wrong_settings_of_a_config_file_are_refused(tmp_path: Path) -> None:
    cfg = configured(tmp_path)
    cfg.optim.head.lr = -1.0
    cfg.optim.body.momentun = 0.9
    with pytest.raises(ConfigError, match=r"optim.head.lr.*got -1.0") as error:
        DefaultTrainer(cfg)
    assert "optim.body.momentun" in str(error.value)
    cfg = configured(tmp_path)
    cfg.train.scheduler = {"bdy": LazyCall(ExponentialLR)(gamma=0.9)}
    with pytest.raises(ConfigError, match=r"train.scheduler.bdy: .* Did you mean 'body'"):
        DefaultTrainer(cfg)
    cfg = configured(tmp_path)
    cfg.optim.head.params.part = "hed"
    with pytest.raises(ConfigError, match=r"part='hed': Net has no such submodule. Did you mean 'head'"):
        DefaultTrainer(cfg)

"""One step for both APIs: what it records, when it updates, and what follows a failure, are the same in each."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import on_ranks
from tests.toys import Samples, assert_equal_weights, file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.dist import get_rank
from trainwright.base.errors import ConfigTypeError
from trainwright.engine import EagerTrainer
from trainwright.hooks import HookBase

SIZE, IGNORED = 4, -100


class Net(nn.Module):
    """Returns its loss and named scalars: a part of the loss, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layer(inputs) * self.scale
        loss = F.cross_entropy(scores, labels, ignore_index=IGNORED)
        return {"loss": loss + self.scale**2, "size": self.scale**2, "scale": self.scale}


class Plain(Net):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(inputs, labels)["loss"]}


def data(length: int = 32, *, without_labels: slice = slice(0)) -> Samples:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (length,), generator=generator)
    labels[without_labels] = IGNORED
    return Samples(inputs=torch.randn(length, 4, generator=generator), labels=labels, length=length)


def python_api(folder: Path, model: nn.Module, samples: Any, accumulation: int = 1, **settings: Any) -> Trainer:
    config = quiet(
        folder, batch_size=SIZE, num_epochs=1, gradient_accumulation_steps=accumulation, dataloader_shuffle=False,
        lr_scheduler_type=None, optimizer={"name_": "SGD", "fused": False}, learning_rate=0.1, max_grad_norm=None,
        metrics=[], **settings,
    )  # fmt: skip
    return Trainer(model, config, samples)


def config_files(
    folder: Path, model: nn.Module, samples: Any, accumulation: int = 1, kind: Any = DefaultTrainer, **settings: Any
) -> DefaultTrainer:
    cfg = file_config(
        folder, lambda: model, lambda: samples, train_micro_batch_size=SIZE, num_accumulation_steps=accumulation,
        train_iter=len(samples) // SIZE // accumulation,
        scheduler=LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0),
        input_placement_device="cpu", **settings,
    )  # fmt: skip
    cfg.dataloader.train.update(sampler=LazyCall(_in_order)())
    cfg.optim = LazyCall(torch.optim.SGD)(lr=0.1)
    trainer: DefaultTrainer = kind(cfg)
    return trainer


def _in_order() -> Any:
    from functools import partial

    from trainwright.data.sampler import CyclicSampler

    return partial(CyclicSampler, shuffle=False)


Build = Callable[..., Any]
APIS = pytest.mark.parametrize("build", [python_api, config_files])


def metrics_of(build: Build, folder: Path, model: nn.Module, accumulation: int) -> dict[str, list[tuple[float, int]]]:
    trainer = build(folder, model, data(), accumulation)
    trainer.train()
    histories = trainer.storage.histories()
    return {name: histories[name].values() for name in ("total_loss", "loss", "size", "scale") if name in histories} | {
        "waits": [(0.0, at) for _, at in histories["data_time"].values()]
    }


@pytest.mark.parametrize("kind", [Net, Plain])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_both_record_the_same_values_by_the_same_names(kind: type[Net], accumulation: int, tmp_path: Path) -> None:
    python = metrics_of(python_api, tmp_path / "a", kind(), accumulation)
    assert python == metrics_of(config_files, tmp_path / "b", kind(), accumulation)
    assert ("scale" in python) == (kind is Net)
    assert "loss" not in python if kind is Plain else python["loss"] == python["total_loss"]


@APIS
def test_a_parameter_among_the_outputs_is_recorded_as_it_was_in_the_step(build: Build, tmp_path: Path) -> None:
    trainer = build(tmp_path, Net(), data())
    trainer.train()
    assert trainer.storage.history("scale").values()[0] == (1.0, 0)


class FailsIn(torch.optim.SGD):
    """Raises in one of its steps, before it has changed anything."""

    at = calls = 0

    def step(self, closure: Any = None) -> Any:
        type(self).calls += 1
        if self.calls == self.at:
            raise RuntimeError("simulated failure")
        return super().step(closure)


@APIS
def test_an_update_that_fails_is_not_recorded_and_made_again(build: Build, tmp_path: Path) -> None:
    def trained(name: str, at: int) -> tuple[nn.Module, list[tuple[float, int]]]:
        FailsIn.at, FailsIn.calls, model = at, 0, Net()
        if build is python_api:
            optimizer = FailsIn(model.parameters(), lr=0.1)
            config = quiet(
                tmp_path / name, batch_size=SIZE, num_epochs=1, dataloader_shuffle=False, lr_scheduler_type=None,
                max_grad_norm=None, metrics=[], log_steps=1,
            )  # fmt: skip
            trainer: Any = Trainer(model, config, data(), optimizer=optimizer)
        else:

            class Own(DefaultTrainer):
                @classmethod
                def build_optimizer(cls, cfg: Any, model: nn.Module) -> Any:
                    return FailsIn(model.parameters(), lr=0.1)

            trainer = config_files(tmp_path / name, model, data(), kind=Own, log_period=1)
        if at:
            with pytest.raises(RuntimeError, match="simulated failure"):
                trainer.train()
            assert trainer.storage.history("total_loss").latest_iteration() == at - 2
        trainer.train()
        return model, trainer.storage.history("total_loss").values()

    whole, losses = trained("whole", 0)
    again, after = trained("failed", 4)
    assert_equal_weights(again, whole)
    assert after[-5:] == losses[-5:]


@APIS
def test_skipping_counts_no_batch_without_targets_as_bad(build: Build, tmp_path: Path) -> None:
    samples = data(without_labels=slice(SIZE, 2 * SIZE))
    model = Plain()
    plain = copy.deepcopy(model)
    trainer = build(tmp_path, model, samples, 2, non_finite="skip")
    trainer.train()
    assert not any(value for value, _ in trainer.storage.history("skipped_update").values())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for first in range(0, 32, 2 * SIZE):
        window = [samples[at] for at in range(first, first + 2 * SIZE) if samples[at]["labels"] != IGNORED]
        batch = {name: torch.stack([torch.as_tensor(one[name]) for one in window]) for name in ("inputs", "labels")}
        plain(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)  # two halves in place of one batch


class BadRank(Plain):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = super().forward(inputs, labels)["loss"]
        self.calls = getattr(self, "calls", 0) + 1
        return {"loss": loss * torch.nan if get_rank() == 1 and self.calls == 3 else loss}


def skipped_on_ranks(build: Build, folder: str) -> list[float]:
    trainer = build(Path(folder), BadRank(), data(64), 2, non_finite="skip")
    trainer.train()
    return [value for value, _ in trainer.storage.history("skipped_update").values()]


@APIS
def test_all_ranks_skip_the_update_of_which_one_has_a_bad_loss(build: Build, tmp_path: Path) -> None:
    for skipped in on_ranks(skipped_on_ranks, build, str(tmp_path)):
        assert skipped == [0, 1, *[0] * (len(skipped) - 2)]


class Gradients(HookBase):
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def after_step(self) -> None:
        self.seen.append(any(one.grad is not None for one in self.trainer.model.parameters()))


def test_a_users_write_metrics_may_read_the_gradients() -> None:
    class Writes(EagerTrainer):
        norms: list[float]

        def write_metrics(self, loss_dict: Any, data_time: float, prefix: str = "") -> None:
            super().write_metrics(loss_dict, data_time, prefix)
            assert {"loss", "size", "scale"} <= loss_dict.keys()
            grads = [one.grad.norm() for one in self.model.parameters() if one.grad is not None]
            self.norms.append(float(torch.stack(grads).norm()))

    model = Net()
    batches = [{"inputs": torch.randn(4, 4), "labels": torch.arange(4) % 3}]
    trainer = Writes(model, batches, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.norms, after = [], Gradients()
    trainer.register_hooks([after])
    trainer.train(0, 3)
    assert len(trainer.norms) == 3
    assert all(trainer.norms)
    assert after.seen == [False] * 3
    assert trainer.storage.history("scale").values()[0] == (1.0, 0)


def test_a_step_of_the_users_that_returns_nothing_is_explained(tmp_path: Path) -> None:
    class Forgets(DefaultTrainer):
        def train_step(self, model: Any, inputs: Any) -> Any:
            self.backward(model(**inputs)["loss"])
            self.step()

    with pytest.raises(ConfigTypeError, match="train_step returned NoneType; it must return a dict"):
        config_files(tmp_path, Net(), data(), kind=Forgets).train()


def test_a_step_of_the_users_logs_what_it_returns(tmp_path: Path) -> None:
    class Logs(DefaultTrainer):
        def train_step(self, model: Any, inputs: Any) -> Any:
            self.backward(model(**inputs)["loss"])
            self.step()
            return {"accuracy": 0.5}

    trainer = config_files(tmp_path, Net(), data(), kind=Logs)
    trainer.train()
    assert {value for value, _ in trainer.storage.history("accuracy").values()} == {0.5}
    assert "total_loss" not in trainer.storage.histories()


def test_a_wrapped_model_is_that_of_the_step_that_runs() -> None:
    """The setter of ``model`` reaches a step that is built already."""
    model, seen = Plain(), list[Any]()

    class Replaces(HookBase):
        def before_step(self) -> None:
            if self.trainer.iter == 1:
                self.trainer.model = nn.Sequential()  # stands for a wrapper
                self.trainer.model.forward = lambda **batch: seen.append(batch) or model(**batch)

    batches = [{"inputs": torch.randn(4, 4), "labels": torch.arange(4) % 3}]
    trainer = EagerTrainer(model, batches, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([Replaces()])
    trainer.train(0, 3)
    assert len(seen) == 2

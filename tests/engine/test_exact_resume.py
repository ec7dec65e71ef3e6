"""Interrupted and resumed is uninterrupted, bit for bit, whatever the number of workers in each part.

After every iteration the whole state is hashed: weights, buffers, optimizer, schedule, random numbers, batch, loss.
The model has dropout and batch norm, the data are augmented with all three generators, two micro-batches make an
update. An epoch has 25 samples and an update takes 8, so three updates are not quite an epoch.
"""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.toys import Classifier, assert_equal_weights, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.hooks import Callback, CallbackHook

pytestmark = pytest.mark.slow

ITERATIONS = 14


class Augmented(Dataset):
    def __init__(self, length: int = 25, seed: int = 0) -> None:
        self.points = torch.randn(length, 4, generator=torch.Generator().manual_seed(seed))

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1) + torch.randn(4) * 0.1
        return {"inputs": self.points[index] + noise, "labels": int(self.points[index].sum() > 0)}

    def __len__(self) -> int:
        return len(self.points)


class Model(Classifier):
    """Remembers its batches."""

    def __init__(self) -> None:
        parts = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)
        super().__init__(body=nn.Sequential(*parts))
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.seen += [inputs.clone()] if self.training else []
        return super().forward(inputs, labels)


def config(folder: Path, *, num_workers: int, **train: Any) -> DictConfig:
    cfg = file_config(folder, Model, Augmented, LazyCall(Augmented)(seed=1))
    cfg.dataloader.train.num_workers = num_workers
    cfg.optim.lr = 0.02
    sizes = {"train_iter": ITERATIONS, "train_micro_batch_size": 4, "num_accumulation_steps": 2}
    periods = {"log_period": 3, "checkpointer": {"period": 1, "max_to_keep": 2}, "evaluation": {"eval_period": 5}}
    cfg.train.update({**sizes, **periods, "warmup_ratio": 0.2, "resume": True, "topk": [1], **train})
    return cfg


def digest(value: Any) -> str:
    """Of every number in a state, in order."""
    hashed = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, Tensor):
            hashed.update(item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in item:
                add((str(key), item[key]))
        elif isinstance(item, list | tuple):
            for part in item:
                add(part)
        else:
            hashed.update(repr(item).encode())

    add(value)
    return hashed.hexdigest()


def state_of(trainer: Any) -> dict[str, str]:
    _, keys, position, *_ = np.random.get_state()
    parts = {
        "batch": trainer.model.seen,
        "weights": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "random": [random.getstate(), keys.tolist(), position, torch.get_rng_state()],
        "metrics": {n: v for n, v in trainer.storage.latest().items() if n not in ("time", "data_time")},
    }
    trainer.model.seen = []
    return {name: digest(part) for name, part in parts.items()}


class StopHereError(Exception):
    pass


def run(cfg: DictConfig, stop: int | None = None) -> dict[int, dict[str, str]]:
    """Train until iteration ``stop`` is about to begin; what was after each iteration."""
    trainer = DefaultTrainer(cfg)
    history: dict[int, dict[str, str]] = {}

    def note(t: Any) -> None:
        history[t.iter] = state_of(trainer)

    def leave(t: Any) -> None:
        if t.iter == stop:
            raise StopHereError

    trainer.register_hooks([CallbackHook(before_step=leave, after_step=note)])
    try:
        if stop is None:
            trainer.train()
        else:
            with pytest.raises(StopHereError):
                trainer.train()
    finally:
        # Workers end at once when their loader is let go; the garbage collector would take 5 s for each.
        vars(trainer._trainer).pop("_data_loader_iter", None)
        trainer.train_loader.close()
    return history


def rows(folder: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in ("time", "data_time")} for row in read]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, dict[str, str]], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("whole")
    history = run(config(folder, num_workers=0))
    assert list(history) == list(range(ITERATIONS))
    assert len({state["batch"] for state in history.values()}) == ITERATIONS
    return history, rows(folder)


STOPS = {
    "after the first step": [1],
    "twice in an epoch": [4, 5],
    "at an evaluation": [5],
    "around the end of an epoch": [2, 3, 4],
    "before the last step": [ITERATIONS - 1],
    "at every step": list(range(1, ITERATIONS)),
}


@pytest.mark.exhaustive(every=7)
@pytest.mark.parametrize("workers", [[0], [2, 0], [0, 2, 1]], ids=lambda workers: f"workers-{workers}")
@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_interrupted_and_resumed_is_uninterrupted(
    whole: tuple[dict[int, dict[str, str]], list[dict[str, Any]]], tmp_path: Path, stops: list[int], workers: list[int]
) -> None:
    history: dict[int, dict[str, str]] = {}
    for number, stop in enumerate([*stops, None]):
        part = run(config(tmp_path, num_workers=workers[number % len(workers)]), stop)
        assert not history.keys() & part.keys(), "no iteration is trained twice"
        history |= part
    expected, expected_rows = whole
    for iteration, state in expected.items():
        assert history[iteration] == state, iteration
    assert rows(tmp_path) == expected_rows


class StepsEveryThird(Trainer):
    """It accumulates by hand: the optimizer steps in each third iteration."""

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = model(**inputs)["loss"]
        loss.backward()
        if (self.iter + 1) % 3 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"step_loss": loss.detach()}


class StepsEveryThirdByMethods(StepsEveryThird):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = model(**inputs)["loss"]
        self.backward(loss)
        if (self.iter + 1) % 3 == 0:
            self.step()
        return {"step_loss": loss.detach()}


class ConfigStepsEveryThird(DefaultTrainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = model(**inputs)["loss"]
        self.backward(loss)
        if (self.iter + 1) % 3 == 0:
            self.step()
        return {"loss": loss.detach()}


def every_third(kind: Any, folder: Path, iterations: int, *, resume: bool = False) -> nn.Module:
    model = Classifier((4, 2), seed=0)
    if kind is ConfigStepsEveryThird:
        cfg = file_config(folder, lambda: Classifier((4, 2), seed=0), lambda: points(48), resume=resume)
        cfg.train.update({"train_iter": iterations, "train_micro_batch_size": 4})
        cfg.optim = LazyCall(torch.optim.SGD)(params=cfg.optim.params, lr=0.1)
        cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
        trainer = kind(cfg)
    else:
        settings = {"max_steps": iterations, "batch_size": 4, "metrics": None, "resume_from_checkpoint": resume or None}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = kind(model, quiet(folder, **settings), points(48), optimizer=optimizer)
    trainer.train()
    return trainer.model


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("kind", [StepsEveryThird, StepsEveryThirdByMethods, ConfigStepsEveryThird])
def test_gradients_that_a_step_leaves_to_a_later_one_are_resumed(kind: Any, tmp_path: Path) -> None:
    whole = every_third(kind, tmp_path / "whole", 12)
    every_third(kind, tmp_path / "stopped", 8)
    resumed = every_third(kind, tmp_path / "stopped", 12, resume=True)
    assert_equal_weights(resumed, whole)


class Save(Callback):
    """Saves in the middle of an update, after its forward pass in a callback's moment or in the model's."""

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        if logs["global_step"] == 6:
            self.trainer.save(self.trainer.output_dir / "own")


class SavesInStep(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.state.global_step == 6:
            self.save(self.output_dir / "own")
        return model(**inputs)["loss"]


@pytest.mark.parametrize(("kind", "accumulation"), [(Trainer, 4), (SavesInStep, 4), (SavesInStep, 1)])
def test_a_save_within_an_update_is_made_when_it_is_complete(kind: Any, accumulation: int, tmp_path: Path) -> None:
    def new(name: str) -> Any:
        config = quiet(
            tmp_path / name, num_epochs=1, batch_size=2, gradient_accumulation_steps=accumulation, metrics=None
        )
        return kind(Classifier((4, 8, 2), dropout=0.3, seed=0), config, points(24), callbacks=[save])

    save = Save() if kind is Trainer else Callback()
    saving = new("saving")
    save.trainer = saving
    saving.train()
    again = new("again")
    save.trainer = again
    again.train(tmp_path / "saving" / "own")
    assert_equal_weights(again.model, saving.model)

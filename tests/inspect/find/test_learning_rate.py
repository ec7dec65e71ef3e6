"""The learning-rate range test: its curve, its suggestion, its picture; the trainer stays as it is."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.inspect.check.seeded_bugs import config_files, objects
from trainwright import Trainer, TrainingConfig
from trainwright.config import ConfigError, ConfigImportError
from trainwright.inspect.find.learning_rate import RateCurve

BOTH = pytest.mark.parametrize("build", [objects, config_files])


@pytest.mark.exhaustive(every=2)
@BOTH
def test_the_suggestion_trains_and_the_trainer_is_not_changed(build: Any, tmp_path: Path) -> None:
    trainer = build(tmp_path / "run")
    weights = [one.detach().clone() for one in trainer.model.parameters()]
    state, generator = trainer.lr_scheduler.state_dict(), torch.get_rng_state()
    curve = trainer.find_lr(updates=60)
    assert 1e-4 < curve.suggestion < 1
    assert len(curve.rates) == len(curve.losses) == len(curve.smoothed) <= 60
    assert curve.rates[0] == pytest.approx(1e-7)
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.model.parameters(), strict=True))
    assert trainer.lr_scheduler.state_dict() == state
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(one.suffix == ".json" for one in tmp_path.rglob("metrics*"))


@pytest.mark.exhaustive(every=2)
@BOTH
def test_apply_sets_the_rate_of_optimizer_and_schedule(build: Any, tmp_path: Path) -> None:
    trainer = build(tmp_path / "run")
    curve = trainer.find_lr(updates=60, apply=True)
    assert trainer.optimizer.param_groups[0]["initial_lr"] == pytest.approx(curve.suggestion)
    assert trainer.lr_scheduler.base_lrs[0] == pytest.approx(curve.suggestion)


def test_a_rate_that_is_too_high_diverges_on_a_parabola(tmp_path: Path) -> None:
    """SGD on ``x**2 / 2`` converges for rates below 2, and diverges above."""

    class Parabola(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.full((1,), 10.0))

        def forward(self, inputs: Any, labels: Any) -> Any:
            return {"loss": self.x.square().sum() / 2}

    data = [{"inputs": torch.zeros(1), "labels": torch.tensor(0)}] * 8
    config = TrainingConfig(output_dir=str(tmp_path / "run"), batch_size=4, optimizer="SGD", learning_rate=0.1)
    curve = Trainer(Parabola(), config, data).find_lr(lowest=1e-4, highest=1.9, updates=60)
    assert not curve.diverged
    assert 0.005 < curve.suggestion < 1.9
    curve = Trainer(Parabola(), config, data).find_lr(lowest=3, highest=10, updates=30)
    assert (curve.diverged, curve.suggestion) == (True, None)
    assert len(curve.rates) < 30


def test_a_loss_that_does_not_fall_has_no_suggestion(tmp_path: Path) -> None:
    trainer = objects(tmp_path / "run")
    for one in trainer.model.parameters():
        one.requires_grad_(one is trainer.model[3].bias)
    with torch.no_grad():
        trainer.model[3].weight.zero_()
    curve = trainer.find_lr(lowest=1e-9, highest=1e-6, updates=30)
    assert curve.suggestion is None
    assert not curve.diverged


@pytest.mark.parametrize(
    ("arguments", "fact"), [({"lowest": 1.0, "highest": 0.1}, "lowest < highest"), ({"updates": 3}, ">= 20")]
)
def test_wrong_arguments(arguments: Any, fact: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=fact):
        objects(tmp_path).find_lr(**arguments)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_from_the_start_has_no_suggestion(factor: float, tmp_path: Path) -> None:
    class Broken(nn.Linear):
        def forward(self, inputs: Any) -> Any:
            return super().forward(inputs) * factor

    data = TensorDataset(torch.rand(64, 4), torch.zeros(64, dtype=torch.int64))
    config = TrainingConfig(output_dir=str(tmp_path / "run"), batch_size=8)
    curve = Trainer(Broken(4, 2), config, data).find_lr()
    assert curve.suggestion is None
    assert curve.to_dict()["losses"] == [None]
    pytest.importorskip("matplotlib")
    assert curve.plot(tmp_path / "curve.png").is_file()


@pytest.mark.parametrize("name", ["curve.xyz", "."])
def test_a_picture_that_cannot_be_written_is_refused_before_the_updates(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trainer = objects(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"it must be a file that ends in one of: .*png"):
        trainer.find_lr(lowest=1.0, highest=0.1, plot=tmp_path / name)  # the picture is the first to be checked


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    several = {name: torch.optim.SGD([one], lr=0.1) for name, one in model.named_parameters()}
    data = TensorDataset(torch.rand(8, 4), torch.zeros(8, dtype=torch.int64))

    class Own(Trainer):
        def train_step(self, model: Any, inputs: Any) -> Any:
            raise NotImplementedError

    trainer = Own(model, TrainingConfig(output_dir=str(tmp_path)), data, optimizers=several)
    with pytest.raises(ConfigError, match="several optimizers"):
        trainer.find_lr()


CURVE = RateCurve([1e-3, 1e-2, 1e-1], [2.0, 1.0, 3.0], [2.0, 1.5, 2.0], 1e-2, True)


def test_the_picture(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    path = CURVE.plot(tmp_path / "pictures" / "curve.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigImportError, match="pip install matplotlib"):
        CURVE.plot(tmp_path / "curve.png")


# The largest micro-batch that fits, with a simulated limit of the memory.


class Limited(nn.Linear):
    """A device with memory for some samples."""

    most = 37

    def forward(self, inputs: Any) -> Any:
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(inputs)


def limited(folder: Path, **settings: Any) -> Trainer:
    data = TensorDataset(torch.rand(500, 4), torch.zeros(500, dtype=torch.int64))
    config = TrainingConfig(output_dir=str(folder / "run"), **{"batch_size": 100, **settings})
    return Trainer(Limited(4, 2), config, data)


@pytest.mark.slow
def test_sizes_are_doubled_and_then_halved_between(tmp_path: Path) -> None:
    found = limited(tmp_path).find_batch_size()
    assert (found.largest, found.limited_by) == (36, "memory")
    assert [size for size, needed in found.trials.items() if needed is None] == [40, 48, 64]
    assert {2, 4, 8, 16, 32, 36} < {*found.trials}
    assert found.settings == {"batch_size": 34, "gradient_accumulation_steps": 3}  # 102 samples, before 100


def test_a_batch_norm_that_needs_two_samples_is_no_limit(tmp_path: Path) -> None:
    trainer = limited(tmp_path)
    model = nn.Sequential(nn.BatchNorm1d(4), trainer.model)
    found = Trainer(model, trainer.config, trainer.train_dataset).find_batch_size(max_size=4)
    assert (found.largest, found.limited_by) == (4, "max_size")
    for name, value in (("max_size", 0), ("max_size", "4"), ("memory", -5)):
        with pytest.raises(ConfigError, match=f"got {name}={value!r}; it must be a whole number >= 1"):
            trainer.find_batch_size(**{name: value})


def test_the_trainer_is_not_changed(tmp_path: Path) -> None:
    trainer = limited(tmp_path, batch_size=18, gradient_accumulation_steps=4)
    weights = [one.detach().clone() for one in trainer.model.parameters()]
    found = trainer.find_batch_size(max_size=32)
    assert found.settings == {"batch_size": 24, "gradient_accumulation_steps": 3}  # 72 samples, as before
    assert trainer.config.batch_size == 18
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.model.parameters(), strict=True))


@pytest.mark.exhaustive(every=2)
@BOTH
@pytest.mark.slow
def test_the_memory_of_another_device(build: Any, tmp_path: Path) -> None:
    trainer = build(tmp_path / "run")
    whole = trainer.find_batch_size(max_size=64)
    assert (whole.largest, whole.limited_by) == (64, "max_size")
    needed = [*whole.trials.values()]
    assert needed == sorted(needed)
    assert whole.trials[64] - whole.trials[32] > 32 * 64 * 4  # bytes of the inputs alone
    half = trainer.find_batch_size(memory=whole.trials[32], max_size=64)
    assert half.largest == 32


@pytest.mark.parametrize(("most", "largest", "limited_by"), [(1000, 500, "data"), (0, 0, "memory")])
def test_all_samples_or_not_even_one_fit(most: int, largest: int, limited_by: str, tmp_path: Path) -> None:
    trainer = limited(tmp_path)
    trainer.model.most = most
    found = trainer.find_batch_size()
    assert (found.largest, found.limited_by, bool(found.settings)) == (largest, limited_by, largest > 0)


def test_another_error_is_raised(tmp_path: Path) -> None:
    class Broken(nn.Linear):
        def forward(self, inputs: Any) -> Any:
            raise RuntimeError("shapes do not match")

    data = TensorDataset(torch.rand(50, 4), torch.zeros(50, dtype=torch.int64))
    trainer = Trainer(Broken(4, 2), TrainingConfig(output_dir=str(tmp_path)), data)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer.find_batch_size()


def test_a_loader_of_the_user_is_refused(tmp_path: Path) -> None:
    data = TensorDataset(torch.rand(50, 4), torch.zeros(50, dtype=torch.int64))
    config = TrainingConfig(output_dir=str(tmp_path))
    trainer = Trainer(nn.Linear(4, 2), config, train_dataloader=DataLoader(data, batch_size=10))
    with pytest.raises(ConfigError, match="gives 10 samples instead of 2"):
        trainer.find_batch_size()

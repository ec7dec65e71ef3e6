"""The largest micro-batch that fits, with a simulated limit of the memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.inspect.check.seeded_bugs import config_files, objects
from trainwright import Trainer, TrainingConfig
from trainwright.config import ConfigError

BOTH = pytest.mark.parametrize("build", [objects, config_files])


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


@pytest.mark.parametrize("arguments", [{"max_size": 0}, {"max_size": "4"}, {"memory": -5}])
def test_a_limit_out_of_range_is_refused(arguments: Any, tmp_path: Path) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(ConfigError, match=f"got {name}={value!r}; it must be a whole number >= 1"):
        limited(tmp_path).find_batch_size(**arguments)

"""The samples of an update, in both APIs; and a bad sample that a message names."""

import functools
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.config.errors import ConfigError
from trainwright.data import build_image_train_loader
from trainwright.hooks import CallbackHook, NonFiniteError

NUM, BAD = 160, 71
READ: list[int] = []


class Photos(Dataset):
    """A loss of about 1 for each sample, and of ``bad`` for one."""

    def __init__(self, bad: float = 1.0) -> None:
        self.bad, self.paths = bad, [f"photos/{number:03d}.png" for number in range(NUM)]

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        READ.append(int(index))
        noise = 1.0 + 0.2 * torch.randn(1, generator=torch.Generator().manual_seed(int(index)))
        return {"values": noise * self.bad if index == BAD else noise}


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        return {"loss": (values + self.shift).mean()}


def by_objects(folder: Path, dataset: Any, **settings: Any) -> Trainer:
    config = TrainingConfig(
        output_dir=str(folder), num_epochs=2, batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-4,
        log_steps=10, tensorboard=None, progress_bar=False, seed=1, save_enabled=False, **settings,
    )  # fmt: skip
    return Trainer(Level(), config, dataset)


def by_files(folder: Path, dataset: Any, **settings: Any) -> DefaultTrainer:
    cfg = LazyCall(dict)()
    cfg._set_flag("allow_objects", True)
    cfg.model = LazyCall(Level)()
    cfg.optim = LazyCall(torch.optim.SGD)(lr=1e-4)
    cfg.dataloader = LazyCall(dict)(train=LazyCall(build_image_train_loader)(dataset=[dataset], num_workers=0))
    cfg.train = {
        "output_dir": str(folder), "train_iter": 80, "log_period": 10, "train_micro_batch_size": 2,
        "num_accumulation_steps": 2, "checkpointer": {"period": 1000}, **settings,
    }  # fmt: skip
    return DefaultTrainer(cfg)


BUILD = {"objects": by_objects, "files": by_files}
BOTH = pytest.mark.parametrize("api", BUILD)


@BOTH
def test_the_ids_are_those_that_are_read_seen_from_any_update(api: str, tmp_path: Path) -> None:
    trainer = BUILD[api](tmp_path, Photos())
    before = [trainer.sample_ids(update) for update in range(1, 81)]
    in_step: list[Any] = []
    trainer.register_hooks(
        [CallbackHook(after_step=lambda trainer: in_step.append(trainer.sample_ids(trainer.iter + 1)))]
    )
    READ.clear()
    trainer.train()
    after = [trainer.sample_ids(update) for update in range(1, 81)]
    assert before == in_step == after == [[READ[n : n + 2], READ[n + 2 : n + 4]] for n in range(0, 320, 4)]


@BOTH
def test_a_spike_names_its_samples(api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = BUILD[api](tmp_path, Photos(bad=60.0))
    update = next(
        n for n in range(41, 81) if BAD in functools.reduce(operator.iadd, trainer.sample_ids(n), [])
    )  # of the second epoch
    trainer.train()
    (found,) = [text for text in caplog.messages if "times the median of the last" in text]
    assert found.startswith(f"Update {update}: total_loss is ")
    assert f"{BAD} (photos/{BAD:03d}.png)" in found
    how = f"`trainwright replay {tmp_path} --step {update}`" if api == "files" else f"trainer.replay({update})"
    assert f"Samples of update {update}: " in found
    assert how in found


@BOTH
@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_a_loss_that_is_not_finite_names_its_samples(
    api: str, policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = BUILD[api](tmp_path, Photos(bad=float("inf")), non_finite=policy)
    update = next(n for n in range(1, 41) if BAD in functools.reduce(operator.iadd, trainer.sample_ids(n), []))
    if policy == "stop":
        with pytest.raises(NonFiniteError) as error:
            trainer.train()
        found = str(error.value)
    else:
        trainer.train()
        found = next(text for text in caplog.messages if text.startswith("Iteration"))
    assert f"Samples of update {update}: " in found
    assert f"{BAD} (photos/{BAD:03d}.png)" in found


def test_names_that_cannot_be_read_do_not_hide_the_message(tmp_path: Path) -> None:
    class Unnamed(Photos):
        def sample_name(self, index: int) -> str:
            raise OSError("the index file is gone")

    trainer = by_objects(tmp_path, Unnamed())
    first = trainer.sample_ids(3)[0][0]
    assert trainer.described_samples(3).startswith(f"Samples of update 3: {first}, ")


def test_loaders_and_steps_of_the_user_have_unknown_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(Trainer):
        def run_step(self) -> None:
            super().run_step()

    config = TrainingConfig(output_dir=str(tmp_path), tensorboard=None, num_epochs=1)
    loader = DataLoader(Photos(), 4)
    assert Trainer(Level(), config, train_dataloader=loader).sample_ids(1) is None
    assert Own(Level(), config, Photos()).sample_ids(1) is None


@BOTH
def test_updates_that_do_not_exist_are_refused(api: str, tmp_path: Path) -> None:
    trainer = BUILD[api](tmp_path, Photos())
    for update in (0, 81):
        with pytest.raises(ConfigError, match=f"got update {update}; the run has the updates 1 to 80"):
            trainer.sample_ids(update)


def test_an_earlier_start_with_another_batch_size_is_refused(tmp_path: Path) -> None:
    trainer = by_files(tmp_path, Photos())
    trainer.start_iter = 40
    (tmp_path / "run.json").write_text('{"starts": [{"samples_per_iteration": 4}, {"samples_per_iteration": 8}]}')
    with pytest.raises(ConfigError, match=r"update 40 .* 4 and 8 samples"):
        trainer.sample_ids(40)
    assert trainer.sample_ids(41) is not None

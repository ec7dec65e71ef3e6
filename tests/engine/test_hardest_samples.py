"""``hardest_samples.csv``: both APIs find a mislabelled sample by name; resume and ranks do not change the file."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.data import DistTensorData, Instance, build_image_test_loader, build_image_train_loader
from trainwright.engine.hardest_samples import as_picture
from trainwright.inspect.report.page import content
from trainwright.inspect.report.run_data import RunData

MISLABELLED = 13


class Digits(Dataset):
    """Pictures of one bright row, whose number is the class; one of them has a wrong label."""

    def __init__(self, named: bool = False, wrong: int | None = MISLABELLED, length: int = 40) -> None:
        self.named, self.wrong = named, wrong
        self.paths = [f"digits/{number}.png" for number in range(length)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = torch.zeros(1, 4, 4)
        image[0, index % 4] = 1.0 + 0.01 * index
        label = torch.tensor((index + (index == self.wrong)) % 4)
        if self.named:
            return Instance(images=DistTensorData(image), labels=DistTensorData(label))
        return image, label


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


class Scores(nn.Module):
    """As the models of config files: a loss in training, scores in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(images)
        if self.training:
            return {"losses": nn.functional.cross_entropy(scores, labels)}
        return {"prediction_scores": scores}


def by_objects(folder: Path, *, resume: bool = False, **settings: Any) -> Trainer:
    config = TrainingConfig(
        output_dir=str(folder), num_epochs=4, batch_size=4, learning_rate=0.05, hardest_samples=3, seed=1,
        eval_batch_size=4, progress_bar=False, resume_from_checkpoint=resume, early_stopping=None, **settings,
    )  # fmt: skip
    return Trainer(net(), config, Digits(wrong=None), Digits())


def by_files(folder: Path, *, resume: bool = False) -> DefaultTrainer:
    cfg = LazyCall(dict)()
    cfg.model = LazyCall(Scores)()
    cfg.optim = LazyCall(torch.optim.Adam)(lr=0.05)
    cfg.dataloader = LazyCall(dict)(
        train=LazyCall(build_image_train_loader)(dataset=[LazyCall(Digits)(named=True, wrong=None)], num_workers=0),
        test=[LazyCall(build_image_test_loader)(dataset=[LazyCall(Digits)(named=True)], num_workers=0)],
    )
    evaluation = {"eval_period": 10, "hardest_samples": 3, "evaluator": {"topk": [1]}}
    cfg.train = {
        "output_dir": str(folder), "train_iter": 40, "log_period": 10, "train_micro_batch_size": 4,
        "test_micro_batch_size": 4, "checkpointer": {"period": 10}, "evaluation": evaluation, "resume": resume,
    }  # fmt: skip
    return DefaultTrainer(cfg)


BUILD = {"objects": by_objects, "files": by_files}
BOTH = pytest.mark.parametrize("api", BUILD)


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "hardest_samples.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A complete run of each API."""
    found = {name: tmp_path_factory.mktemp(name) for name in BUILD}
    for name, folder in found.items():
        BUILD[name](folder).train()
    return found


@BOTH
def test_the_mislabelled_sample_is_the_hardest_by_name(api: str, folders: dict[str, Path]) -> None:
    found = rows(folders[api])
    evaluations = sorted({int(row["iteration"]) for row in found})
    assert len(found) == 3 * len(evaluations)
    assert len(evaluations) == 4
    for iteration in evaluations:
        losses = [float(row["loss"]) for row in found if int(row["iteration"]) == iteration]
        assert losses == sorted(losses, reverse=True)
    last = next(row for row in found if int(row["iteration"]) == evaluations[-1])
    assert (last["sample"], last["name"]) == (str(MISLABELLED), f"digits/{MISLABELLED}.png")
    assert (last["label"], last["prediction"]) == (str((MISLABELLED + 1) % 4), str(MISLABELLED % 4))


def test_both_apis_have_the_exact_loss(folders: dict[str, Path]) -> None:
    model, data = net(), Digits()
    for api, prefix in (("objects", ""), ("files", "layers.")):
        trainer = BUILD[api](folders[api], resume=True)
        model.load_state_dict({name.removeprefix(prefix): value for name, value in trainer.model.state_dict().items()})
        inputs, labels = (torch.stack(column) for column in zip(*(data[n] for n in range(len(data))), strict=True))
        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        found = rows(folders[api])[-3:]
        assert [float(row["loss"]) for row in found] == pytest.approx(losses.topk(3).values.tolist(), rel=1e-4)
        assert [int(row["sample"]) for row in found] == losses.topk(3).indices.tolist()


@BOTH
@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_has_the_same_file(
    api: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = BUILD[api](tmp_path)

    def fail() -> None:
        if trainer.iter == 24:
            raise RuntimeError("killed")
        run_hooks()

    run_hooks = trainer.before_step
    monkeypatch.setattr(trainer, "before_step", fail)
    with pytest.raises(RuntimeError, match="killed"):
        trainer.train()
    later = rows(tmp_path)[-1] | {"iteration": "33", "sample": "1"}  # as if it had run on after its last checkpoint
    with open(tmp_path / "hardest_samples.csv", "a") as file:
        csv.DictWriter(file, list(later)).writerow(later)
    BUILD[api](tmp_path, resume=True).train()
    assert (tmp_path / "hardest_samples.csv").read_bytes() == (folders[api] / "hardest_samples.csv").read_bytes()


@BOTH
def test_the_report_shows_them_with_a_picture(api: str, folders: dict[str, Path]) -> None:
    details = content([RunData(folders[api], "run")])["details"]
    assert f"<td>{MISLABELLED} digits/{MISLABELLED}.png</td>" in details
    assert "of 4 evaluations</td>" in details
    assert f'alt="hardest/{MISLABELLED}"' in details


def test_without_the_setting_there_is_no_file(tmp_path: Path) -> None:
    trainer = by_objects(tmp_path)
    trainer = Trainer(net(), trainer.config.copy_with(hardest_samples=None, num_epochs=1), Digits(), Digits())
    trainer.train()
    assert not (tmp_path / "hardest_samples.csv").exists()


def test_what_is_a_picture() -> None:
    image = pytest.importorskip("PIL.Image").new("L", (6, 5), 255)
    for value, shape in [
        (torch.zeros(3, 8, 8), (3, 8, 8)),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), (3, 8, 8)),
        (np.zeros((8, 8)), (8, 8)),
        (image, (3, 5, 6)),
    ]:
        found = as_picture(value)
        assert found is not None
        assert found.shape == shape
    scaled = as_picture(torch.linspace(-3, 1, 16).reshape(4, 4))
    assert scaled is not None
    assert (float(scaled.min()), float(scaled.max())) == (0.0, 1.0)
    for other in (
        torch.zeros(16),
        torch.zeros(5, 8, 8),
        torch.zeros(8, 8, dtype=torch.int64),
        "text",
        torch.zeros(3, 2, 2),
    ):
        assert as_picture(other) is None

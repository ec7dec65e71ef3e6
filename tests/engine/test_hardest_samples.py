"""The samples of updates and the hardest samples of evaluations, by number and name."""

import csv
import functools
import operator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.toys import Classifier, Samples, file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.data import DistTensorData, Instance
from trainwright.evaluation.hardest_samples.table import as_picture
from trainwright.hooks import CallbackHook, NonFiniteError
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
            return Instance(inputs=DistTensorData(image), labels=DistTensorData(label))
        return image, label


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


def by_objects(folder: Path, *, resume: bool = False) -> Trainer:
    config = TrainingConfig(
        output_dir=folder, num_epochs=4, batch_size=4, learning_rate=0.05, hardest_samples=3, seed=1, eval_batch_size=4,
        progress_bar=False, early_stopping=None, resume_from_checkpoint=resume,
    )  # fmt: skip
    return Trainer(net(), config, Digits(wrong=None), Digits())


def by_files(folder: Path, *, resume: bool = False) -> DefaultTrainer:
    data, test = LazyCall(Digits)(named=True, wrong=None), LazyCall(Digits)(named=True)
    cfg = file_config(
        folder, lambda: Classifier(body=net(), loss="losses"), data, test, train_iter=40, log_period=10, resume=resume,
        train_micro_batch_size=4, test_micro_batch_size=4, checkpointer={"period": 10},
        evaluation={"eval_period": 10, "hardest_samples": 3, "evaluator": {"topk": [1]}},
    )  # fmt: skip
    cfg.optim = LazyCall(torch.optim.Adam)(lr=0.05)
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


@pytest.mark.exhaustive(every=2)
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
    for api, prefix in (("objects", ""), ("files", "body.")):
        trainer = BUILD[api](folders[api], resume=True)
        model.load_state_dict({name.removeprefix(prefix): value for name, value in trainer.model.state_dict().items()})
        inputs, labels = (torch.stack(column) for column in zip(*(data[n] for n in range(len(data))), strict=True))
        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        found = rows(folders[api])[-3:]
        assert [float(row["loss"]) for row in found] == pytest.approx(losses.topk(3).values.tolist(), rel=1e-4)
        assert [int(row["sample"]) for row in found] == losses.topk(3).indices.tolist()


@pytest.mark.exhaustive(every=2)
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


GREY = np.zeros((8, 8))


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (torch.zeros(3, 8, 8), (3, 8, 8)),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), (3, 8, 8)),
        (GREY, (8, 8)),
        (Image.new("L", (6, 5), 255), (3, 5, 6)),
        *((other, None) for other in (torch.zeros(16), torch.zeros(5, 8, 8), GREY.astype(int), "text")),
        (torch.zeros(3, 2, 2), None),
    ],
)
def test_what_is_a_picture(value: Any, shape: Any) -> None:
    found = as_picture(value)
    assert found is None if shape is None else found.shape == shape
    scaled = as_picture(torch.linspace(-3, 1, 16).reshape(4, 4))
    assert (float(scaled.min()), float(scaled.max())) == (0.0, 1.0)


NUM, BAD = 160, 71
READ: list[int] = []


class Photos(Samples):
    """A loss of about 1 for each sample, and of ``bad`` for one."""

    def __init__(self, bad: float = 1.0) -> None:
        noise = 1.0 + 0.2 * torch.randn(NUM, 1, generator=torch.Generator().manual_seed(0))
        noise[BAD] *= bad
        super().__init__(values=lambda index: (READ.append(int(index)), noise[index])[1], length=NUM)
        self.paths = [f"photos/{number:03d}.png" for number in range(NUM)]


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        return {"loss": (values + self.shift).mean()}


def ids_by_objects(folder: Path, dataset: Any, **settings: Any) -> Trainer:
    config = quiet(
        folder, num_epochs=2, batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-4, log_steps=10, seed=1,
        lr_scheduler_type="linear", **{"save_enabled": False, **settings},
    )  # fmt: skip
    return Trainer(Level(), config, dataset)


def ids_by_files(folder: Path, dataset: Any, **settings: Any) -> DefaultTrainer:
    cfg = file_config(
        folder, Level, lambda: dataset, train_iter=80, log_period=10, train_micro_batch_size=2,
        num_accumulation_steps=2, **{"checkpointer": {"period": 1000}, **settings},
    )  # fmt: skip
    cfg.optim = LazyCall(torch.optim.SGD)(lr=1e-4)
    return DefaultTrainer(cfg)


IDS_BUILD = {"objects": ids_by_objects, "files": ids_by_files}
IDS_BOTH = pytest.mark.parametrize("api", IDS_BUILD)


@IDS_BOTH
def test_the_ids_are_those_that_are_read_seen_from_any_update(api: str, tmp_path: Path) -> None:
    trainer = IDS_BUILD[api](tmp_path, Photos())
    before = [trainer.sample_ids(update) for update in range(1, 81)]
    in_step: list[Any] = []
    trainer.register_hooks(
        [CallbackHook(after_step=lambda trainer: in_step.append(trainer.sample_ids(trainer.iter + 1)))]
    )
    READ.clear()
    trainer.train()
    after = [trainer.sample_ids(update) for update in range(1, 81)]
    assert before == in_step == after == [[READ[n : n + 2], READ[n + 2 : n + 4]] for n in range(0, 320, 4)]


class Changing(Photos):
    """Data whose length differs from epoch to epoch."""

    num = NUM

    def __init__(self, sign: int, steps: int = 8) -> None:
        super().__init__()
        self.change = sign * steps

    def set_epoch(self, epoch: int) -> None:
        self.num = NUM + epoch * self.change

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        READ.append(int(index))
        return {"values": torch.zeros(1)}


def of_update(trainer: Any, update: int) -> list[int] | None:
    ids = trainer.sample_ids(update)
    return None if ids is None else functools.reduce(operator.iadd, ids, [])


@IDS_BOTH
@pytest.mark.parametrize("sign", [1, -1])
def test_the_ids_of_data_that_change_their_length_are_those_that_are_read(api: str, sign: int, tmp_path: Path) -> None:
    trainer = IDS_BUILD[api](tmp_path, Changing(sign))
    in_step: list[Any] = []
    trainer.register_hooks(
        [CallbackHook(after_step=lambda trainer: in_step.append(of_update(trainer, trainer.iter + 1)))]
    )
    READ.clear()
    trainer.train()
    assert [of_update(trainer, update) for update in range(1, trainer.max_iter + 1)] == in_step
    assert functools.reduce(operator.iadd, in_step, []) == READ


@IDS_BOTH
@pytest.mark.parametrize("sign", [1, -1, 0])
def test_ids_after_a_resume_are_right_or_unknown_if_the_length_has_changed(api: str, sign: int, tmp_path: Path) -> None:
    def stop(trainer: Any) -> None:
        if trainer.iter == 60:
            raise KeyboardInterrupt

    saves: Any = {"checkpointer": {"period": 25}}
    if api == "objects":
        saves = {"save_steps": 50, "save_enabled": True}
    READ.clear()
    trainer = IDS_BUILD[api](tmp_path, Changing(sign), **saves)
    trainer.register_hooks([CallbackHook(after_step=stop)])
    with suppress(KeyboardInterrupt):
        trainer.train()
    read = READ[: 4 * trainer.iterations_done]
    READ.clear()
    more: Any = {"resume_from_checkpoint": True} if api == "objects" else {"resume": True}
    trainer = IDS_BUILD[api](tmp_path, Changing(sign), **saves, **more)
    READ.clear()
    first = trainer.start_iter
    assert first > 0
    trainer.train()
    read = read[: 4 * first] + READ
    for update in range(1, trainer.max_iter + 1):
        ids = of_update(trainer, update)
        assert ids == read[4 * (update - 1) : 4 * update] or (sign and ids is None and update <= first)


@IDS_BOTH
def test_a_spike_names_its_samples(api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = IDS_BUILD[api](tmp_path, Photos(bad=60.0))
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


@IDS_BOTH
@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_a_loss_that_is_not_finite_names_its_samples(
    api: str, policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = IDS_BUILD[api](tmp_path, Photos(bad=float("inf")), non_finite=policy)
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

    trainer = ids_by_objects(tmp_path, Unnamed())
    first = trainer.sample_ids(3)[0][0]
    assert trainer.described_samples(3).startswith(f"Samples of update 3: {first}, ")


def test_loaders_and_steps_of_the_user_have_unknown_ids(tmp_path: Path) -> None:
    class Own(Trainer):
        def run_step(self) -> None:
            super().run_step()

    assert Trainer(Level(), quiet(tmp_path), train_dataloader=DataLoader(Photos(), 4)).sample_ids(1) is None
    assert Own(Level(), quiet(tmp_path), Photos()).sample_ids(1) is None


@IDS_BOTH
def test_updates_that_do_not_exist_are_refused(api: str, tmp_path: Path) -> None:
    trainer = IDS_BUILD[api](tmp_path, Photos())
    for update in (0, 81):
        with pytest.raises(ConfigError, match=f"got update {update}; the run has the updates 1 to 80"):
            trainer.sample_ids(update)


def test_an_earlier_start_with_another_batch_size_is_refused(tmp_path: Path) -> None:
    trainer = ids_by_files(tmp_path, Photos())
    trainer.start_iter = 40
    (tmp_path / "run.json").write_text('{"starts": [{"samples_per_iteration": 4}, {"samples_per_iteration": 8}]}')
    with pytest.raises(ConfigError, match=r"update 40 .* 4 and 8 samples"):
        trainer.sample_ids(40)
    assert trainer.sample_ids(41) is not None


def test_the_samples_of_an_earlier_start_with_other_data_are_unknown(tmp_path: Path) -> None:
    trainer = ids_by_files(tmp_path, Photos())
    trainer.start_iter = 40
    (tmp_path / "run.json").write_text('{"starts": [{"iterations_per_epoch": 40.0}, {"iterations_per_epoch": 42.0}]}')
    assert trainer.sample_ids(40) is None
    assert trainer.sample_ids(41) is not None

"""What a run says of itself: one numbering of iterations, from 1, in every line for people."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from tests.config_trainer.test_default_trainer import config
from tests.spent_time import spend
from tests.toys import Classifier, file_config, quiet
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.engine.folder.summary import described_model, described_optimizers
from trainwright.hooks import Callback

DATA = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))


def test_lines_of_one_iteration_agree_on_its_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stop(Callback):
        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            self.trainercontrol.should_training_stop = epochs == 2

    caplog.set_level("INFO", "trainwright")
    settings = TrainingConfig(output_dir=tmp_path, batch_size=4, num_epochs=3, progress_bar=False, lr=1e-2)
    Trainer(nn.Linear(4, 2), settings, DATA, DATA, callbacks=[Stop()]).train()
    lines = [record.getMessage() for record in caplog.records]
    (stop,) = [line for line in lines if line.startswith("Stopping after")]
    assert stop == "Stopping after iteration 10: a callback has set should_training_stop."
    assert lines[-1].startswith("Finished after iteration 10\n")
    found = re.findall(r"iteration (\d+)/15", "\n".join(lines))
    assert found == ["5", "5", "10", "10"]  # values of the training, and of the evaluation
    (best,) = re.findall(r"Best .*iteration (\d+)\)", lines[-1])
    assert (tmp_path / f"checkpoints/{best.zfill(2)}").is_dir()


def test_settings_are_shown_as_far_as_they_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def shown(start: str, **names: Any) -> tuple[str, str]:
        caplog.clear()
        settings = TrainingConfig(output_dir=tmp_path, progress_bar=False, save_enabled=False, **names)
        Trainer(nn.Linear(4, 2), settings, DATA).train()
        (record,) = [record for record in caplog.records if record.getMessage().startswith(start)]
        return record.levelname, " ".join(record.getMessage().split())

    caplog.set_level("INFO", "trainwright")
    level, table = shown("Training\n", num_epochs=1, lr=0.01, metric=None)
    own = f"TrainingConfig(output_dir='{tmp_path}', num_epochs=1, lr=0.01, metric=None, progress_bar=False,"
    assert (level, table.endswith(f"Settings {own} save_enabled=False)")) == ("INFO", True)
    # As the page that shows all of its settings.
    level, line = shown("TrainingConfig(", epoch_num=1)
    assert (level, "epoch_num=1, dataloader_pin_memory=True" in line) == ("WARNING", True)


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({}, "; each epoch leaves out 2: dataloader_drop_last"),
        ({"dataloader_drop_last": False}, ""),
        ({"limit_train_batches": 1}, ""),
    ],
)
def test_samples_that_an_epoch_leaves_out_are_counted(
    settings: dict[str, Any], left_out: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    Trainer(nn.Linear(4, 2), TrainingConfig(output_dir=tmp_path, batch_size=6, num_epochs=1, **settings), DATA).train()
    assert f"20 to train (samples{left_out})\n" in caplog.text


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA[index] for index in range(len(DATA)))


@pytest.mark.parametrize(
    ("train", "evaluated", "line"),
    [
        (Stream(), DATA, "a stream to train, 20 samples to evaluate"),
        (DATA, Stream(), "20 samples to train, a stream to evaluate"),
        (Stream(), None, "a stream to train"),
        (DATA, DATA, "20 to train, 20 to evaluate (samples)"),
    ],
)
def test_the_start_names_streams(
    train: Any, evaluated: Any, line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    settings = TrainingConfig(output_dir=tmp_path, batch_size=4, max_steps=2, progress_bar=False, tensorboard=None)
    Trainer(nn.Linear(4, 2), settings, train, evaluated).train()
    (start,) = [rows(record) for record in caplog.messages if record.startswith("Training\n")]
    assert start["Data"] == line


def test_the_last_values_of_a_stream_are_recent_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Falling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.done = nn.Linear(4, 2), 0

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            self.done += 1
            return {"loss": 0 * self.layer(inputs).sum() + 100.0 - self.done}

        def compute_loss(self, inputs: Any) -> Any:
            return self(inputs[0])

    caplog.set_level("INFO", "trainwright")
    settings = quiet(tmp_path, batch_size=4, max_steps=80, metrics=None)
    trainer = Trainer(Falling(), settings, Stream())
    trainer.train()
    assert trainer.history[-1]["total_loss"] == pytest.approx(29.5), "the median of the last 20"
    assert "Last    total_loss 29.5" in caplog.text


def test_the_start_of_a_config_file_names_streams(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainwright")
    DefaultTrainer(file_config(tmp_path, Classifier, Stream, train_iter=2)).print_info()
    (start,) = [rows(record) for record in caplog.messages if record.startswith("Training\n")]
    assert start["Data"].startswith("a stream to train")


def run(folder: Path, api: str) -> Trainer | DefaultTrainer:
    if api == "python_api":
        settings = TrainingConfig(output_dir=folder, batch_size=4, num_epochs=2, progress_bar=False, optimizer="sgd")
        trainer: Any = Trainer(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), settings, DATA, DATA)
    else:
        cfg = config(folder)
        cfg.train.train_iter = 8
        trainer = DefaultTrainer(cfg)
    assert re.search(r"Iterations</td><td>1 to \d+", trainer._repr_html_())
    trainer.train()
    return trainer


@pytest.mark.parametrize("api", ["python_api", "config_files"])
def test_the_start_and_the_end_of_a_run(api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainwright")
    trainer = run(tmp_path, api)
    start, end = [rows(record) for record in caplog.messages if record.startswith(("Training\n", "Finished after"))]
    assert start.keys() >= {"Model", "Data", "Iterations", "Batch", "Optimizer", "Device", "Folder", "Settings"}
    assert re.search(r"[\d,]+ parameters \([\d.]+ k?B\)", start["Model"])
    assert re.fullmatch(r"\d+ samples = \d+ x 1 accumulation x 1 process", start["Batch"])
    assert re.match(r"1 to \d+ \([\d.]+ epochs\)", start["Iterations"])
    assert end.keys() == {"Best", "Last", "Folder", "Next"}
    best = end["Best"].rpartition(": ")[2]
    assert Path(best).is_dir()
    assert end["Next"].startswith(f"tensorboard --logdir {tmp_path}")
    html = trainer._repr_html_()  # of a notebook
    assert re.search(r"Iterations</td><td>(\d+) of \1 done<", html)
    assert end["Best"].rpartition(":")[0] in html
    assert "<svg" in html


def test_the_parts_of_a_model_are_the_largest_ones() -> None:
    parts = nn.ModuleDict({f"part{size}": nn.Linear(size, 1, bias=False) for size in range(1, 7)})
    parts["part1"].requires_grad_(False)
    described = described_model(parts)
    facts = ("21 parameters", "84 B", "20 trainable", "6 in part6, 5 in part5, 4 in part4, 3 in part3, 3 in others")
    assert all(fact in described for fact in facts)
    tied = nn.ModuleDict({"words": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
    tied["head"].weight = tied["words"].weight
    assert described_model(tied) == "ModuleDict: 25 parameters (100 B): 20 in words, 5 in head"
    wrapped = nn.Sequential(nn.ModuleDict({"stack": nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))}))
    assert described_model(wrapped).endswith(": 10 in Linear 0, 3 in Linear 2")
    one = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    two = described_optimizers({"g": one, "d": one}, "linear schedule")
    assert two == "g: SGD, lr 0.1; d: SGD, lr 0.1; linear schedule"


def rows(text: str) -> dict[str, str]:
    """The rows of a table by name; what continues below is left out."""
    found = [re.match(r"  (\w+) +(.*)", line) for line in text.splitlines()[1:]]
    return {match[1]: match[2] for match in found if match}


def test_a_resume_reports_a_folder_without_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainwright")
    settings = TrainingConfig(output_dir=tmp_path / "typo", resume_from_checkpoint=True)
    Trainer(nn.Linear(4, 2), settings, DATA, DATA)
    assert f"{tmp_path / 'typo'} holds no checkpoint to resume from: starting a new run." in caplog.messages


def test_a_run_that_early_stopping_has_ended_says_how_to_continue_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    for resume in (False, True):
        settings = TrainingConfig(
            output_dir=tmp_path, batch_size=4, num_epochs=6, progress_bar=False, lr=1e-2, early_stopping={
                "patience": 1, "min_delta": 100.0}, resume_from_checkpoint=resume,
        )  # fmt: skip
        Trainer(nn.Linear(4, 2), settings, DATA, DATA).train()
    (line,) = [message for message in caplog.messages if message.startswith("Nothing to train")]
    assert "a callback stopped the run after iteration 10." in line
    assert "a larger patience or early_stopping=None continues it" in line
    ends = [message for message in caplog.messages if message.startswith("Finished after iteration 10")]
    assert len(ends) == 1
    assert "resume_from_checkpoint=True with early_stopping=None trains it longer" in ends[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, "num_epochs=4"), ({"max_steps": 3}, "max_steps=6"), ({"max_steps": 0.5}, "max_steps=None")],
)
def test_the_end_names_the_setting_that_ended_the_run(
    settings: dict[str, Any], expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    config = TrainingConfig(output_dir=tmp_path, batch_size=4, num_epochs=2, progress_bar=False, **settings)
    Trainer(nn.Linear(4, 2), config, DATA, DATA).train()
    assert caplog.messages[-1].endswith(f"resume_from_checkpoint=True with {expected} trains it longer")


def test_a_finished_run_has_no_line_of_its_iterations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainwright")
    for resume in (False, True):
        cfg = config(tmp_path)
        cfg.train.update(train_iter=2, resume=resume)
        DefaultTrainer(cfg).train()
    (first,) = [message for message in caplog.messages if message.startswith("Training\n")]
    assert rows(first)["Iterations"].startswith("1 to 2")


class SlowMetric:
    """A metrics_handler, each update of which takes 20 ms, and the first one 1 s more for what it imports."""

    def __init__(self) -> None:
        self.seconds = 1.02

    def train_copy(self) -> "SlowMetric":
        return SlowMetric()

    def reset(self) -> None: ...

    def update(self, predictions: Any, labels: Any) -> None:
        spend(self.seconds)
        self.seconds = 0.02

    def compute(self) -> dict[str, float]:
        return {"accuracy": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.usefixtures("clock")
def test_the_metric_of_a_training_has_a_phase_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = TensorDataset(torch.randn(208, 4), torch.randint(3, (208,)))
    with caplog.at_level(logging.INFO):
        config = quiet(tmp_path, batch_size=4, num_epochs=1, save_enabled=False)
        trainer = Trainer(nn.Linear(4, 3), config, train_dataset=data, metrics_handler=SlowMetric())
        trainer.train()
    assert trainer.phases.metrics == pytest.approx(52 * 0.02 + 1)
    assert trainer.phases.forward == trainer.phases.backward == 0
    assert "Time: metrics 100 %." in caplog.text
    assert "Advice:" not in caplog.text  # whether it was the metric or its import is not measured

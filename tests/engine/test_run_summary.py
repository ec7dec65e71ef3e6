"""What a run says of itself: one numbering of iterations, from 1, in every line for people."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig, get_config
from trainwright.engine.run_summary import log_header
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
    (stop,) = [line for line in lines if line.startswith("A callback stops")]
    assert stop == "A callback stops the training after iteration 10."
    shown = [found[0] for line in lines if (found := re.findall(r"iteration: (\d+/\d+)", line))]
    assert shown == ["5/15", "10/15", "10/15"]  # the last line is that of the final evaluation
    best = [found[0] for line in lines if (found := re.findall(r"Best .*iteration (\d+)\)", line))]
    assert best
    assert set(best) <= {"5", "10"}


def test_the_configuration_is_shown_as_far_as_it_differs_and_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shown(**names: Any) -> tuple[str, str]:
        caplog.clear()
        settings = TrainingConfig(output_dir=tmp_path, progress_bar=False, save_enabled=False, **names)
        Trainer(nn.Linear(4, 2), settings, DATA).train()
        (record,) = [record for record in caplog.records if record.getMessage().startswith("TrainingConfig(")]
        return record.levelname, record.getMessage()

    caplog.set_level("INFO", "trainwright")
    own = f"TrainingConfig(output_dir='{tmp_path}', num_epochs=1, lr=0.01, metric=None, progress_bar=False,"
    assert shown(num_epochs=1, lr=0.01, metric=None) == ("INFO", f"{own} save_enabled=False), defaults otherwise.")
    level, line = shown(epoch_num=1)  # as the page that shows all of its settings
    assert (level, "epoch_num=1, dataloader_pin_memory=True" in line) == ("WARNING", True)


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


def test_a_finished_run_has_no_line_of_its_iterations(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainwright")
    cfg = get_config("common/defaults.py")
    cfg.train.update(train_iter=2, global_batch_size=32, num_accumulation_steps=1)
    for first_iter in (1, 2):
        log_header(cfg, nn.Linear(4, 2), torch.device("cpu"), first_iter=first_iter, num_samples=None)
    (line,) = [message for message in caplog.messages if message.startswith("Iterations")]
    assert line.startswith("Iterations 2 to 2,")

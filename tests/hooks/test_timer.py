"""Where the time of a training went, and what is said of it at the end."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.spent_time import Net, about, eager, spend
from tests.toys import Samples, file_config
from trainwright import Trainer, TrainingConfig
from trainwright.engine import DefaultTrainer, EagerTrainer, TrainerBase
from trainwright.events import PhaseTimes
from trainwright.hooks import CallbackHook, IterationTimer
from trainwright.hooks.timer import Facts, SettingNames, advice, shares_of


@pytest.mark.usefixtures("clock")
def test_the_time_of_an_iteration_is_without_hooks() -> None:
    trainer = eager(forward_s=0.003)
    around = CallbackHook(before_step=lambda t: spend(0.02), after_step=lambda t: spend(0.01))
    trainer.register_hooks([around, IterationTimer(warmup_iter=0), around])
    trainer.train(0, 5)
    assert trainer.storage.history("time").values() == [(about(0.003), iteration) for iteration in range(5)]


@pytest.mark.usefixtures("clock")
def test_the_end_of_a_training_tells_where_its_time_went(caplog: pytest.LogCaptureFixture) -> None:
    trainer = eager(forward_s=0.01, data_s=0.03)
    trainer.register_hooks([IterationTimer(facts=lambda t: Facts(num_workers=0, names=SettingNames(workers="num_w")))])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 55)
    trained, times, advised = [record.getMessage() for record in caplog.records]
    assert trained.startswith("Trained 55 iterations in 2.20 s (40 ms each)")
    assert times == "Time: data 75 %, forward 25 %."
    assert advised.startswith("Advice: Waiting for data takes 75 % of the time: ")
    assert "num_w above 0" in advised


@pytest.mark.usefixtures("clock")
def test_one_advice_is_given_once_though_epochs_are_trainings_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    trainer = eager(data_s=0.045)
    trainer.register_hooks([IterationTimer()])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 50)
        trainer.train(50, 100)
    assert caplog.text.count("Trained 50 iterations") == 2
    assert caplog.text.count("Advice:") == 1


@pytest.mark.usefixtures("clock")
def test_on_an_accelerator_the_times_are_said_to_be_of_the_host(caplog: pytest.LogCaptureFixture) -> None:
    trainer = eager(forward_s=0.02)
    trainer.register_hooks([IterationTimer(facts=lambda t: Facts(device="cuda"))])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 55)
    assert "Time of the host: " in caplog.text
    assert "It runs ahead of the cuda device: a ProfileHook shows both." in caplog.text


def test_other_processes_say_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.hooks.timer.is_main_process", lambda: False)
    trainer = eager()
    trainer.register_hooks([IterationTimer()])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 5)
    assert not caplog.records


@pytest.mark.usefixtures("clock")
def test_a_step_that_nobody_divides_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    class Own(TrainerBase):
        def run_step(self) -> None:
            spend(0.02)

    trainer = Own()
    trainer.register_hooks([IterationTimer()])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 55)
    assert "Trained 55 iterations in 1.10 s (20 ms each)" in caplog.text
    assert trainer.phases.forward == about(55 * 0.02)


# The names of settings are those of the API.


def slowly(index: int) -> torch.Tensor:
    spend(0.01)
    return torch.full((4,), float(index % 2))


@pytest.mark.usefixtures("clock")
def test_advice_of_the_python_api_has_its_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = TrainingConfig(
        output_dir=str(tmp_path), batch_size=4, num_epochs=1, metrics=None, progress_bar=False, device_str="cpu",
        save_enabled=False, tensorboard=None, early_stopping=None,
    )  # fmt: skip
    data = Samples(slowly, torch.randint(0, 3, (208,)), length=208)
    with caplog.at_level(logging.INFO):
        Trainer(nn.Linear(4, 3), config, train_dataset=data).train()
    assert re.search(r"Advice: Waiting for data takes \d+ % of the time: dataloader_num_workers above 0 ", caplog.text)


@pytest.mark.usefixtures("clock")
def test_advice_of_config_files_has_its_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = file_config(tmp_path, Net, lambda: Samples(x=slowly, length=208), train_iter=52, train_micro_batch_size=4)
    with caplog.at_level(logging.INFO):
        DefaultTrainer(cfg).train()
    said = r"Advice: Waiting for data takes \d+ % of the time: num_workers of dataloader.train above 0 "
    assert re.search(said, caplog.text)


@pytest.mark.usefixtures("clock")
def test_what_the_first_iteration_imports_is_blamed_on_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Importing(EagerTrainer):
        def write_metrics(self, *arguments: Any, **named: Any) -> None:
            super().write_metrics(*arguments, **named)
            if self.iter == 0:
                spend(5.0)
                self.phases.metrics += 5.0

    model = Net(forward_s=0.05)
    trainer = Importing(model, [{"x": torch.ones(2, 4)}], torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([IterationTimer()])
    with caplog.at_level(logging.INFO):
        trainer.train(0, 61)
    trained, times = [record.getMessage() for record in caplog.records]
    assert "(50 ms each, after a first one of 5.05 s)" in trained
    assert times == "Time: forward 100 %."


NAMES = SettingNames(
    workers="dataloader_num_workers",
    no_workers="dataloader_num_workers=0",
    collate="data_collator=same",
    save="save_steps",
    asynchronous="asynchronous=True",
    evaluate="eval_steps",
    profile="profile=True",
)
# A training of 100 s and 10,000 iterations of 10 ms in which nothing stands out.
WELL = {"data": 4.0, "forward": 36.0, "backward": 48.0, "optimizer": 8.0, "hooks": 4.0}


def advice_for(
    seconds: float = 100.0, iterations: int = 10_000, facts: dict[str, Any] | None = None, **phases: float
) -> str:
    """The advice for some seconds in each phase, "" for none."""
    times = PhaseTimes(**{**WELL, **phases})
    own = {"iterations": iterations, "num_workers": 0, "num_cpus": 4, "names": NAMES, **(facts or {})}
    return advice(shares_of(times, seconds), seconds, Facts(**own)) or ""


DATA = {"data": 60.0, "forward": 10.0, "backward": 18.0}
QUICK = {**DATA, "iterations": 1_000_000}
HANDED_OVER = {"iterations": 100_000, "data": 70.0, "forward": 6.0, "backward": 10.0, "optimizer": 4.0}
LATE = {"hooks": 58.0, "forward": 10.0, "backward": 20.0}
BOTH = {"data": 25.0, "hooks": 45.0, "save": 40.0, "forward": 10.0, "backward": 12.0}


@pytest.mark.parametrize(
    ("times", "facts", "said", "not_said"),
    [
        ({}, {}, "^$", None),
        (DATA, {}, "Waiting for data takes 60 %.*dataloader_num_workers.*__getitems__", None),
        (DATA, {"reads_batches": True}, "dataloader_num_workers", "__getitems__"),
        (DATA, {"reads_batches": True, "is_in_memory": True}, "", "num_workers"),  # no worker reads tensors faster
        (QUICK, {}, "ColumnDataset.*__getitems__ returns the complete batch, with data_collator=same", "num_workers"),
        (QUICK, {"reads_batches": True}, "", "data"),
        (DATA, {"num_workers": 1}, "with 1 worker for 4 CPUs: raise dataloader_num_workers", None),
        (DATA, {"num_workers": 2}, "with 2 workers for 4 CPUs: raise dataloader_num_workers", None),
        (DATA, {"num_workers": 4}, "prepare samples once", None),
        (HANDED_OVER, {"num_workers": 1}, "70 %.*with 1 worker: .*dataloader_num_workers=0", None),
        (HANDED_OVER, {"num_workers": 4}, "70 %.*with 4 workers: .*dataloader_num_workers=0", None),
        ({**HANDED_OVER, "iterations": 20_000}, {"num_workers": 4}, "", "dataloader_num_workers=0"),  # a long step
        ({**DATA, "iterations": 50_000}, {}, "num_workers", None),
        ({**DATA, "iterations": 50_000}, {"batches": 8}, "", "num_workers"),  # of each update
        ({**LATE, "evaluation": 50.0}, {}, "Evaluations take 50 %.*eval_steps", None),
        ({**LATE, "save": 50.0}, {}, "Saves take 50 %.*save_steps", None),
        ({**LATE, "save": 50.0}, {"saves_async": False}, "asynchronous=True", None),
        (BOTH, {}, "Saves take", "data"),
        ({**BOTH, "data": 50.0, "save": 20.0, "hooks": 20.0}, {}, "Waiting for data", "Saves"),
    ],
)
def test_the_advice(times: dict[str, Any], facts: dict[str, Any], said: str, not_said: str | None) -> None:
    line = advice_for(**times, facts=facts)
    assert re.search(said, line)
    assert not_said is None or not_said not in line


@pytest.mark.parametrize(("seconds", "iterations"), [(1.9, 10_000), (100.0, 49)])
def test_no_advice_for_a_short_run(seconds: float, iterations: int) -> None:
    scale = seconds / 100
    phases = {name: value * scale for name, value in {**WELL, "data": 64.0, "forward": 10.0, "backward": 14.0}.items()}
    assert advice_for(seconds, iterations, **phases) == ""
    assert advice_for(data=64.0, forward=10.0, backward=14.0) != ""


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "metrics", "hooks", "compile"])
def test_nothing_is_blamed_whose_cause_is_not_measured(phase: str) -> None:
    """The first use of a package, for one, is in the phase that uses it."""
    assert advice_for(iterations=300_000, **{**dict.fromkeys(WELL, 2.0), phase: 90.0}) == ""


def test_shares_add_up_after_an_evaluation_that_failed() -> None:
    """The time of the hooks after a step is added when all of them are done."""
    phases = PhaseTimes(forward=2.0, hooks=1.0, evaluation=5.0)
    shares = shares_of(phases, 10.0)
    assert (shares["forward"], shares["evaluation"], shares["hooks"], shares["other"]) == (0.2, 0.5, 0.0, 0.3)
    assert sum(shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(("start", "timed"), [(0, [1, 2, 3, 4]), (10, [10, 11, 12, 13, 14])])
def test_the_timer_leaves_out_the_first_iterations_of_a_run(
    caplog: pytest.LogCaptureFixture, start: int, timed: list[int]
) -> None:
    trainer = eager()
    trainer.register_hooks([IterationTimer(warmup_iter=2)])
    with caplog.at_level(logging.INFO):
        trainer.train(start, start + 5)
    assert [iteration for _, iteration in trainer.storage.history("time").values()] == timed
    (record,) = caplog.records  # a short training tells its time and no more
    assert record.getMessage().startswith("Trained 5 iterations")

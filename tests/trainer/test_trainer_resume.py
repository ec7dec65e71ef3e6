"""StoppedError and resumed, a run of the Python API ends where the uninterrupted one does, bit for bit."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import Samples, pairs, pairs_net, quiet
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, MissingFileError
from trainwright.hooks import Callback

pytestmark = pytest.mark.slow

DATA = pairs()
INPUTS, LABELS = DATA.tensors


class StoppedError(Exception):
    pass


class Stopping(Trainer):
    """Fails when it is about to make this step."""

    stop_at = 0

    def training_step(self, batch: Any) -> Any:
        if self.state.global_step == self.stop_at:
            raise StoppedError
        return super().training_step(batch)


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {"num_epochs": 3, "save_steps": 4, "lr": 0.01, "dataloader_drop_last": False, "lr_scheduler_type": "linear"}
    return quiet(folder, allow_other_trainer=True, **{**given, **settings})  # one class stops, another continues


def trained(folder: Path, **settings: Any) -> Trainer:
    trainer = Trainer(pairs_net(), config(folder, **settings), DATA)
    trainer.train()
    return trainer


def stopped(folder: Path, at: int) -> "Stopping":
    trainer = Stopping(pairs_net(), config(folder), DATA)
    trainer.stop_at = at
    with pytest.raises(StoppedError):
        trainer.train()
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return trained(tmp_path_factory.mktemp("whole"), log_steps=2)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize(("number", "ends_with"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_saves_and_stops_between_two_updates(
    number: signal.Signals, ends_with: type[BaseException], tmp_path: Path
) -> None:
    """In the middle of an accumulation window: the window is finished first."""
    settings = {"gradient_accumulation_steps": 3, "save_steps": 100}
    uninterrupted = trained(tmp_path / "whole", **settings)

    class Scripted(Trainer):
        def training_step(self, batch: Any) -> Any:
            if self.state.global_step == 5:
                os.kill(os.getpid(), number)
            return super().training_step(batch)

    with pytest.raises(ends_with):
        Scripted(pairs_net(), config(tmp_path / "cut", **settings), DATA).train()
    resumed = Trainer(pairs_net(), config(tmp_path / "cut", resume_from_checkpoint=True, **settings), DATA)
    assert resumed.state.global_step == 6
    resumed.train()
    assert torch.equal(weights(resumed), weights(uninterrupted))


def test_a_run_goes_on_from_a_path_in_another_folder(tmp_path: Path, whole: Trainer) -> None:
    for path, step in ((whole.checkpoints_dir / "08", 8), (whole.output_dir, 21)):
        resumed = Trainer(pairs_net(), config(tmp_path / str(step), resume_from_checkpoint=path), DATA)
        assert resumed.state.global_step == step
        resumed.train()
        assert torch.equal(weights(resumed), weights(whole))


def test_save_and_load_bring_back_the_whole_state(tmp_path: Path, whole: Trainer) -> None:
    stopping = stopped(tmp_path / "cut", 11)
    assert stopping.state.global_step == 10
    stopping.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").is_file()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        stopping.save(tmp_path / "saved", overwrite=False)

    loaded = Trainer(pairs_net(), config(tmp_path / "other"), DATA)
    loaded.load(tmp_path / "saved")
    assert (loaded.epoch, loaded.state.epoch_step) == (2, 3)
    loaded.train()
    assert torch.equal(weights(loaded), weights(whole))


@pytest.mark.parametrize("ema", [None, {"decay": 0.5}])
def test_a_checkpoint_that_a_callback_saves_in_an_evaluation_resumes_exactly(ema: Any, tmp_path: Path) -> None:
    class Saving(Callback):
        def on_eval_batch_end(self, batch: Any, logs: Any) -> None:
            if whole.state.global_step == 7:
                whole.save(tmp_path / "saved")

    def trainer(name: str) -> Trainer:
        loader = DataLoader(DATA, 8, shuffle=True)  # draws from torch's generator
        return Trainer(pairs_net(), config(tmp_path / name, ema=ema), DATA, eval_dataloader=loader)

    whole = trainer("whole")
    whole.add_callback(Saving())
    whole.train()
    resumed = trainer("resumed")
    resumed.load(tmp_path / "saved")
    assert resumed.state.global_step == 7
    resumed.train()
    assert torch.equal(weights(resumed), weights(whole))


def test_a_second_train_goes_on_after_a_failure(tmp_path: Path, whole: Trainer) -> None:
    stopping = stopped(tmp_path / "cut", 11)
    stopping.stop_at = 0
    stopping.train()
    assert torch.equal(weights(stopping), weights(whole))
    assert stopping.train() == {}  # nothing is left to do


def test_the_mean_losses_of_a_long_run_continue_at_a_resume(tmp_path: Path) -> None:
    """Of the run and of the epoch: a checkpoint has the last thousand losses, which are not all of them."""
    means: dict[int, tuple[float, float]] = {}

    class Last(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            if logs["global_step"] == 1100:
                means[len(means)] = (logs["epoch_loss"], trainer.state.mean_loss())

    def new(folder: str, **settings: Any) -> Stopping:
        data = TensorDataset(INPUTS.repeat(22, 1), LABELS.repeat(22))  # 1100 samples
        config = quiet(
            tmp_path / folder, num_epochs=1, batch_size=1, lr=0.01, eval_strategy="no", save_steps=1050, **settings
        )
        return Stopping(pairs_net(), config, data, callbacks=[Last()])

    trainer = new("whole")
    trainer.train()
    stopping = new("cut")
    stopping.stop_at = 1060
    with pytest.raises(StoppedError):
        stopping.train()
    trainer = new("cut", resume_from_checkpoint=True)
    assert trainer.state.global_step == 1050
    trainer.train()
    losses = [loss for loss, _ in trainer.storage.history("total_loss").values()]
    assert len(losses) < 1100
    assert len(means) == 2
    assert means[1] == means[0]


def test_a_resume_that_would_train_on_other_batches_is_refused(tmp_path: Path) -> None:
    Trainer(pairs_net(), config(tmp_path, max_steps=10, gradient_accumulation_steps=4), DATA).train()
    with pytest.raises(ConfigError, match=r"batch .* was 8 and is 4 now; steps_per_epoch was 7 and is 13 now"):
        Trainer(pairs_net(), config(tmp_path, resume_from_checkpoint=True, batch_size=4), DATA)
    with pytest.raises(ConfigError, match="within an accumulation window, at step 10"):
        Trainer(pairs_net(), config(tmp_path, resume_from_checkpoint=True, gradient_accumulation_steps=4), DATA)
    with pytest.raises(MissingFileError, match="nowhere: there is no such file or folder"):
        Trainer(pairs_net(), config(tmp_path, resume_from_checkpoint=tmp_path / "nowhere"), DATA)


class Counting(Callback):
    """Has a memory."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, float]] = []

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.seen.append((logs["global_step"], logs["epoch_loss"], logs["epoch_metric"]))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = [tuple(entry) for entry in state["seen"]]


def everything(folder: Path, *, workers: int, stop_at: int, resume: bool) -> tuple[Stopping, Counting]:
    stopping = {"monitor": "eval_epoch_loss", "patience": 3, "mode": "min", "min_delta": 1.0}
    settings = config(
        folder, num_epochs=8, save_steps=1, log_steps=1, early_stopping=stopping, warmup_steps=3, optimizer="AdamW",
        dataloader_num_workers=workers, resume_from_checkpoint=resume, lr=0.05,
    )  # fmt: skip
    noisy = Samples(lambda index: INPUTS[index] + 0.1 * torch.randn(6), LABELS, length=50)  # samples that draw
    counting = Counting()
    trainer = Stopping(pairs_net(), settings, noisy, noisy, callbacks=[counting])
    trainer.stop_at = stop_at
    return trainer, counting


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("stops", [[1, 2], [7, 8, 14], [3, 4, 5, 13], [21]])
def test_everything_that_a_run_remembers_is_bitwise_the_same(stops: list[int], tmp_path: Path, read_rows: Any) -> None:
    """Weights, optimizer, schedule, samples' randomness, smoothing, metrics, the best, early stopping, callbacks."""
    uninterrupted, remembered = everything(tmp_path / "whole", workers=0, stop_at=0, resume=False)
    results = uninterrupted.train()
    assert uninterrupted.epoch < 8  # it was stopped early
    for part, stop_at in enumerate(stops):
        cut, _ = everything(tmp_path / "cut", workers=part % 3, stop_at=stop_at, resume=part > 0)
        with pytest.raises(StoppedError):
            cut.train()
    resumed, again = everything(tmp_path / "cut", workers=2, stop_at=0, resume=True)
    assert resumed.train() == results
    assert torch.equal(weights(resumed), weights(uninterrupted))
    assert again.seen == remembered.seen
    assert len(again.seen) == resumed.state.global_step
    assert resumed.lr_scheduler.state_dict() == uninterrupted.lr_scheduler.state_dict()
    rows = [
        [{k: v for k, v in row.items() if "time" not in k} for row in read_rows(tmp_path / name)]
        for name in ("whole", "cut")
    ]
    assert rows[0] == rows[1]
    best = [(tmp_path / name / "checkpoints" / "model_best").resolve().name for name in ("whole", "cut")]
    assert best[0] == best[1]


def rows_of(folder: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in (folder / "metrics.json").read_text().splitlines()]


def test_a_checkpoint_of_the_folder_given_to_train_continues_that_run_in_place(tmp_path: Path, whole: Trainer) -> None:
    trained(tmp_path, log_steps=2)
    for link in ("checkpoints/12", "epoch_2"):
        resumed = Trainer(pairs_net(), config(tmp_path, log_steps=2), DATA)
        resumed.train(resume_checkpoint_path=tmp_path / link)
        assert torch.equal(weights(resumed), weights(whole))
        assert not (tmp_path / "earlier_runs").exists()
        assert rows_of(tmp_path) == rows_of(whole.output_dir)


def test_a_run_that_went_back_and_stopped_before_its_next_save_continues_where_it_went_back_to(
    tmp_path: Path, whole: Trainer
) -> None:
    settings = {"log_steps": 2, "save_steps": 0}
    trained(tmp_path, **settings)

    class Stop(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            if logs["epoch_step"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(pairs_net(), config(tmp_path, **settings), DATA, callbacks=[Stop()]).train(tmp_path / "epoch_1")
    pointer = (tmp_path / "checkpoints" / "last_checkpoint").read_text().strip()
    assert pointer == (tmp_path / "epoch_1").resolve().name
    resumed = trained(tmp_path, **settings, resume_from_checkpoint=True)
    assert torch.equal(weights(resumed), weights(whole))
    assert rows_of(tmp_path) == rows_of(whole.output_dir)


def test_a_checkpoint_of_an_earlier_run_starts_a_run_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        trained(tmp_path)
    earlier = tmp_path / "earlier_runs" / "001" / "checkpoints" / "12"
    Trainer(pairs_net(), config(tmp_path), DATA).train(resume_checkpoint_path=earlier)
    assert (tmp_path / "earlier_runs" / "002" / "checkpoints" / "21").is_dir()
    assert earlier.is_dir()


@pytest.mark.parametrize("name", ["README.md", "training_config.yaml", "metrics.csv", "checkpoints/last_checkpoint"])
def test_a_file_that_no_run_wrote_is_refused_by_name_before_the_first_step(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("my own notes\n")
    trainer = Trainer(pairs_net(), config(tmp_path), DATA)
    with pytest.raises(ConfigError, match=rf"TrainingConfig.output_dir: .*no run wrote.*: {name}\."):
        trainer.train()
    assert trainer.state.global_step == 0
    assert (tmp_path / name).read_text() == "my own notes\n"


def test_a_card_of_the_users_that_appears_during_a_run_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class WriteOwn(Callback):
        def on_train_begin(self, logs: Any) -> None:
            (tmp_path / "README.md").write_text("mine")

    Trainer(pairs_net(), config(tmp_path), DATA, callbacks=[WriteOwn()]).train()
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "the model card is not written" in caplog.text


def odd_entry(path: Path, kind: str) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to(os.devnull)}[kind](path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
@pytest.mark.parametrize("name", ["log.txt", "training_config.yaml", "README.md"])
@pytest.mark.exhaustive(every=3)
def test_what_is_no_file_in_the_place_of_one_ends_no_run_and_stays(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    odd_entry(tmp_path / name, kind)
    mode = (tmp_path / name).stat().st_mode
    for resume in (False, True):
        settings = {"logs_dir": "logs", "resume_from_checkpoint": resume, "num_epochs": 1 + resume}
        trainer = trained(tmp_path, **settings)
    assert trainer.state.global_step == 14
    assert (tmp_path / "checkpoints" / "last_checkpoint").is_file()
    assert (tmp_path / name).stat().st_mode == mode
    said = [record.getMessage() for record in caplog.records if str(tmp_path / name) in record.getMessage()]
    assert any("the run continues without it" in message for message in said)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"eval": True}, {}, "not used: BestCheckpointer"),
        ({}, {"eval": True}, "Hooks without saved state: BestCheckpointer"),
        ({"callbacks": [Counting()]}, {}, "callbacks that this run does not have: Counting"),
        ({}, {"callbacks": [Counting()]}, "no state of Counting"),
        ({"metrics": ["Accuracy"]}, {"metrics": ["F1Score"]}, "Training metrics restart"),
        (
            {"eval": True, "metric_for_best_model": "loss"},
            {"eval": True, "metric_for_best_model": "accuracy"},
            "now by",
        ),
    ],
)
def test_a_resume_with_other_parts_around_the_steps_goes_on(
    before: dict[str, Any], after: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, given in enumerate((before, after)):
        parts = {key: value for key, value in given.items() if key in ("eval", "callbacks")}
        settings = {key: value for key, value in given.items() if key not in parts} | {"early_stopping": None}
        trainer = Trainer(
            pairs_net(),
            config(tmp_path, num_epochs=1 + number, resume_from_checkpoint=bool(number), **settings),
            DATA,
            DATA if parts.get("eval") else None,
            callbacks=parts.get("callbacks", ()),
        )
        caplog.clear()
        trainer.train()
    assert trainer.epoch == 2
    assert said in caplog.text

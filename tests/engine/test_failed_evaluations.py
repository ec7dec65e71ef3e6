"""An evaluation or a hook that fails after an iteration, and a training that continues: each is made once."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.toys import Results, Samples, file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.hooks import Callback, HookBase, PeriodicCheckpointer
from trainwright.hooks.signals import evaluation_may_stop

SAMPLES, EPOCH = 12, 6  # updates of an epoch
TIMINGS = {"time", "data_time"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.drop = nn.Linear(3, 1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.training:
            log.num_eval_batches += 1
            if log.num_eval_batches == log.fails_at:
                log.fail()
        return {"loss": self.linear(self.drop(x)).square().mean()}


class Log:
    """What has happened, and after how many updates the code that asks fails, how often."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.failing, self.fails_at, self.times, self.resumes = "", 0, 0, False
        self.num_eval_batches = 0
        self.fail: Callable[[], None] = bool  # called in the evaluation batch of the number `fails_at`, from 1
        self.requests_at = 0  # the update after which a callback requests an evaluation
        self.stops_at, self.stops_by = 0, ""  # the update after which a callback or a hook stops the training

    def meet(self, name: str, done: int) -> None:
        if self.failing == name and done == self.fails_at and self.times:
            self.times -= 1
            raise RuntimeError("simulated failure")

    def add(self, name: str, *values: Any) -> None:
        self.events.append((name, *values))


log = Log()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Own(HookBase):
    """The first of the hooks; in a run that is resumed, behind the one that saves."""

    def after_step(self) -> None:
        if log.stops_by == "hook" and self.trainer.iterations_done == log.stops_at:
            self.trainer.stop("enough")
        log.meet("hook", self.trainer.iterations_done)
        log.add("hook", self.trainer.iter, self.trainer.storage.iter)


class Events(Callback):
    def on_epoch_begin(self, epochs: int, logs: Any) -> None:
        log.add("begin", epochs)

    def on_epoch_end(self, epochs: int, logs: Any) -> None:
        log.meet("end", logs["global_step"])
        log.add("end", epochs, logs["global_step"], logs["epoch_loss"], logs.get("eval_epoch_loss"))

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        log.add("batch", logs["global_step"])
        if logs["global_step"] == log.requests_at:
            self.trainercontrol.should_evaluate = True
        if log.stops_by == "callback" and logs["global_step"] == log.stops_at:
            self.trainercontrol.should_training_stop, self.trainercontrol.stop_reason = True, "enough"

    def on_eval_end(self, logs: Any) -> None:
        log.add("eval end", logs["eval_global_step"], logs["step_loss"])


def with_own(hooks: list[Any]) -> list[Any]:
    place = next(n for n, hook in enumerate(hooks) if isinstance(hook, PeriodicCheckpointer)) + 1
    hooks.insert(place if log.resumes else 0, Own())
    return hooks


class OwnTrainer(Trainer):
    def build_hooks(self) -> list[HookBase]:
        return with_own(super().build_hooks())

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        results = super().evaluate(*arguments, **named)
        log.meet("evaluation", self.iterations_done)
        log.add("evaluated", self.iterations_done)
        return results


class OwnDefaultTrainer(DefaultTrainer):
    def build_hooks(self) -> list[HookBase | None]:
        return with_own(super().build_hooks())

    def test(self, *arguments: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        super().test(*arguments, **named)
        log.meet("evaluation", self.iterations_done)
        log.add("evaluated", self.iterations_done)
        return {"acc": float(self.model.linear.weight.detach().sum())}


def data() -> Samples:
    return Samples(x=torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0)))


def trainer_of(api: str, folder: Path, *, period: int = 2, **more: Any) -> Any:
    if api == "Trainer":
        settings = {
            "num_epochs": 3,
            "batch_size": 2,
            "save_steps": period,
            "log_steps": 4,
            "lr_scheduler_type": {"name_": "ReduceLROnPlateau", "patience": 0, "threshold": 1.0},
        }
        config = quiet(folder, **settings, eval_strategy="epoch", resume_from_checkpoint=True, **more)
        return OwnTrainer(Net(), config, data(), data(), callbacks=[Events()])
    cfg = file_config(
        folder, Net, data, data, train_micro_batch_size=2, test_micro_batch_size=2, train_iter=3 * EPOCH, **more
    )
    cfg.train.update({"eval_period": EPOCH, "log_period": 4, "resume": True})
    cfg.train.checkpointer.period = period
    cfg.train.evaluation.evaluator = LazyCall(Results)(acc=[0.1])
    cfg.train.evaluation.update({"eval_metric": "acc"})
    trainer = OwnDefaultTrainer(cfg)
    trainer.add_callback(Events())
    return trainer


def rows(folder: Path) -> list[dict[str, float]]:
    read = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in read]


def run(api: str, folder: Path, failing: str = "", at: int = 0, times: int = 1, *, resumes: bool = False) -> Any:
    """The weights, the rows and the events of a run in which ``failing`` fails after update ``at``."""
    log.events, log.failing, log.fails_at, log.times, log.resumes = [], failing, at, times, resumes
    trainer = trainer_of(api, folder)
    for _ in range(times if failing else 0):
        with pytest.raises(RuntimeError, match="simulated failure"):
            trainer.train()
        if resumes:
            trainer = trainer_of(api, folder)
    trainer.train()
    assert not (failing and log.times)
    events = [event for event in log.events if event[0] != "begin"]  # a resume begins the epoch that it is in
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return weights, rows(folder), events


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(
    ("failing", "at", "times"), [("evaluation", 6, 1), ("evaluation", 12, 2), ("hook", 6, 1), ("end", 6, 1)]
)
@pytest.mark.parametrize("api", ["Trainer", "DefaultTrainer"])
def test_what_a_failure_after_an_iteration_has_left_out_is_made_when_the_run_continues(
    api: str, failing: str, at: int, times: int, resumes: bool, tmp_path: Path
) -> None:
    weights, written, events = run(api, tmp_path / "uninterrupted", resumes=resumes)
    assert [event for event in events if event[0] == "evaluated"] == [("evaluated", done) for done in (6, 12, 18)]
    found = run(api, tmp_path / "failed", failing, at, times, resumes=resumes)
    assert found[2] == events
    assert found[1] == written
    torch.testing.assert_close(found[0], weights, rtol=0, atol=0)


@pytest.mark.parametrize("api", ["Trainer", "DefaultTrainer"])
def test_an_evaluation_that_fails_before_the_first_save_loses_no_training(api: str, tmp_path: Path) -> None:
    def failing(folder: Path, failing: str) -> tuple[Any, ...]:
        log.events, log.failing, log.fails_at, log.times, log.resumes = [], failing, 6, 1, False
        trainer = trainer_of(api, folder, period=1000)
        if failing:
            with pytest.raises(RuntimeError, match="simulated failure"):
                trainer.train()
            trainer = trainer_of(api, folder, period=1000)
            assert trainer.iterations_done == 6
        trainer.train()
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return weights, rows(folder), [event for event in log.events if event[0] != "begin"]

    weights, written, events = failing(tmp_path / "uninterrupted", "")
    found = failing(tmp_path / "failed", "evaluation")
    assert found[1:] == (written, events)
    torch.testing.assert_close(found[0], weights, rtol=0, atol=0)


class Swallows(HookBase):
    """An evaluation of the user's own, whose error does not end the training; a later step does."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at

    def before_step(self) -> None:
        if self.trainer.iter == self.fails_at:
            raise ValueError("simulated failure of a step")

    def after_step(self) -> None:
        if self.trainer.iter == 1:
            with contextlib.suppress(RuntimeError), evaluation_may_stop():
                raise RuntimeError("simulated failure of an evaluation")


@pytest.mark.parametrize("fails_at", [2, 4])
def test_a_step_that_fails_after_an_error_of_an_evaluation_that_was_caught_saves_nothing(
    fails_at: int, tmp_path: Path
) -> None:
    trainer = trainer_of("DefaultTrainer", tmp_path, period=1000)
    trainer.register_hooks([Swallows(fails_at)])
    with pytest.raises(ValueError, match="of a step"):
        trainer.train()
    assert trainer.checkpointer.get_checkpoint_file() == ""


@pytest.mark.parametrize(("api", "how"), [("Trainer", "resume_from_checkpoint=True"), ("DefaultTrainer", "--resume")])
@pytest.mark.parametrize(("failing", "at", "saved"), [("hook", 1, None), ("hook", 3, 2), ("evaluation", 6, 6)])
def test_after_a_failure_the_log_says_from_which_checkpoint_a_resume_continues(
    api: str, how: str, failing: str, at: int, saved: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(api, tmp_path, failing, at)
    found = [text for text in caplog.messages if text.startswith("The training has failed")]
    name = f"{saved or 1:02}" if api == "Trainer" else f"model_{(saved or 1) - 1:07}"
    folder = tmp_path / "checkpoints" if api == "Trainer" else tmp_path
    text = f"The training has failed after iteration {at}. {how} continues from {folder / name}."
    assert found == ([] if saved is None else [text])


@pytest.mark.parametrize("api", ["Trainer", "DefaultTrainer"])
def test_an_evaluation_that_a_callback_requests_and_that_fails_is_made_when_the_run_continues(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "requests_at", 4)
    weights, _, events = run(api, tmp_path / "uninterrupted")
    assert [event for event in events if event[0] == "evaluated"] == [("evaluated", done) for done in (4, 6, 12, 18)]
    found = run(api, tmp_path / "failed", "evaluation", 4)
    assert found[2] == events
    torch.testing.assert_close(found[0], weights, rtol=0, atol=0)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("failing", ["evaluation", "end"])
@pytest.mark.parametrize("stops_by", ["callback", "hook"])
@pytest.mark.parametrize("api", ["Trainer", "DefaultTrainer"])
def test_a_stop_before_a_failure_is_kept(
    api: str, stops_by: str, failing: str, resumes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "stops_at", EPOCH)
    monkeypatch.setattr(log, "stops_by", stops_by)
    weights, written, events = run(api, tmp_path / "uninterrupted", resumes=resumes)
    assert events[-1][:3] == ("end", 1, EPOCH)
    found = run(api, tmp_path / "failed", failing, EPOCH, resumes=resumes)
    is_compared = {event[0] for event in events} - ({"evaluated", "eval end"} if failing == "end" else set())
    assert found[1] == written
    for name in is_compared:  # after a failure behind it, the final evaluation is repeated
        assert [event for event in found[2] if event[0] == name] == [event for event in events if event[0] == name]
    torch.testing.assert_close(found[0], weights, rtol=0, atol=0)
    ends = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("uninterrupted", "failed")]
    assert [end["starts"][-1]["reason"] for end in ends] == ["enough"] * 2


class Due(HookBase):
    """Asks a function of the user's when it is due; the function fails once."""

    def __init__(self) -> None:
        self.due, self.called, self.fails = (self.is_due,), [], True

    def is_due(self) -> bool:
        if self.fails and self.trainer.iter == 3:
            self.fails = False
            raise RuntimeError("simulated failure")
        return True

    def after_step(self) -> None:
        self.called.append(self.trainer.iter)


@pytest.mark.parametrize("api", ["Trainer", "DefaultTrainer"])
def test_a_hook_whose_condition_fails_is_asked_again(api: str, tmp_path: Path) -> None:
    log.__init__()  # type: ignore[misc]
    trainer, due = trainer_of(api, tmp_path), Due()
    trainer.register_hooks([due])
    with pytest.raises(RuntimeError, match="simulated failure"):
        trainer.train()
    trainer.train()
    assert due.called == [*range(3 * EPOCH)]


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("api", ["Trainer", "DefaultTrainer"])
def test_a_final_evaluation_that_fails_is_made_by_the_next_train(api: str, resumes: bool, tmp_path: Path) -> None:
    weights, written, events = run(api, tmp_path / "uninterrupted", resumes=resumes)
    found = run(api, tmp_path / "failed", "evaluation", 18, resumes=resumes)
    assert found[2] == events
    assert found[1] == written
    torch.testing.assert_close(found[0], weights, rtol=0, atol=0)


@pytest.mark.parametrize("requests_at", [0, 2 * EPOCH - 2])
@pytest.mark.parametrize("api", ["Trainer", "DefaultTrainer"])
def test_sigterm_in_an_evaluation_saves_before_its_next_batch_and_a_resume_evaluates(
    api: str, requests_at: int, tmp_path: Path
) -> None:
    ema = {"decay": 0.9}  # an evaluation has the averaged weights in the model
    runs = []
    for folder, at in (("uninterrupted", 0), ("stopped", EPOCH + 2)):  # the second batch of the second evaluation
        log.__init__()  # type: ignore[misc]
        log.fail, log.fails_at, log.requests_at = terminate, at, requests_at
        trainer = trainer_of(api, tmp_path / folder, period=5, ema=ema)
        if at:
            with pytest.raises(SystemExit) as stopped:
                trainer.train()
            assert stopped.value.code == 143
            assert log.num_eval_batches == at, "no further batch"
            trainer = trainer_of(api, tmp_path / folder, period=5, ema=ema)
            assert trainer.start_iter == (requests_at or 2 * EPOCH), (
                "saved after the iteration whose evaluation was stopped"
            )
        trainer.train()
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        runs.append((weights, rows(tmp_path / folder), [event for event in log.events if event[0] != "begin"]))
    whole, continued = runs
    assert continued[2] == whole[2]
    assert continued[1] == whole[1]
    torch.testing.assert_close(continued[0], whole[0], rtol=0, atol=0)


@pytest.mark.parametrize("api", ["Trainer", "DefaultTrainer"])
def test_the_end_of_max_time_in_an_evaluation_ends_it_before_its_next_batch(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, runs = time.perf_counter, []

    def end_time() -> None:
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600.0)

    for folder, stops in (("uninterrupted", []), ("stopped", [(EPOCH + 2, 2 * EPOCH), (EPOCH + 2, 3 * EPOCH)])):
        log.__init__()  # type: ignore[misc]
        for at, done in stops:  # in the second evaluation; in the next run, in its second one, the final one
            log.num_eval_batches, log.fails_at, log.fail = 0, at, end_time
            trainer = trainer_of(api, tmp_path / folder, period=5, max_time=3600.0)
            trainer.train()
            monkeypatch.setattr(time, "perf_counter", clock)
            assert (trainer.iterations_done, trainer.stop_reason) == (done, "max_time")
            assert log.num_eval_batches == at, "no further batch"
        log.fails_at = 0
        trainer = trainer_of(api, tmp_path / folder, period=5, max_time=3600.0)
        trainer.train()
        assert trainer.stop_reason is None
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        runs.append((weights, rows(tmp_path / folder), [event for event in log.events if event[0] != "begin"]))
    whole, continued = runs
    assert continued[2] == whole[2]
    assert continued[1] == whole[1]
    torch.testing.assert_close(continued[0], whole[0], rtol=0, atol=0)


@pytest.mark.parametrize("api", ["Trainer", "DefaultTrainer"])
def test_an_evaluation_that_takes_longer_than_max_time_does_not_keep_a_run_from_going_on(
    api: str, tmp_path: Path
) -> None:
    log.__init__()  # type: ignore[misc]
    done = 0
    while done < 3 * EPOCH:
        trainer = trainer_of(api, tmp_path, max_time=1e-6)
        trainer.train()
        assert trainer.iterations_done > done
        done = trainer.iterations_done


class Scores(Net):
    """In training its loss, in evaluation scores alone, from which the run's loss could be computed."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        outputs = super().forward(x)
        return outputs if self.training else {"logits": self.linear(x)}


@pytest.mark.parametrize("at", [EPOCH + 1, 2 * EPOCH + 1])
def test_an_evaluation_that_a_resume_makes_first_has_the_losses_of_the_others(at: int, tmp_path: Path) -> None:
    written = []
    for folder, stops in (("uninterrupted", False), ("stopped", True)):
        log.__init__()  # type: ignore[misc]
        log.fail, log.fails_at = terminate, at if stops else 0
        samples = Samples(x=torch.randn(SAMPLES, 3), labels=torch.zeros(SAMPLES).long())
        settings = {"num_epochs": 3, "batch_size": 2, "metrics": None, "resume_from_checkpoint": True}
        for stopped in [True, False] if stops else [False]:
            trainer = Trainer(Scores(), quiet(tmp_path / folder, **settings, save_steps=2), samples, samples)
            with pytest.raises(SystemExit) if stopped else contextlib.nullcontext():
                trainer.train()
        written.append([{*row} for row in rows(tmp_path / folder)])
    assert written[0] == written[1]

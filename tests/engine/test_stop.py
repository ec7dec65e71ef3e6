"""One way to stop a training for all that request it: the run records the reason, in both APIs and on all processes."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.hooks.test_due_in_trainers import APIS, Build, python_api
from tests.ranks import on_ranks
from tests.toys import assert_equal_weights, points, quiet
from trainwright import Trainer
from trainwright.base.dist import get_rank
from trainwright.engine import TrainingLoop
from trainwright.hooks import Callback, CallbackHook, HookBase
from trainwright.hooks.signals import TrainingTerminated
from trainwright.inspect.report.page import Run

ITERATIONS = 10


def end_of(folder: Path) -> dict[str, Any]:
    start = json.loads((folder / "run.json").read_text(encoding="utf-8"))["starts"][-1]
    return {name: start[name] for name in ("status", "reason", "iterations_done")}


def stop_at(iteration: int, moment: str = "after_step") -> HookBase:
    def stop(trainer: Any) -> None:
        if trainer.iter + 1 == iteration:
            trainer.stop("enough")

    return CallbackHook(**{moment: stop})  # type: ignore[arg-type]


class Requests(Callback):
    def __init__(self, at: int, reason: str | None = None) -> None:
        super().__init__()
        self.at, self.reason = at, reason

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        assert self.trainercontrol is not None
        if logs["global_step"] == self.at:
            self.trainercontrol.should_training_stop = True
            if self.reason is not None:
                self.trainercontrol.stop_reason = self.reason


@APIS
@pytest.mark.parametrize("moment", ["before_step", "after_step"])
def test_a_stop_ends_a_training_as_its_last_iteration_does(
    moment: str, build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    trainer = build(tmp_path)
    trainer.register_hooks([stop_at(4, moment)])
    results = trainer.train()
    assert end_of(tmp_path) == {"status": "finished", "reason": "enough", "iterations_done": 4}
    assert results  # of the final evaluation
    assert "Stopping after iteration 4: enough." in caplog.messages
    (summary,) = [line for line in caplog.messages if line.startswith("Finished after iteration 4\n")]
    assert "Stopped  enough" in summary
    assert (trainer.stop_reason, trainer.max_iter) == ("enough", ITERATIONS)
    assert "enough" in Run(tmp_path)._repr_html_()


@APIS
def test_a_stop_before_the_first_iteration_of_a_new_run_is_after_one(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    trainer = build(tmp_path)
    trainer.register_hooks([CallbackHook(before_train=lambda trainer: trainer.stop("enough"))])
    trainer.train()
    assert trainer.iterations_done == 1
    assert "Stopping after iteration 1: enough." in caplog.messages
    trainer.train()  # it would go on: no iteration is made
    assert trainer.iterations_done == 1


@APIS
@pytest.mark.parametrize("resumes", [False, True])
def test_a_stopped_training_goes_on_as_one_that_was_not_stopped(resumes: bool, build: Build, tmp_path: Path) -> None:
    whole = build(tmp_path / "whole")
    whole.train()
    trainer = build(tmp_path / "stopped")
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.stop("enough") if t.iter == 3 else None)])
    trainer.train()
    if resumes:
        trainer = build(tmp_path / "stopped")
    trainer.train()
    assert_equal_weights(trainer.model, whole.model)
    assert end_of(tmp_path / "stopped") == {"status": "finished", "reason": None, "iterations_done": ITERATIONS}


@APIS
def test_a_run_is_stopped_by_its_own_method_too(build: Build, tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.register_hooks([CallbackHook(before_train=lambda t: t.run.stop("not more than one"))])
    trainer.run.stop("nothing runs")  # without effect
    trainer.train()
    assert end_of(tmp_path) == {"status": "finished", "reason": "not more than one", "iterations_done": 1}


@APIS
def test_the_first_of_several_stops_counts(build: Build, tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.register_hooks([stop_at(4), CallbackHook(after_step=lambda t: t.stop("late") if t.iter >= 3 else None)])
    trainer.train()
    assert end_of(tmp_path)["reason"] == "enough"


@APIS
def test_a_stop_in_the_last_iteration_is_none(build: Build, tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.register_hooks([stop_at(ITERATIONS)])
    trainer.train()
    assert end_of(tmp_path) == {"status": "finished", "reason": None, "iterations_done": ITERATIONS}


@APIS
@pytest.mark.parametrize("reason", [None, "good enough"])
def test_a_callback_may_say_why(reason: str | None, build: Build, tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.add_callback(Requests(4, reason))
    trainer.train()
    assert end_of(tmp_path)["reason"] == (reason or "a callback has set should_training_stop")
    assert trainer.iterations_done == 4


@APIS
def test_early_stopping_says_what_did_not_improve_and_also_after_a_resume(build: Build, tmp_path: Path) -> None:
    metric = "eval_accuracy" if build is python_api else "eval_Acc@1"
    stopping = {"early_stopping": {"monitor": metric, "patience": 1, "mode": "max", "min_delta": 100.0}}
    length = {"num_epochs": 3} if build is python_api else {"train_iter": 30}
    for _ in range(2):
        trainer = build(tmp_path, **stopping, **length)
        trainer.train()
        end = end_of(tmp_path)
        assert (end["status"], end["iterations_done"]) == ("finished", 10)
        assert end["reason"] == f"early stopping: {metric} was no better for 1 evaluation"


@APIS
def test_the_time_limit_is_a_reason(build: Build, tmp_path: Path) -> None:
    build(tmp_path, max_time=1e-6).train()
    assert end_of(tmp_path) == {"status": "interrupted", "reason": "max_time", "iterations_done": 1}


@APIS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_reason(number: signal.Signals, build: Build, tmp_path: Path) -> None:
    trainer = build(tmp_path)
    send = lambda t: os.kill(os.getpid(), number) if t.iter == 3 else None  # noqa: E731
    trainer.register_hooks([CallbackHook(after_step=send)])
    with pytest.raises((TrainingTerminated, KeyboardInterrupt)):
        trainer.train()
    assert end_of(tmp_path) == {"status": "interrupted", "reason": number.name, "iterations_done": 4}


@APIS
def test_a_signal_in_the_final_evaluation_of_a_stopped_training_is_the_reason(build: Build, tmp_path: Path) -> None:
    class Sends(Callback):
        def on_eval_begin(self, logs: Any) -> None:
            if logs["global_step"] == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = build(tmp_path)
    trainer.register_hooks([stop_at(4)])
    trainer.add_callback(Sends())
    with pytest.raises(TrainingTerminated):
        trainer.train()
    assert end_of(tmp_path) == {"status": "interrupted", "reason": "SIGTERM", "iterations_done": 4}
    resumed = build(tmp_path)
    assert resumed.train()  # the final evaluation
    assert end_of(tmp_path) == {"status": "finished", "reason": "enough", "iterations_done": 4}
    resumed.train()
    assert end_of(tmp_path) == {"status": "finished", "reason": None, "iterations_done": ITERATIONS}


@APIS
def test_a_resume_for_the_final_evaluation_shows_it_and_the_summary(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Sends(Callback):
        def on_eval_begin(self, logs: Any) -> None:
            if logs["global_step"] == ITERATIONS:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = build(tmp_path)
    trainer.add_callback(Sends())
    with pytest.raises(TrainingTerminated):
        trainer.train()
    caplog.set_level("INFO", "trainwright")
    caplog.clear()
    build(tmp_path).train()
    at_end = f"{ITERATIONS}/{ITERATIONS}"
    for text in ("nothing to train, the final evaluation is made", f"Evaluation  iteration {at_end}", "Finished after"):
        assert caplog.text.count(text) == 1, text


@APIS
def test_a_stop_in_an_iteration_that_fails_is_kept(build: Build, tmp_path: Path) -> None:
    calls: list[int] = []

    def fail_after_a_stop(trainer: Any) -> None:
        if trainer.iter == 3 and not calls:
            calls.append(trainer.iter)
            trainer.stop("enough")
            raise ZeroDivisionError

    trainer = build(tmp_path)
    trainer.register_hooks([CallbackHook(before_step=fail_after_a_stop)])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.train()
    assert end_of(tmp_path) == {"status": "finished", "reason": "enough", "iterations_done": 4}


@APIS
@pytest.mark.parametrize(("error", "status"), [(ZeroDivisionError, "failed"), (SystemExit, "interrupted")])
def test_an_error_is_a_reason(error: type[BaseException], status: str, build: Build, tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        if trainer.iter == 3:
            raise error

    trainer = build(tmp_path)
    trainer.register_hooks([CallbackHook(before_step=fail)])
    with pytest.raises(error):
        trainer.train()
    assert end_of(tmp_path) == {"status": status, "reason": error.__name__, "iterations_done": 3}


def test_a_stop_holds_if_an_epoch_of_another_length_begins(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_train_dataloader(self, dataset: Any) -> Any:
            return DataLoader(Subset(dataset, range({1: 3, 2: 5, 3: 2}[self.state.epoch])), batch_size=1)

    data = TensorDataset(torch.randn(8, 4), torch.randint(2, (8,)))
    trainer = Own(nn.Linear(4, 2), quiet(tmp_path, num_epochs=3, batch_size=1, metrics=[]), train_dataset=data)
    trainer.register_hooks([stop_at(4, "before_step")])  # the first of the second epoch
    trainer.train()
    assert end_of(tmp_path) == {"status": "finished", "reason": "enough", "iterations_done": 4}
    trainer.train()
    assert end_of(tmp_path) == {"status": "finished", "reason": None, "iterations_done": 10}


def test_a_loop_of_one_s_own_is_stopped_or_left(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    loader = DataLoader(points(16), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = TrainingLoop(model, optimizer, loader, max_iter=8, output_dir=str(tmp_path))
    for end, reason in ((lambda: loop.stop("enough"), "enough"), (None, "the loop was left"), (lambda: None, None)):
        before = loop.iterations_done
        for number, batch in enumerate(loop):
            nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                if end is None:
                    break
                end()
        assert loop.stop_reason == reason
        assert loop.iterations_done == (before + 2 if reason else 8)


def stopped_on_ranks(build: Build, folder: Path, case: str) -> Any:
    trainer = build(folder, **({"num_epochs": 3} if build is python_api else {"train_iter": 12}))
    if case == "all":
        trainer.register_hooks([stop_at(4)])
    elif get_rank() == 1:
        trainer.add_callback(Requests(4, "the second rank has enough"))
    else:
        trainer.add_callback(Callback())
    trainer.train()
    return trainer.iterations_done, trainer.stop_reason, [one.tolist() for one in trainer.model.parameters()]


@APIS
@pytest.mark.parametrize(
    ("case", "done", "reason"), [("all", 4, "enough"), ("a callback of one rank", 5, "the second rank has enough")]
)
def test_all_ranks_stop_after_the_same_iteration_with_one_reason(
    case: str, done: int, reason: str, build: Build, tmp_path: Path
) -> None:
    one, other = on_ranks(stopped_on_ranks, build, tmp_path, case)
    assert one == other
    assert one[:2] == (done, reason)
    assert end_of(tmp_path) == {"status": "finished", "reason": reason, "iterations_done": done}


class RequestsOnOne(Callback):
    """Requests on the second rank; records the evaluations, and fails on all ranks in one iteration."""

    def __init__(self, flag: str, fails_at: int = 0) -> None:
        super().__init__()
        self.flag, self.fails_at, self.evaluated = flag, fails_at, list[int]()

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        if logs["global_step"] == 4 and get_rank() == 1:
            setattr(self.trainercontrol, self.flag, True)
            self.trainercontrol.stop_reason = "the second rank has enough" if "stop" in self.flag else ""

    def on_train_batch_begin(self, batch: Any, logs: Any) -> None:
        if logs["global_step"] + 1 == self.fails_at:
            raise ZeroDivisionError

    def on_eval_end(self, logs: Any) -> None:
        self.evaluated.append(int(logs["global_step"]))


def requests_before_a_resume(build: Build, folder: Path, flag: str) -> Any:
    """The evaluations, the end and its reason of an uninterrupted run and of one that fails before the flag counts."""
    found = []
    long = {"num_epochs": 3} if build is python_api else {"train_iter": 12, "eval_period": 100, "log_period": 6}
    for name, failures in (("whole", [0]), ("failed", [5, 0])):
        evaluated: list[int] = []
        for fails_at in failures:
            trainer, callback = build(folder / name, **long), RequestsOnOne(flag, fails_at)
            if build is python_api:
                trainer.config.eval_steps, trainer.config.log_steps = 100, 6
            trainer.add_callback(callback)
            assert trainer.start_iter == (4 if name == "failed" and not fails_at else 0)
            with pytest.raises(ZeroDivisionError) if fails_at else contextlib.nullcontext():
                trainer.train()
            evaluated += callback.evaluated
        found.append((evaluated, trainer.iterations_done, trainer.stop_reason))
    return found


@APIS
@pytest.mark.parametrize("flag", ["should_evaluate", "should_training_stop"])
def test_what_a_callback_of_one_rank_has_requested_before_a_save_is_made_after_a_resume(
    flag: str, build: Build, tmp_path: Path
) -> None:
    for whole, resumed in on_ranks(requests_before_a_resume, build, tmp_path, flag):
        assert resumed == whole
        assert whole[0][0] in (5, 6) if flag == "should_evaluate" else whole[2] == "the second rank has enough"

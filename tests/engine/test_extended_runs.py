"""A run that has ended and is carried on to more iterations is the longer run, made at once, bit for bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import ConstantLR

from tests.toys import Classifier, file_config, pairs, pairs_net, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.hooks import Callback, EarlyStoppingCallback, EvalHook
from trainwright.hooks.callbacks.logs import Logs
from trainwright.hooks.signals import Interruptions

pytestmark = pytest.mark.slow

DATA = pairs(32)
_MEASURED = ("time", "data_time", "total_throughput")


class Memory(Callback):
    """Remembers what it was called for, and draws a random number at the end of each epoch."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_eval_end(self, logs: Any) -> None:
        self.events.append(f"evaluated at {logs['global_step']}")

    def on_epoch_end(self, epochs: int, logs: Any) -> None:
        self.events.append(f"epoch {epochs}: {torch.rand(())}")

    def on_train_end(self, logs: Any) -> None:
        self.events.append("the end of the shorter run, which the longer one does not have")

    def state_dict(self) -> dict[str, Any]:
        return {"events": list(self.events)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.events = list(state["events"])


def run(folder: Path, epochs: int, scores: list[float] | None = None, **settings: Any) -> Any:
    class Scored(Trainer):
        def evaluate(self, *arguments: Any) -> Any:
            results = super().evaluate(*arguments)
            return results if scores is None else {**results, "accuracy": scores[self.state.epoch - 1]}

    given = {"batch_size": 8, "lr": 0.01, "lr_scheduler_type": "constant", "log_steps": 3}
    given |= {"num_epochs": epochs, "metric_for_best_model": "accuracy", "resume_from_checkpoint": True}
    config = quiet(folder, **{**given, **settings})
    trainer = Scored(pairs_net(), config, DATA, DATA, callbacks=[Memory()])
    trainer.train()
    return trainer


def state_of(trainer: Any) -> tuple[Any, ...]:
    best = next(hook for hook in trainer._hooks if hasattr(hook, "best_iter"))
    weights = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
    return weights, repr(trainer.optimizer.state_dict()), best.state_dict(), trainer.callbacks[0].events[:-1]


def rows_of(folder: Path, read_rows: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in _MEASURED} for row in read_rows(folder)]


def best_of(folder: Path) -> str:
    return next(folder.rglob("model_best")).resolve().name


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize(("scores", "period"), [(None, 4), ([0.5, 0.9, 0.6, 0.7], 3)])  # rows at the end, or not
def test_two_epochs_extended_to_four_are_four_at_once(
    scores: list[float] | None, period: int, tmp_path: Path, read_rows: Any
) -> None:
    logged = {"log_steps": period}
    whole = run(tmp_path / "whole", 4, scores, **logged)
    run(tmp_path / "cut", 2, scores, **logged)
    extended = run(tmp_path / "cut", 4, scores, **logged)
    assert state_of(extended) == state_of(whole)
    assert rows_of(tmp_path / "cut", read_rows) == rows_of(tmp_path / "whole", read_rows)
    assert best_of(tmp_path / "cut") == best_of(tmp_path / "whole")


def test_a_plateau_schedule_has_seen_the_final_evaluation(tmp_path: Path) -> None:
    settings = {
        "lr_scheduler": "ReduceLROnPlateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "lr_scheduler_type": None,
    }
    scores = [0.9, 0.8, 0.7, 0.6]
    whole = run(tmp_path / "whole", 4, scores, **settings)
    run(tmp_path / "cut", 2, scores, **settings)
    extended = run(tmp_path / "cut", 4, scores, **settings)
    assert whole.optimizer.param_groups[0]["lr"] == 0.01 / 8
    assert state_of(extended) == state_of(whole)


def test_the_second_save_of_the_end_writes_no_weights_again(tmp_path: Path) -> None:
    trainer = run(tmp_path, 1)
    checkpoint = Path(trainer.checkpointer.get_checkpoint_file())
    assert (checkpoint / "model.safetensors").stat().st_nlink > 1  # shared with model_best, saved in between


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, None)])
def test_a_signal_in_the_final_evaluation_ends_the_run_and_a_resume_evaluates(
    number: signal.Signals, code: int | None, tmp_path: Path, read_rows: Any
) -> None:
    whole = run(tmp_path / "whole", 2)
    evaluated = []

    class Interrupted(Memory):
        def on_eval_begin(self, logs: Any) -> None:
            evaluated.append(logs["global_step"])
            if len(evaluated) == 2:
                os.kill(os.getpid(), number)

    Interrupted.__name__ = "Memory"  # states of callbacks are found by it
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "Memory", Interrupted)
        with pytest.raises(KeyboardInterrupt if code is None else SystemExit) as stopped:
            run(tmp_path / "cut", 2)
    assert evaluated == [4, 8]
    assert code is None or stopped.value.code == code  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    resumed = run(tmp_path / "cut", 2)
    assert state_of(resumed)[1:] == state_of(whole)[1:]
    assert resumed.last_eval_results == whole.last_eval_results
    assert rows_of(tmp_path / "cut", read_rows) == rows_of(tmp_path / "whole", read_rows)
    third = run(tmp_path / "cut", 2)
    assert third.callbacks[0].events == []  # nothing is left to do


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_resume_for_the_final_evaluation_that_fails_at_its_start_leaves_the_checkpoint_as_it_is(
    tmp_path: Path, read_rows: Any
) -> None:
    whole = run(tmp_path / "whole", 4)
    # In the final evaluation, then before the state of the resumed run is restored.
    for owner, name in ((EvalHook, "after_train"), (Interruptions, "before_train")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path / "cut", 2)
    run(tmp_path / "cut", 2)
    extended = run(tmp_path / "cut", 4)
    assert state_of(extended) == state_of(whole)
    assert rows_of(tmp_path / "cut", read_rows) == rows_of(tmp_path / "whole", read_rows)


def test_train_again_with_more_epochs_on_the_config_is_a_resume_of_the_longer_run(
    tmp_path: Path, read_rows: Any
) -> None:
    short = run(tmp_path / "again", 2)
    again = run(tmp_path / "resumed", 2)
    assert again.iterations_done == 8
    before = [p.detach().clone() for p in short.model.parameters()]
    results = short.train()  # nothing to do
    assert all(torch.equal(a, b) for a, b in zip(before, short.model.parameters(), strict=True))
    short.config.num_epochs = 4
    longer = short.train()
    assert short.iterations_done == 16
    resumed = run(tmp_path / "resumed", 4)
    assert longer == resumed.last_eval_results != results
    events = short.callbacks[0].events
    events.remove("the end of the shorter run, which the longer one does not have")  # of the first training
    assert state_of(short) == state_of(resumed)
    assert rows_of(tmp_path / "again", read_rows) == rows_of(tmp_path / "resumed", read_rows)
    text = (tmp_path / "again" / "log.txt").read_text()
    assert "/16  total_loss" in text


@pytest.mark.exhaustive(every=6)
@pytest.mark.parametrize("ema", [None, {"decay": 0.5}])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_train_again_continues_with_the_latest_weights_not_the_best(ema: Any, is_resumed: bool, tmp_path: Path) -> None:
    def trainer(folder: str, epochs: int, **settings: Any) -> Trainer:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
        config = quiet(tmp_path / folder, num_epochs=epochs, batch_size=4, lr=0.1, ema=ema, **settings)
        inputs = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0.1).long())
        return Trainer(model, config, data, data)

    def final(folder: str) -> Any:
        return load_file(tmp_path / folder / "final_epoch/model.safetensors")

    again = trainer("again", 3)
    again.train()
    if is_resumed:
        again = trainer("again", 3, resume_from_checkpoint=True)
        again.train()
    loaded = again.model.state_dict()
    assert not torch.equal(loaded["weight"], final("again")["weight"]), "the best weights are not the latest"
    again.config.num_epochs = 4
    again.train()
    trainer("whole", 4).train()
    assert all(torch.equal(value, final("again")[name]) for name, value in final("whole").items())


class Means(Callback):
    """The position and the means of the epoch after each batch, and where epochs end."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.seen.append(tuple(logs.get(name) for name in ("epoch", "epoch_step", "epoch_loss", "epoch_metric")))

    def on_epoch_end(self, epochs: int, logs: Any) -> None:
        self.seen.append(("end", epochs, logs["epoch_loss"]))


class Scores(Classifier):
    """Returns its scores in training, too, for the metric of the epoch."""

    def forward(self, inputs: Any, labels: Any = None) -> dict[str, Any]:
        scores = self.body(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def by_objects(folder: Path, steps: int, callback: Callback, *, resume: bool) -> Any:
    config = quiet(folder, batch_size=4, num_epochs=9, max_steps=steps, learning_rate=0.1, metrics=["accuracy"],
                   eval_strategy="no", resume_from_checkpoint=resume or None)  # fmt: skip
    return Trainer(Scores(seed=0), config, points(16), callbacks=[callback])


def by_config_file(folder: Path, steps: int, callback: Callback, *, resume: bool) -> Any:
    cfg = file_config(folder, lambda: Scores(seed=0), lambda: points(16), train_iter=steps, resume=resume,
                      train_micro_batch_size=4, scheduler=LazyCall(ConstantLR)(factor=1.0))  # fmt: skip
    trainer = DefaultTrainer(cfg)
    trainer.add_callback(callback)
    return trainer


class Watched(EarlyStoppingCallback):
    """Has seen a loss that is lower in a part of an epoch than in the complete one, or higher."""

    def __init__(self, sign: int) -> None:
        super().__init__(None, "epoch_loss", patience=1, mode="min")
        self.sign = sign

    def on_epoch_end(self, epochs: int, logs: Any) -> None:
        steps = logs["epoch_step"]
        super().on_epoch_end(epochs, Logs(epoch_loss=10.0 - epochs + self.sign * 5.0 * (steps < 4)))


@pytest.mark.parametrize("sign", [-1, 1])  # 1: the loss of the part would end the run
@pytest.mark.parametrize("again", ["train()", "resume"])
@pytest.mark.parametrize("make", [by_objects, by_config_file])
def test_early_stopping_by_a_training_loss_does_not_count_a_part_of_an_epoch_in_a_longer_run(
    make: Any, again: str, sign: int, tmp_path: Path
) -> None:
    states = []
    for name, lengths in (("whole", [16]), ("cut", [6, 16])):
        callback = Watched(sign)
        trainer = make(tmp_path / name, lengths[0], callback, resume=False)
        trainer.train()
        if len(lengths) > 1 and again == "resume":
            callback = Watched(sign)
            trainer = make(tmp_path / name, 16, callback, resume=True)
            trainer.train()
        elif len(lengths) > 1 and make is by_objects:
            trainer.config.max_steps = 16
            trainer.train()
        elif len(lengths) > 1:
            trainer.train(6, 16)
        states.append((callback.best, callback.wait, trainer.iterations_done))
    assert states[0] == states[1] == (6.0, 0, 16)


@pytest.mark.parametrize("again", ["train()", "resume"])
@pytest.mark.parametrize("make", [by_objects, by_config_file])
@pytest.mark.parametrize("steps", [2, 6])
def test_a_run_that_ended_within_an_epoch_and_is_longer_now_continues_the_means_of_the_epoch(
    make: Any, again: str, steps: int, tmp_path: Path
) -> None:
    whole, cut = Means(), Means()
    make(tmp_path / "whole", 9, whole, resume=False).train()
    trainer = make(tmp_path / "cut", steps, cut, resume=False)
    trainer.train()
    ended = cut.seen.pop()  # the end of the shorter run ends its epoch, too
    assert ended[:2] == ("end", steps // 4 + 1)
    if again == "resume":
        trainer = make(tmp_path / "cut", 9, cut, resume=True)
        trainer.train()
    elif make is by_objects:
        trainer.config.max_steps = 9
        trainer.train()
    else:
        trainer.train(steps, 9)
    assert cut.seen == whole.seen

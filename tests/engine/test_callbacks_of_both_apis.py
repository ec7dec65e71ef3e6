"""The same callbacks see the same training in both APIs: events, batches, logs, what they request, and resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from tests.ranks import on_ranks
from tests.toys import Classifier, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.dist import get_rank
from trainwright.evaluation import DatasetEvaluator
from trainwright.hooks import Callback

SAMPLES, MICRO, EPOCHS = 32, 4, 3
APIS = ("Python", "config file")
MEASURED = ("eval_step_loss", "epoch_metric")  # values that only one of them has
OF_BATCHES = ("eval_epoch_loss", "eval_epoch_metric", "eval_loss")  # of a Trainer also while it evaluates


class Recorder(Callback):
    """Every event with its batch and all logs; a part of its checkpoints."""

    def __init__(self) -> None:
        self.events: list[list[Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"events": self.events}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.events = [[name, what, dict(logs)] for name, what, logs in state["events"]]


def recording(method: str) -> Any:
    def on(self: Recorder, *arguments: Any) -> None:
        *what, logs = arguments
        batch = [float(one["inputs"].sum()) if isinstance(one, dict) else one for one in what]
        values = {name: value for name, value in logs.items() if name not in MEASURED}
        if method.startswith("on_eval_batch") or method in ("on_batch_begin", "on_batch_end"):
            values = {name: value for name, value in values.items() if name not in OF_BATCHES}
        self.events.append([method, batch, {name: values[name] for name in sorted(values)}])

    return on


for each in vars(Callback):
    if each.startswith("on_"):
        setattr(Recorder, each, recording(each))


class At(Callback):
    """Requests ``flag`` after so many batches; ``"error"``: fails."""

    def __init__(self, flag: str, steps: int, rank: int | None = None) -> None:
        self.flag, self.steps, self.rank = flag, steps, rank

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        if logs["global_step"] != self.steps or self.rank not in (None, get_rank()):
            return
        if self.flag == "error":
            raise ZeroDivisionError("of a callback")
        setattr(self.trainercontrol, self.flag, True)


class MeanLoss(DatasetEvaluator):
    def reset(self) -> None:
        self.total, self.count = torch.zeros((), dtype=torch.float64), 0

    def process(self, inputs: Any, outputs: Any) -> None:
        loss = F.cross_entropy(outputs["prediction_scores"], inputs["labels"])
        self.total = self.total + loss.double() * len(inputs["labels"])
        self.count += len(inputs["labels"])

    def merge_state(self, others: Any) -> None:
        for one in others:
            self.total, self.count = self.total + one.total, self.count + one.count

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(self.total) / self.count}


class Net(Classifier):
    """In evaluation the loss, too, which a Trainer means over its samples."""

    def forward(self, inputs: Any, labels: Any = None) -> dict[str, Any]:
        scores = self.body(inputs)
        return {"loss": F.cross_entropy(scores, labels), **({} if self.training else {"prediction_scores": scores})}


def net() -> Net:
    return Net((4, 8, 2), dropout=0.3, seed=0)


def data() -> Any:
    return points(SAMPLES)


def made(
    api: str, folder: Path, callbacks: Any, *, accumulation: int = 1, resume: bool = False, evaluates: bool = True
) -> Any:
    calls = [kind(*arguments) for kind, *arguments in callbacks]
    if api == "Python":
        config = quiet(
            folder, batch_size=MICRO, num_epochs=EPOCHS, gradient_accumulation_steps=accumulation, learning_rate=0.1,
            optimizer="SGD", metrics=None, log_steps=2, eval_strategy="epoch" if evaluates else "no",
            eval_batch_size=MICRO, seed=7, max_grad_norm=None, model_checkpoint=None,
            resume_from_checkpoint=resume or None,
        )  # fmt: skip
        return Trainer(net(), config, data(), points(12, seed=1), callbacks=calls)
    cfg = file_config(
        folder, net, data, (lambda: points(12, seed=1)) if evaluates else None, train_micro_batch_size=MICRO,
        num_accumulation_steps=accumulation, train_epoch=EPOCHS, log_period=2 // accumulation, seed=7, resume=resume,
        test_micro_batch_size=MICRO, scheduler=LazyCall(lr_scheduler.ConstantLR)(factor=1.0),
        input_placement_device="cpu", checkpointer={"period": 1000},
    )  # fmt: skip
    cfg.optim = LazyCall(torch.optim.SGD)(params={}, lr=0.1)
    cfg.train.evaluation.update(
        evaluator=LazyCall(MeanLoss)(), eval_metric="loss", eval_mode="min", eval_after_n_epoch=1
    )
    names = {Recorder: (), At: ("flag", "steps", "rank")}
    cfg.train.callbacks = [LazyCall(kind)(**dict(zip(names[kind], given, strict=False))) for kind, *given in callbacks]
    return DefaultTrainer(cfg)


def events_of(trainer: Any) -> list[list[Any]]:
    return next(one.events for one in trainer.callbacks if isinstance(one, Recorder))


def run(api: str, folder: Path, callbacks: Any, **how: Any) -> tuple[list[Any], dict[str, Any], int]:
    trainer = made(api, folder / api, [(Recorder,), *callbacks], **how)
    trainer.train()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return events_of(trainer), weights, trainer.iterations_done


def assert_equal(found: Any, other: Any, rounded: bool = False) -> None:
    """``rounded``: write_metrics gets means of a window in float32."""
    (events, weights, done), (events2, weights2, done2) = found, other
    assert done == done2
    for name, value in weights.items():
        assert torch.equal(value, weights2[name]), name
    for number, (one, two) in enumerate(zip(events, events2, strict=False)):
        assert one[:2] == two[:2], number
        assert one[2] == (pytest.approx(two[2], rel=1e-6) if rounded else two[2]), number
    assert len(events) == len(events2)


REQUESTS = [[], [("should_evaluate", 6)], [("should_save", 6), ("should_log", 6)], [("should_training_stop", 14)]]


@pytest.mark.parametrize("requests", REQUESTS, ids=["none", "evaluate", "save and log", "stop"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_callbacks_see_the_same_training(tmp_path: Path, accumulation: int, requests: Any) -> None:
    callbacks = [(At, *request) for request in requests]
    python, config = (run(api, tmp_path, callbacks, accumulation=accumulation) for api in APIS)
    assert_equal(python, config)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("api", APIS)
def test_a_resume_in_the_middle_is_exact(tmp_path: Path, api: str, accumulation: int) -> None:
    whole = run(api, tmp_path / "whole", [], accumulation=accumulation)
    with pytest.raises(ZeroDivisionError):
        run(api, tmp_path, [(At, "should_save", 12), (At, "error", 15)], accumulation=accumulation)
    events, weights, done = run(api, tmp_path, [], accumulation=accumulation, resume=True)
    # It begins again, and the epoch is opened again.
    first = next(n for n, event in enumerate(events) if event != whole[0][n])
    assert events[first][0] == "on_epoch_begin"
    assert events[first][2]["epoch_step"] > 0
    assert_equal(([*events[:first], *events[first + 1 :]], weights, done), whole)


def on_two(folder: Path, api: str, requests: Any, accumulation: int, evaluates: bool) -> Any:
    callbacks = [(At, *request) for request in requests]
    return run(api, folder, callbacks, accumulation=accumulation, evaluates=evaluates)


@pytest.mark.parametrize("requests", [[], [("should_training_stop", 5, 1)]], ids=["none", "stop on one rank"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_processes_call_them_alike(tmp_path: Path, accumulation: int, requests: Any) -> None:
    python, config = (on_ranks(on_two, tmp_path, api, requests, accumulation, True) for api in APIS)
    for one, other in zip(python, config, strict=True):
        assert_equal(one, other, rounded=accumulation > 1)

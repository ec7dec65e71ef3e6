"""Trainings of both APIs are the same, whether hooks are called when they are due or after each iteration."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.toys import Classifier, Stream, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.data import StreamLoader
from trainwright.engine import loop
from trainwright.events import EventStorage
from trainwright.hooks import Callback, CallbackHook, HookBase, Moment

MEASURED = {"time", "data_time", "eta_seconds", "total_throughput"}


def net() -> nn.Module:
    return Classifier((4, 8, 2), dropout=0.3, seed=0)


def rows() -> Any:
    return points(40)


def stream() -> Iterator[Any]:
    samples = rows()
    return (samples[index] for index in range(18))


def python_api(folder: Path, kind: type[Trainer] = Trainer, data: Any = None, **settings: Any) -> Trainer:
    config = quiet(
        folder, batch_size=4, lr=0.05, seed=1, log_steps=3, save_steps=4, eval_strategy="step", eval_steps=5,
        **{"num_epochs": 1, "metrics": ["accuracy"], "resume_from_checkpoint": True, **settings},
    )  # fmt: skip
    return kind(net(), config, data or rows(), points(8))


def config_files(
    folder: Path, kind: type[DefaultTrainer] = DefaultTrainer, data: Any = None, **settings: Any
) -> DefaultTrainer:
    periods = {"log_period": 3, "checkpointer": {"period": 4}, "eval_period": 5, "train_iter": 10}
    cfg = file_config(
        folder, net, rows, lambda: points(8),
        **{"train_micro_batch_size": 4, "seed": 1, "topk": [1], "resume": True, **periods, **settings},
    )  # fmt: skip
    if data is not None:
        cfg.dataloader.train = LazyCall(StreamLoader)(dataset=data, batch_size=4)
    return kind(cfg)


APIS = pytest.mark.parametrize("build", [python_api, config_files])
Build = Callable[..., Any]


class Seen(HookBase):
    """Records the moments of a training."""

    def __init__(self, *due: Any) -> None:
        self.due = due or None
        self.at, self.evaluations = list[int](), list[int]()
        self._results: object = None

    def after_step(self) -> None:
        self.at.append(self.trainer.iterations_done)


class Evaluations(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.at = list[int]()

    def on_eval_end(self, logs: Any) -> None:
        self.at.append(int(logs["global_step"]))


def outcome(trainer: Any, folder: Path, evaluations: Evaluations) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text(encoding="utf-8").splitlines()]
    return {
        "weights": [parameter.tolist() for parameter in trainer.model.parameters()],
        "rows": [{name: value for name, value in row.items() if name not in MEASURED} for row in lines],
        "checkpoints": sorted(path.parent.name for path in folder.rglob("model.safetensors")),
        "evaluations": evaluations.at,
        "end": (trainer.iter, trainer.max_iter, trainer.iterations_done),
    }


class RaisesBound(HookBase):
    def after_step(self) -> None:
        if self.trainer.iterations_done == 7:
            self.trainer.max_iter += 6


class RaisesBoundByCallback(Callback):
    trainer: Any = None

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        if logs["global_step"] == 7:
            self.trainer.max_iter += 6


class Fails(HookBase):
    def before_step(self) -> None:
        if self.trainer.iter == 6:
            raise RuntimeError("killed")


class OwnStep(Trainer):
    def train_step(self, model: Any, batch: Any) -> Any:
        loss = self.compute_loss(model, batch)
        self.backward(loss)
        self.step()
        return {"step_loss": loss}


class OwnFileStep(DefaultTrainer):
    def train_step(self, model: Any, batch: Any) -> Any:
        outputs = model(**batch)
        self.backward(outputs["loss"])
        self.step()
        return outputs


def plain(build: Build, folder: Path) -> Any:
    return build(folder)


def raised_by_a_hook(build: Build, folder: Path) -> Any:
    trainer = build(folder)
    trainer.register_hooks([RaisesBound()])
    return trainer


def raised_by_a_callback(build: Build, folder: Path) -> Any:
    trainer, callback = build(folder), RaisesBoundByCallback()
    callback.trainer = trainer
    trainer.add_callback(callback)
    return trainer


def resumed(build: Build, folder: Path) -> Any:
    trainer = build(folder)
    trainer.register_hooks([Fails()])
    with pytest.raises(RuntimeError, match="killed"):
        trainer.train()
    trainer = build(folder)
    assert trainer.start_iter == 4
    return trainer


def of_a_stream_that_ends(build: Build, folder: Path) -> Any:
    data = Stream(stream)
    return build(folder, data=data, **({"max_steps": 12} if build is python_api else {"train_iter": 12}))


def own_step(build: Build, folder: Path) -> Any:
    return build(folder, OwnStep if build is python_api else OwnFileStep)


def accumulating(build: Build, folder: Path) -> Any:
    if build is python_api:
        return build(folder, num_epochs=3, gradient_accumulation_steps=3)
    return build(folder, num_accumulation_steps=3)


SCENARIOS = [
    plain, raised_by_a_hook, raised_by_a_callback, resumed, of_a_stream_that_ends, own_step, accumulating,
]  # fmt: skip


@APIS
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_calls_when_they_are_due_change_nothing(
    scenario: Callable[[Build, Path], Any], build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for name in ("due", "each"):
        if name == "each":
            monkeypatch.setattr(loop, "decides_itself", lambda hook: True)
        evaluations, seen = Evaluations(), Seen()
        trainer = scenario(build, tmp_path / name)
        start = trainer.start_iter
        trainer.add_callback(evaluations)
        trainer.register_hooks([seen])
        trainer.train()
        assert seen.at == [*range(start + 1, trainer.iterations_done + 1)]  # a hook of the user's misses no iteration
        outcomes.append(outcome(trainer, tmp_path / name, evaluations))
    due, each = outcomes
    assert due == each
    assert due["evaluations"], due["checkpoints"]


@APIS
def test_a_user_s_hook_is_called_at_the_moments_that_it_overrides(build: Build, tmp_path: Path) -> None:
    calls = list[str]()

    class Before(HookBase):
        def before_step(self) -> None:
            calls.append(f"before {self.trainer.iter}")

    class After(HookBase):
        def after_step(self) -> None:
            calls.append(f"after {self.trainer.iter}")

    class Both(HookBase):
        due = (2,)

        def before_step(self) -> None:
            calls.append(f"both before {self.trainer.iter}")

        def after_step(self) -> None:
            calls.append(f"both after {self.trainer.iter}")

    trainer = build(tmp_path, **({"max_steps": 3} if build is python_api else {"train_iter": 3}))
    trainer.register_hooks([Before(), After(), Both()])
    trainer.train()
    assert calls == [
        "before 0", "both before 0", "after 0", "before 1", "both before 1", "after 1", "both after 1",
        "before 2", "both before 2", "after 2",
    ]  # fmt: skip


@APIS
def test_the_period_of_a_hook_changes_in_the_middle(build: Build, tmp_path: Path) -> None:
    seen = Seen(4, Moment.LAST)

    def change(trainer: Any) -> None:
        if trainer.iterations_done == 5:
            seen.due = (3, Moment.LAST)

    trainer = build(tmp_path)
    trainer.register_hooks([CallbackHook(after_step=change), seen])
    trainer.train()
    assert seen.at == [4, 6, 9, 10]


@APIS
def test_a_checkpoint_is_saved_before_the_next_iteration_of_hooks(build: Build, tmp_path: Path) -> None:
    saved = list[tuple[int, int]]()
    trainer = build(tmp_path)
    checkpointer = trainer.checkpointer
    save = checkpointer.save
    checkpointer.save = lambda name, *given, **more: (saved.append((trainer.iter, -1)), save(name, *given, **more))[1]
    trainer.register_hooks([CallbackHook(before_step=lambda trainer: saved.append((trainer.iter, 0)))])
    trainer.train()
    assert saved[:6] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, -1), (4, 0)]


class OwnLoop(DefaultTrainer):
    """The loop as the documents show it."""

    def train(self, start_iter: int = 0, max_iter: int = 6) -> Any:
        self.start_iter, self.max_iter = start_iter, max_iter
        with EventStorage(start_iter) as self.storage:
            try:
                self.before_train()
                for self.iter in range(start_iter, max_iter):
                    self.before_step()
                    self.after_step()
                self.iter += 1
            finally:
                self.after_train()


def test_a_loop_of_the_user_s_own_calls_every_hook(tmp_path: Path) -> None:
    class Own(OwnLoop):
        def build_hooks(self) -> Any:
            return [every, seldom]

    every, seldom, saves = Seen(), Seen(3), list[int]()
    trainer = config_files(tmp_path, Own)
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.call_between_steps(lambda: saves.append(t.iter)))])
    trainer.train()
    assert len(every.at) == 6
    assert len(seldom.at) == 6  # its numbers are those of train(), so it is always called
    assert saves == [1, 2, 3, 4, 5]

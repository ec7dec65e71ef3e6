"""Checkpoints while training: which are there at the end, what each holds, and that none is taken of half an
iteration.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import checkpoint
from trainwright.base.errors import ConfigError
from trainwright.engine.loop import TrainerBase
from trainwright.hooks import BestCheckpointer, CallbackHook, EvalHook, HookBase, PeriodicCheckpointer

# A save is on disk when it returns.
Checkpointer = partial(checkpoint.Checkpointer, asynchronous=False)


class Trainer(TrainerBase):
    """Its model's weight counts the steps."""

    def __init__(self, folder: Path, fails_at: int | None = None) -> None:
        super().__init__()
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.checkpointer = Checkpointer(self.model, folder)
        self.fails_at = fails_at

    def run_step(self) -> None:
        if self.iter == self.fails_at:
            raise ZeroDivisionError
        with torch.no_grad():
            self.model.weight += 1


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("model_*"))


def steps_in(folder: Path, name: str) -> int:
    model = nn.Linear(1, 1, bias=False)
    Checkpointer(model).load(folder / name, checkpointables=[])
    return int(model.weight.item())


@pytest.mark.parametrize(
    ("period", "expected"),
    [
        (3, {"model_0000002": 3, "model_0000005": 6, "model_final": 8}),
        (4, {"model_0000003": 4, "model_0000007": 8, "model_final": 8}),  # ends with the training
    ],
)
def test_checkpoints_are_named_by_the_last_iteration_done(
    period: int, expected: dict[str, int], tmp_path: Path
) -> None:
    trainer = Trainer(tmp_path)
    trainer.register_hooks([PeriodicCheckpointer(trainer.checkpointer, period)])
    trainer.train(0, 8)
    assert {name: steps_in(tmp_path, name) for name in names(tmp_path)} == expected
    assert (tmp_path / "last_checkpoint").read_text().strip() == "model_final"


def test_the_final_save_deletes_what_a_kill_has_left(tmp_path: Path) -> None:
    killed = Trainer(tmp_path)
    killed.register_hooks([PeriodicCheckpointer(killed.checkpointer, 1)])  # which keeps all
    killed.train(0, 4)
    resumed = Trainer(tmp_path)
    resumed.register_hooks([PeriodicCheckpointer(resumed.checkpointer, 9, max_to_keep=2)])
    resumed.train(4, 5)
    assert names(tmp_path) == ["model_0000002", "model_0000003", "model_final"]


def test_a_checkpoint_holds_what_every_hook_knew_after_the_iteration(tmp_path: Path) -> None:
    class Counter(HookBase):
        count = 0

        def after_step(self) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    trainer, counter = Trainer(tmp_path), Counter()
    trainer.checkpointer = Checkpointer(trainer.model, tmp_path, counter=counter)
    trainer.register_hooks([PeriodicCheckpointer(trainer.checkpointer, 2), counter])  # the counter comes later
    trainer.train(0, 2)
    assert json.loads((tmp_path / "model_0000001" / "counter.json").read_text())["count"] == 2


def test_a_failure_keeps_the_last_checkpoint_and_saves_none_of_the_failed_iteration(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, fails_at=5)
    trainer.register_hooks([PeriodicCheckpointer(trainer.checkpointer, 2)])
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 8)
    assert names(tmp_path) == ["model_0000001", "model_0000003"]
    assert (tmp_path / "last_checkpoint").read_text().strip() == "model_0000003"


def test_a_due_step_is_saved_when_a_later_hook_fails_after_it(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        if trainer.iter == 3:
            raise KeyError

    trainer = Trainer(tmp_path)
    trainer.register_hooks([PeriodicCheckpointer(trainer.checkpointer, 2), CallbackHook(after_step=fail)])
    with pytest.raises(KeyError):
        trainer.train(0, 8)
    assert names(tmp_path) == ["model_0000001", "model_0000003"]
    assert steps_in(tmp_path, "model_0000003") == 4


def train_with_metric(
    folder: Path, values: list[float], mode: str = "max", *, is_first: bool = False, **kw: Any
) -> BestCheckpointer:
    """Evaluate after each iteration; the last value is the final evaluation's. ``is_first``: before the evaluation."""
    trainer = Trainer(folder)
    given = iter(values)
    best = BestCheckpointer(1, trainer.checkpointer, "accuracy", mode, **kw)
    hooks = [EvalHook(1, lambda: {"accuracy": next(given)}), best]
    trainer.register_hooks(hooks[::-1] if is_first else hooks)
    trainer.train(0, len(values))
    return best


@pytest.mark.parametrize(
    ("values", "mode", "best_iter"),
    [
        ([0.1, 0.5, 0.3, 0.4], "max", 1),
        ([0.4, 0.5, 0.3, 0.4], "min", 2),
        ([0.5, 0.5, 0.5], "max", 0),  # only strictly better counts
        ([float("nan"), 0.2, float("inf"), 0.1], "max", 1),
        ([0.1, 0.2, 0.3], "max", 2),  # the final evaluation
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_the_best_checkpoint_is_that_of_the_best_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: list[float], mode: str, best_iter: int, is_first: bool
) -> None:
    best = train_with_metric(tmp_path, values, mode, is_first=is_first)
    assert "did not compute" not in caplog.text
    assert best.best_iter == best_iter
    assert steps_in(tmp_path, "model_best") == best_iter + 1
    assert not (tmp_path / "last_checkpoint").exists()  # the best is never the one to resume from


@pytest.mark.parametrize(
    ("values", "mode", "kept"),
    [
        ([0.1, 0.5, 0.3, 0.4], "max", [1, 3]),
        ([0.5, 0.1, 0.4, 0.3, 0.2], "min", [1, 4]),
        ([0.5, 0.5, 0.5], "max", [0, 1]),  # only strictly better counts
        ([float("nan"), 0.2], "max", [1]),
    ],
)
def test_the_k_best_checkpoints_are_kept(tmp_path: Path, values: list[float], mode: str, kept: list[int]) -> None:
    best = train_with_metric(tmp_path, values, mode, top_k=2)
    expected = [f"model_best_{iteration:07d}" for iteration in kept]
    assert names(tmp_path) == ["model_best", *expected]
    assert sorted(name for _, _, name in best.top) == expected
    assert (tmp_path / "model_best").resolve().name == best.top[0][2]
    for iteration, name in zip(kept, expected, strict=True):
        assert steps_in(tmp_path, name) == iteration + 1


def test_the_k_best_and_the_newest_are_kept_apart(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    given = iter([0.9, 0.8, 0.1, 0.2, 0.3])
    best = BestCheckpointer(1, trainer.checkpointer, "accuracy", top_k=2)
    save = PeriodicCheckpointer(trainer.checkpointer, 1, max_to_keep=1)
    trainer.register_hooks([save, EvalHook(1, lambda: {"accuracy": next(given)}), best])
    trainer.train(0, 5)
    expected = ["model_0000004", "model_best", "model_best_0000000", "model_best_0000001", "model_final"]
    assert [name for name in names(tmp_path) if name != "last_checkpoint"] == expected


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("values", [[0.5, 0.3, 0.4, 0.6, 0.2], [0.1, 0.9, 0.2, 0.3]])  # the best comes later, earlier
def test_the_best_after_a_kill_are_those_of_the_uninterrupted_run(
    values: list[float], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Killed in iteration 3, from whose checkpoint on it is resumed, and whose best was not saved."""
    states: list[dict[str, Any]] = []
    bests = []
    for name, start in (("whole", 0), ("resumed", 2)):
        if start and settings:  # the k best were saved before the kill
            shutil.copytree(tmp_path / "whole", tmp_path / name, symlinks=True)
        trainer = Trainer(tmp_path / name)
        nn.init.constant_(trainer.model.weight, start)
        best = BestCheckpointer(1, trainer.checkpointer, "accuracy", **settings)
        if start:
            best.load_state_dict(states[start - 1])
        given = iter(values[start:])
        save = lambda best=best: states.append(json.loads(json.dumps(best.state_dict())))  # noqa: E731
        keep = CallbackHook(after_step=lambda t, save=save: t.call_between_steps(save))  # as a checkpoint
        trainer.register_hooks([keep, EvalHook(1, lambda given=given: {"accuracy": next(given)}), best])
        trainer.train(start, len(values))
        bests.append(best)
    whole, resumed = bests
    assert (resumed.best, resumed.best_iter, resumed.top) == (whole.best, whole.best_iter, whole.top)
    assert names(tmp_path / "resumed") == names(tmp_path / "whole")
    assert steps_in(tmp_path / "resumed", "model_best") == whole.best_iter + 1


def test_a_metric_that_is_not_there_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(tmp_path)
    trainer.register_hooks(
        [EvalHook(1, lambda: {"acc": 1.0}), BestCheckpointer(1, trainer.checkpointer, "accuracy", "max")]
    )
    trainer.train(0, 3)
    assert len([r for r in caplog.records if "'accuracy'" in r.message and "acc" in r.message]) == 1
    assert names(tmp_path) == []


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path)
    with pytest.raises(ConfigError, match="'max' or 'min'"):
        BestCheckpointer(1, checkpointer, "accuracy", "best")
    with pytest.raises(ConfigError, match="max_to_keep"):
        PeriodicCheckpointer(checkpointer, 1, max_to_keep=0)


def test_checkpoints_under_own_names_by_a_function(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)

    def save(**settings: Any) -> None:
        trainer.checkpointer.save(f"{trainer.iterations_done}", **settings)

    is_due = lambda: trainer.iter in (2, 7)  # noqa: E731
    trainer.register_hooks([PeriodicCheckpointer(trainer.checkpointer, is_due, save=save)])
    trainer.train(0, 8)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["3", "8"]
    assert (tmp_path / "last_checkpoint").read_text().strip() == "8"


def test_a_training_metric_chooses_the_best_checkpoint_also_at_the_end(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    put = CallbackHook(after_step=lambda t: t.storage.put_scalar("score", float(t.iter)))
    best = BestCheckpointer(lambda: trainer.iter == 1, trainer.checkpointer, "score")
    trainer.register_hooks([put, best])
    trainer.train(0, 4)
    assert (best.best, best.best_iter) == (2.5, 3)  # the mean since the check after the second iteration
    assert steps_in(tmp_path, "model_best") == 4


def test_values_of_an_evaluation_that_a_hook_puts_are_compared_as_they_are(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    scores = {1: 1.0, 3: 5.0, 5: 3.0}
    put = CallbackHook(after_step=lambda t: t.iter in scores and t.storage.put_scalar("score", scores[t.iter]))
    best = BestCheckpointer(lambda: trainer.iter in scores, trainer.checkpointer, "score")
    trainer.register_hooks([put, best])
    trainer.train(0, 7)
    assert (best.best, best.best_iter) == (5.0, 3)

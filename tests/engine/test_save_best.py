"""``save_best``: the best checkpoint by each of several metrics, over retention and a resume, in both APIs."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.toys import Classifier, file_config, pairs, pairs_net, points, quiet
from trainwright import DefaultTrainer, Trainer
from trainwright.base.errors import ConfigError
from trainwright.checkpoint import verify
from trainwright.hooks import HookBase

SCORES, ERRORS = [0.3, 0.9, 0.5, 0.7, 0.1, 0.2], [0.5, 0.6, 0.2, 0.4, 0.1, 0.3]
RUNS: dict[str, Iterator[int]] = {}  # of a folder: the number of the next evaluation


class Scripted(Trainer):
    def evaluate(self, dataset: Any = None, logs: Any = None) -> dict[str, Any]:
        number = next(RUNS.setdefault(str(self.output_dir), itertools.count()))
        return {"loss": 1.0, "score": SCORES[min(number, 5)], "error": ERRORS[min(number, 5)]}


class ScriptedFile(DefaultTrainer):
    @classmethod
    def test(cls, cfg: Any, *_: Any) -> dict[str, Any]:
        number = next(RUNS.setdefault(cfg.train.output_dir, itertools.count()))
        return {"score": SCORES[min(number, 5)], "error": ERRORS[min(number, 5)]}


def python_api(folder: Path, resumes: bool = False, best: Any = None) -> Any:
    config = quiet(
        folder, batch_size=10, num_epochs=6, save_best={"error": "min"} if best is None else best,
        metric_for_best_model="score", greater_is_better=True, save_steps=5, max_to_keep=1,
        resume_from_checkpoint=resumes,
    )  # fmt: skip
    return Scripted(pairs_net(), config, pairs(), pairs())


def config_files(folder: Path, resumes: bool = False, best: Any = None) -> Any:
    cfg = file_config(folder, Classifier, points, points, train_iter=6, train_micro_batch_size=4, resume=resumes)
    cfg.train.checkpointer = {"period": 1, "max_to_keep": 1, "save_best": {"error": "min"} if best is None else best}
    cfg.train.evaluation.update(eval_metric="score", eval_mode="max", eval_period=1, enabled=True)
    return ScriptedFile(cfg)


APIS = pytest.mark.parametrize("build", [python_api, config_files])


def best_iterations(trainer: Any) -> list[int]:
    """Of ``model_best`` and of the best one by the error, from 1."""
    folder = Path(trainer.checkpointer.save_dir)
    names = ["model_best", "model_error_best"]
    for name in names:
        verify(folder / name)
    states = [json.loads((folder / name / "trainer.json").read_text()) for name in names]
    return [state["iterations_done"] // (trainer.max_iter // 6) for state in states]


@APIS
def test_each_metric_has_its_best_checkpoint_and_retention_keeps_both(build: Any, tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.train()
    assert best_iterations(trainer) == [2, 5]
    assert trainer.best_checkpoint == Path(trainer.checkpointer.save_dir, "model_best")


@APIS
@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_run_continues_the_comparison_of_each(build: Any, stop: int, tmp_path: Path) -> None:
    class Stops(HookBase):
        def before_step(self) -> None:
            if self.trainer.iter == stop * (self.trainer.max_iter // 6) + (build is python_api):
                raise KeyboardInterrupt

    stopped = build(tmp_path)
    stopped.register_hooks([Stops()])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    trainer = build(tmp_path, resumes=True)
    trainer.train()
    assert best_iterations(trainer) == [2, 5]


@APIS
@pytest.mark.parametrize(
    ("best", "facts"),
    [
        (["eror"], "save_best: got 'eror'.*higher is better"),
        ({"score": "most"}, "save_best"),
        (3, "save_best"),
        ([{"error": "min"}], "save_best"),
        (False, "save_best"),
    ],
)
def test_a_wrong_metric_is_refused_with_the_setting(build: Any, best: Any, facts: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=facts):
        build(tmp_path, best=best)


def test_names_are_those_of_evaluations_and_the_metric_of_the_best_model_is_not_kept_twice(tmp_path: Path) -> None:
    config = quiet(tmp_path, batch_size=10, num_epochs=2, save_best=["eval_loss", "accuracy"], metrics=["accuracy"])
    torch.manual_seed(0)
    trainer = Trainer(nn.Sequential(nn.Flatten(), pairs_net()), config, pairs(), pairs())
    trainer.train()
    names = {path.name for path in Path(trainer.checkpointer.save_dir).glob("model_*")}
    assert names == {"model_best", "model_accuracy_best"}


@pytest.mark.parametrize("best", ["error", ["error"], {"error": None}, {"error": "min"}])
@APIS
def test_the_settings_of_a_run_show_it_as_it_was_written(
    build: Any, best: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path, best=best).train()
    shown = " ".join(caplog.text.split())  # the settings are wrapped
    assert f"save_best={best!r}" in shown or f"save_best={best}" in shown


def test_without_an_evaluation_it_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(pairs_net(), quiet(tmp_path, save_best="loss"), pairs())
    assert "save_best='loss' has no effect: nothing is evaluated" in caplog.text
    assert Trainer(pairs_net(), quiet(tmp_path), pairs()).best_checkpoint is None


@APIS
def test_the_history_has_the_rows_of_the_run_and_of_the_one_that_it_resumes(build: Any, tmp_path: Path) -> None:
    first = build(tmp_path)
    assert first.history == []
    assert first.best_checkpoint is None
    first.train()
    rows = first.history
    assert rows == [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert rows[-1]["iteration"] == first.max_iter
    assert build(tmp_path, resumes=True).history == rows
    assert build(tmp_path, resumes=True).best_checkpoint == first.best_checkpoint
    assert build(tmp_path).history == []  # a new run moves it aside

    first.history = [1]
    assert first.history == [1]


def test_a_checkpoint_of_the_best_has_the_results_of_its_evaluation(tmp_path: Path) -> None:
    trainer = config_files(tmp_path)
    trainer.train()
    hooks = json.loads((tmp_path / "model_error_best" / "trainer.json").read_text())["hooks"]
    states = [hook["state"] for hook in hooks if hook["class"] == "BestCheckpointer"]
    assert [state["metric"] for state in states] == ["score", "error"]
    assert states[1]["results"]["error"] == 0.1

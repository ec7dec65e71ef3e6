"""Ten seeded bugs are found in both APIs, and the set-up without them has no problem; nothing of it is changed."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inspect.check.seeded_bugs import BUGS, config_files, objects
from trainwright import Trainer
from trainwright.config import ConfigError
from trainwright.inspect.check.finding import Finding, Report
from trainwright.inspect.check.run import CHECKS

BOTH = pytest.mark.parametrize("build", [objects, config_files])


def test_the_summary_names_what_has_not_passed_and_why() -> None:
    results: dict[str, Any] = {"steps": "passed", "one_batch": "undecided", "test_data": "problem"}
    report = Report(tuple(Finding(check, result, "") for check, result in results.items()))
    counts, *lines = report.summary().splitlines()
    assert counts.startswith("1 problem, 1 passed, 1 undecided in")
    assert lines == ["Not passed, with a problem: test_data.", "Not passed, as the evidence is too weak: one_batch."]


def test_the_table_breaks_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    path = "/data/" + "a-long-folder/" * 6 + "sample 1.png".replace(" ", "-")
    text = io.StringIO()
    finding = Finding("samples", "problem", f"The sample {path} is empty, and so are others.", "Delete it.")
    Report((finding,)).print(text)
    lines = text.getvalue().splitlines()
    assert sum(path in line for line in lines) == 1
    assert all(len(line) <= 60 for line in lines if path not in line)
    assert next(line for line in lines if "Delete" in line).strip() == "→ Delete it."


@pytest.mark.exhaustive(every=8)
@BOTH
@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.slow
def test_a_seeded_bug_is_found(build: Any, bug: str, tmp_path: Path) -> None:
    found = build(tmp_path / "run", bug).check(only=[BUGS[bug]])
    assert [one.check for one in found.problems] == [BUGS[bug]]
    assert found.problems[0].suggestion


@BOTH
@pytest.mark.slow
def test_a_right_set_up_has_no_problem_and_is_not_changed(build: Any, tmp_path: Path) -> None:
    trainer = build(tmp_path / "run")
    weights = [one.detach().clone() for one in trainer.model.parameters()]
    files, state, generator = {*tmp_path.rglob("*")}, trainer.optimizer.state_dict()["state"], torch.get_rng_state()
    report = trainer.check()
    assert report
    assert [one.check for one in report] == [*CHECKS]
    results = {one.check: one.result for one in report}
    assert results.pop("accumulation") == results.pop("workers") == "skipped"
    assert {*results.values()} == {"passed"}
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.model.parameters(), strict=True))
    assert all(one.grad is None for one in trainer.model.parameters())
    assert trainer.optimizer.state_dict()["state"] == state == {}
    assert torch.equal(torch.get_rng_state(), generator)
    assert {*tmp_path.rglob("*")} == files
    assert trainer.iterations_done == 0


def test_a_training_after_the_checks_is_the_same(tmp_path: Path) -> None:
    trained = []
    for checks in (False, True):
        trainer = objects(tmp_path / str(checks))
        if checks:
            trainer.check(only=["one_batch", "labels", "resume"])
        trainer.config.update({"num_epochs": 1})
        trainer.train()
        trained.append([*trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_checks_without_time_are_skipped_and_say_so(tmp_path: Path) -> None:
    report = objects(tmp_path).check(max_seconds=1e-9)
    assert {one.result for one in report} == {"skipped"}
    assert "no time was left" in report["labels"].evidence
    assert report
    with pytest.raises(ConfigError, match="Did you mean 'labels'"):
        objects(tmp_path).check(only="label")


@pytest.mark.parametrize("error", [ZeroDivisionError("in my loss"), ConfigError("TrainingConfig.loss: in my loss")])
def test_an_error_of_the_step_is_a_problem(error: Exception, tmp_path: Path) -> None:
    class Broken(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            raise error

    trainer = objects(tmp_path)
    broken = Broken(trainer.model, trainer.config, trainer.train_dataset)
    report = broken.check(only=["steps", "parameters"])
    (problem,) = report.problems  # one error is one problem
    assert "in my loss" in problem.evidence
    assert report["parameters"].evidence == "the error of steps."

"""The checks raise no false alarm on the examples."""

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from trainwright import Trainer
from trainwright.cli.main import main
from trainwright.inspect.check.finding import Report

EXAMPLES = Path(__file__).parents[3] / "examples"
# No Trainer of ours; ray is not installed; others start processes of their own, which are killed.
WITHOUT_TRAINER = {"own_loop", "replicas_torchft", "sweep_ray", "resume_after_kill", "plot_curves", "prepare_digits"}
NEEDS = {"low_precision": "torchao"}  # in no test extra
SCRIPTS = [
    path
    for folder in ("objects", "recipes", "tasks")
    for path in sorted((EXAMPLES / folder).glob("*.py"))
    if path.stem not in WITHOUT_TRAINER and "__main__" in path.read_text()
]


class CheckedError(Exception):
    """Ends an example where its training would begin."""


@pytest.fixture
def run_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Report]]:
    """``run_checked(script)`` checks the first trainer that a script would train."""

    def run(script: Path) -> Report:
        reports = []

        def check(trainer: Trainer, *_: Any, **__: Any) -> None:
            patch.undo()  # the checks train copies
            reports.append(trainer.check(max_seconds=20))
            raise CheckedError

        monkeypatch.setattr(sys, "argv", [str(script)])
        monkeypatch.syspath_prepend(script.parent)
        monkeypatch.chdir(tmp_path)
        with pytest.MonkeyPatch.context() as patch, suppress(CheckedError):
            patch.setattr(Trainer, "train", check)
            runpy.run_path(str(script), run_name="__main__")
        return reports[0]

    yield run
    for name, module in [*sys.modules.items()]:  # other examples have modules of the same names
        if str(getattr(module, "__file__", None)).startswith(str(EXAMPLES)):
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft
@pytest.mark.exhaustive(every=24)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_an_example(script: Path, run_checked: Callable[[Path], Report]) -> None:
    if script.stem in NEEDS:
        pytest.importorskip(NEEDS[script.stem], reason=f"pip install {NEEDS[script.stem]}")
    report = run_checked(script)
    assert not report.problems, str(report)


@pytest.mark.exhaustive
def test_the_example_of_config_files(mnist_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(mnist_project / "configs" / "config.py"), f"train.output_dir={tmp_path}"]) == 0

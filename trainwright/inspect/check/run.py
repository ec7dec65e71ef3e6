"""The checks, in the order in which they are made, and the run of all of them."""

import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from trainwright.base.errors import ConfigError, did_you_mean
from trainwright.data.seeding import kept_generators
from trainwright.engine.run import Run
from trainwright.inspect.check import data, evaluation, exactness, steps
from trainwright.inspect.check.copies import quiet
from trainwright.inspect.check.finding import Finding, Report, Skipped
from trainwright.inspect.check.observed import SetUp

Check = Callable[[SetUp], Finding]

CHECKS: dict[str, Check] = {
    "steps": steps.check_steps,
    "learning_rate": steps.check_learning_rate,
    "parameters": steps.check_parameters,
    "modes": steps.check_modes,
    "zero_grad": steps.check_zero_grad,
    "one_batch": steps.check_one_batch,
    "loss_scale": exactness.check_loss_scale,
    "accumulation": exactness.check_accumulation,
    "evaluation": evaluation.check_evaluation,
    "resume": exactness.check_resume,
    "samples": data.check_samples,
    "test_data": data.check_test_data,
    "workers": data.check_workers,
    "labels": evaluation.check_labels,
    "forecast": steps.check_forecast,
}


_RAISED = "train() would raise it, too; correct it first."


def check_run(
    run: Run,
    *,
    max_seconds: float = 60.0,
    only: Sequence[str] | None = None,
    output_dir: str | None = None,
    on_start: Callable[[str], object] | None = None,
) -> Report:
    """Make the checks on copies of the trainer of ``run``, within ``max_seconds``.

    ``only``: the names of the checks to make; default: all. ``output_dir``: the folder of the run, if it is not the
    trainer's. ``on_start`` is called with the name of each check before it starts.
    """
    names = _chosen(only)
    run.check_metrics()
    importlib.import_module("torchmetrics")  # the first update imports both: seconds that no check needs
    torch.compiler.list_backends()

    end = time.perf_counter() + max_seconds
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as folder, kept_generators():
        setup = SetUp(run, Path(folder), end=end)
        setup.output_dir = output_dir or setup.output_dir
        for name in names:
            if on_start is not None:
                on_start(name)
            findings.append(_once(run_check(name, setup), findings))
    return Report(tuple(findings))


def run_check(name: str, setup: SetUp) -> Finding:
    """One check. An error of the user's code is a problem that it has found."""
    start = time.perf_counter()
    try:
        if setup.seconds_left() <= 0:
            raise Skipped("no time was left; allow more seconds")
        with quiet():
            finding = CHECKS[name](setup)
    except Skipped as reason:
        finding = Finding(name, "skipped", f"{reason}.")
    except ConfigError as error:
        if str(error).startswith("check:"):
            raise
        finding = Finding(name, "problem", str(error), _RAISED)
    except Exception as error:
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        finding = Finding(name, "problem", f"{type(error).__name__}: {error}{notes}", _RAISED)
    return replace(finding, check=name, seconds=round(time.perf_counter() - start, 3))


def _once(finding: Finding, before: Sequence[Finding]) -> Finding:
    """An error that another check has reported is no second problem."""
    for one in before if finding.suggestion == _RAISED else ():
        if one.suggestion == _RAISED and one.evidence.startswith(
            finding.evidence.partition("\n")[0].partition(" The ")[0]
        ):
            return replace(finding, result="skipped", evidence=f"the error of {one.check}.", suggestion="")
    return finding


def _chosen(only: Sequence[str] | None) -> list[str]:
    if only is None:
        return [*CHECKS]
    only = [only] if isinstance(only, str) else only
    for name in only:
        if name not in CHECKS:
            raise ConfigError(f"check: there is no check {name!r}. {did_you_mean(name, CHECKS)}")
    return [name for name in CHECKS if name in only]

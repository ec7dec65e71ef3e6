"""The table of GPU measurements, on the CPU with tiny sizes: the same code, and what happens when a row fails."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_rows, gpu_table
from benchmarks.gpu_needs import WAITED
from benchmarks.gpu_rows import Settings
from benchmarks.gpu_table import Suite

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("name", ["prefetch", "saves", "fp16", "layout"])
@pytest.mark.slow
def test_a_row_of_one_process(name: str, tmp_path: Path) -> None:
    found = getattr(gpu_rows, name)(Settings(device="cpu", tiny=True))
    assert found.passed, found
    assert found.result


@pytest.mark.exhaustive
def test_graph_mode_and_eager_steps_have_the_same_losses() -> None:
    found = gpu_rows.graph(Settings(device="cpu", tiny=True))
    assert found.passed, found


@pytest.mark.exhaustive
def test_the_table_is_written_without_a_gpu(run_python: Callable[..., Any], tmp_path: Path) -> None:
    rows = "Collectives,Trainer: no step,fused Adam,MLP: Trainer,Layout: one,ZeRO 3,pipeline 2"
    into = tmp_path / "table" / "gpu.md"
    arguments = ("--device", "cpu", "--tiny", "--rows", rows, "--into", into)
    run_python("-m", "benchmarks.gpu_table", *arguments, cwd=REPOSITORY, timeout=280)
    lines = into.read_text().splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in lines[2:] if line.startswith("|")}
    assert cells["Collectives"].startswith("gloo, processes: 2")
    assert "of the plain loop" in cells["MLP: Trainer"]
    assert "losses differ by" in cells["Layout: data 2, ZeRO 3"]
    assert cells["Layout: data 8, ZeRO 3"] == "not run: needs 8 GPUs, there are 2"
    assert "torch 2" in lines[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", gpu_table.NEEDS)
def test_a_row_that_needs_gpus_has_no_errors_of_its_own(name: str) -> None:
    rows = {row.about: row for row in Suite(device="cpu", tiny=True, gpus=2, minutes=9, only=[name]).rows()}
    assert rows[name].passed, rows[name]


def test_a_hang_that_no_process_reports_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_table, "run", lambda *_, **__: {"error": "killed", "output": "rank 0: killed"})
    (row,) = Suite(device="cpu", tiny=True, gpus=2, minutes=4, only=["A hang"]).rows()
    assert row.passed is False
    assert "not reported: killed" in row.result


def suite(monkeypatch: pytest.MonkeyPatch, run: Callable[..., dict[str, Any]], **options: Any) -> Suite:
    monkeypatch.setattr(gpu_table, "run", run)
    return Suite(**{"device": "cpu", "tiny": True, "gpus": 8, "minutes": 9.5, **options})


def test_a_row_that_fails_is_reported_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, settings: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        if name == "saves":
            return {"error": "RuntimeError: no | memory"}
        if name == "objects":
            raise OSError("no process")
        if name == "hanging":
            return {"error": "ended", "output": f"A process has {WAITED} (hang_timeout_s): the job ends."}
        losses = {"losses": [1.0]} if name == "layout" else {}
        return {"result": "good", "expected": "good", "passed": True, "launches": 1, "us_between_lines": 1e3, **losses}

    rows = {row.about: row for row in suite(monkeypatch, run).rows()}
    assert rows["Asynchronous save from pinned memory"].result == "failed: RuntimeError: no | memory"
    assert "| failed: RuntimeError: no / memory | - | **no** |" in rows["Asynchronous save from pinned memory"].text()
    assert rows["MLP: Trainer"].result == "failed: OSError: no process"
    others = [
        row for name, row in rows.items() if "save" not in name and not name.startswith(("MLP: T", "Trainer, MLP"))
    ]
    assert len(others) > 15
    assert not any(row.passed is False for row in others)


@pytest.mark.exhaustive
def test_a_shared_layout_gets_the_losses_of_one_process(run_python: Callable[..., Any], tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--processes", "1", "--share-gpu", "--rows", "Layout: one process,in 2 copies")
    run_python("-m", "benchmarks.gpu_table", *arguments, "--into", tmp_path / "gpu.md", cwd=REPOSITORY, timeout=280)
    rows = [line for line in (tmp_path / "gpu.md").read_text().splitlines() if line.startswith("| Layout")]
    assert [row.split(" | ")[3] for row in rows] == ["yes", "yes"]


def test_a_row_is_not_run_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(suite(monkeypatch, lambda *_, **__: pytest.fail("a row was run"), minutes=0.0).rows())
    assert {row.result for row in rows} == {"not run: the 0 minutes were over"}


def test_the_exit_code_is_1_after_a_failed_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_table, "run", lambda *_, **__: {"error": "no"})
    main = functools.partial(
        gpu_table.main, ["--device", "cpu", "--rows", "Prefetching", "--into", str(tmp_path / "t")]
    )
    assert main() == 1
    found = {"result": "good", "expected": "", "passed": True}
    monkeypatch.setattr(gpu_table, "run", lambda *_, **__: found)
    assert main() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_table.main(["--into", str(tmp_path / "gpu.md")]) == 2
    assert capsys.readouterr().err == f"{gpu_table.NO_GPU}\n"
    assert not list(tmp_path.iterdir())

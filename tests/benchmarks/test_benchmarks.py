"""Each benchmark runs with a minimal job, too small to measure speed, and the table contains its results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hardest, layouts, start, worker
from benchmarks.clock import Clock
from benchmarks.rounds import installed_peers, ratios, spread
from benchmarks.step import CASES
from tests.kinds import only_in_torture
from tests.ranks import on_ranks

REPOSITORY = Path(__file__).parents[2]
FEW = ("--rounds", 1, "--steps", 12)


@pytest.fixture
def measure(run_python: Callable[..., Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``measure("step", *arguments)``: the JSON that ``python -m benchmarks.step`` writes."""

    def run(name: str, *arguments: object) -> dict[str, Any]:
        file = tmp_path / f"{name}.json"
        run_python("-m", f"benchmarks.{name}", *arguments, "--json", file, cwd=REPOSITORY)
        return json.loads(file.read_text())

    return run


def metrics_of(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    failed = [result["error"] for result in measured["results"] if "error" in result]
    assert not failed, failed
    return {result["name"]: result for result in measured["results"]}


EAGER = ("tiny", "batches", "tensors", "columns", "own_step", "accumulation", "bf16", "gpt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "peer"),
    [(case, peer) for case in EAGER for peer in ("plain", "objects", "config") if peer in CASES[case].peers],
)
@pytest.mark.exhaustive(every=22)
def test_a_step_of_the_plain_loop_and_of_ours(case: str, peer: str) -> None:
    found = worker.measure(peer, CASES[case].job | {"steps": 4 if case == "gpt" else 12})
    assert found["us"] > 0
    assert found["peak_mib"] > 50


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["features", "ranks"])
def test_features_at_a_terminal_and_two_processes(case: str, measure: Callable[..., Any]) -> None:
    assert metrics_of(measure("step", "--case", case, *FEW, "--peers", "objects"))["objects"]["us"] > 0


@pytest.mark.exhaustive
def test_a_step_of_the_peers_that_are_there(measure: Callable[..., Any]) -> None:
    peers = [peer for peer in ("accelerate", "transformers") if peer in installed_peers()]
    assert list(metrics_of(measure("step", *FEW, "--peers", ",".join(["plain", *peers])))) == ["plain", *peers]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout", ["ddp", "tp2", *(pytest.param(name, marks=only_in_torture) for name in ("zero1", "zero3", "pp2"))]
)
def test_two_processes_and_a_plain_script_of_the_same_layout(layout: str, measure: Callable[..., Any]) -> None:
    found = metrics_of(measure("ranks", "--layout", layout, "--case", "tiny", "--rounds", 1, "--steps", 110))
    assert {*found} == {"objects", "config", "plain"}
    assert all(found[name]["ratio"] > 0 and found[name]["cpu_ratio"] > 0 for name in ("objects", "config"))


@pytest.mark.exhaustive
def test_a_failing_trainer_is_reported_and_the_others_run(run_python: Callable[..., Any]) -> None:
    done = run_python("-m", "benchmarks.step", *FEW, "--peers", "plain,plain:unknown", cwd=REPOSITORY)
    assert "failed: ValueError: plain: there is no variant 'unknown'" in done.stdout
    assert "plain loop" in done.stdout


@pytest.mark.exhaustive
def test_calls(measure: Callable[..., Any]) -> None:
    found = measure("calls", "--steps", 30, "--ours", "--data", "columns")["results"]
    assert [row["name"] for row in found] == ["objects", "config"]
    assert all(0 < row["calls"] < 1000 and row["packages"]["trainwright"] > 0 for row in found)


@pytest.mark.exhaustive
def test_checkpoint(measure: Callable[..., Any]) -> None:
    found = metrics_of(measure("checkpoint", "--rounds", 1, "--layers", 2))
    assert found["asynchronous"]["stall_s"] < 5
    assert 0 < found["ours: verify and load"]["load_s"] < 5


@pytest.mark.exhaustive
def test_what_processes_agree_on(run_python: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    run_python("-m", "benchmarks.control_plane", "--processes", 3, "--json", file, cwd=REPOSITORY)
    first, *others = json.loads(file.read_text())["3"]
    assert len(others) == 2
    for ranks in zip(*(rank.values() for rank in (first, *others)), strict=True):
        assert all(rank["cpu_s"] > 0 and rank["wall_s"] > 0 for rank in ranks)
    # Equal settings and models are found without a gather, whose writes grow with the ranks.
    assert first["compare settings"]["writes"] == first["compare the model"]["writes"] < 10


@pytest.mark.exhaustive
def test_resume_reads_one_batch(measure: Callable[..., Any]) -> None:
    found = metrics_of(measure("resume", "--rounds", 1, "--samples", 2560, "--peers", "objects"))
    assert found["objects"]["read"] == 64


@pytest.mark.exhaustive
def test_graph(measure: Callable[..., Any]) -> None:
    found = metrics_of(measure("graph", *FEW, "--peers", "plain"))
    assert found["plain"]["cold_s"] > 0


@pytest.mark.exhaustive
def test_start() -> None:
    assert start.first_step("objects")["s"] > start.seconds_of(start.HELP) > 0


@pytest.mark.exhaustive
def test_the_hardest_samples_of_an_evaluation(tmp_path: Path) -> None:
    found = hardest.measured("tiny MLP", 2, str(tmp_path))
    assert found["without_us"] > 0
    assert found["low"] <= found["ratio"] <= found["high"]


def test_gpu_says_that_there_is_none(run_python: Callable[..., Any]) -> None:
    done = run_python("-m", "benchmarks.gpu", cwd=REPOSITORY, code=1)
    assert "no CUDA GPU" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_gpu_can_be_tried_without_one(measure: Callable[..., Any]) -> None:
    few = ("--device", "cpu", "--case", "tiny", "--rounds", 1, "--steps", 30)
    found = metrics_of(measure("gpu", *few, "--peers", "plain"))
    assert found["plain"]["ms"] > 0
    assert found["plain"]["launches"] == 0


def test_the_table_has_a_row_for_what_was_measured(run_python: Callable[..., Any], tmp_path: Path) -> None:
    results = [
        {"name": name, "round": number, "us": us, "peak_mib": 300}
        for number in range(3)
        for name, us in [
            ("plain", 400 + number),
            ("plain:fused", 250),
            ("objects:passed", 402),
            ("objects", 200),
            ("accelerate", 600),
            ("transformers", 900),
        ]
    ]
    file = {"benchmark": "step", "case": "tiny", "command": "python -m benchmarks.step", "machine": {}}
    (tmp_path / "tiny.json").write_text(json.dumps({**file, "results": results}))
    lines = run_python("-m", "benchmarks.table", tmp_path / "tiny.json", cwd=REPOSITORY).stdout.splitlines()
    same, fused = lines[2:4]
    assert "plain loop's Adam 1.00 (1.00 - 1.00)" in same
    assert "accelerate 1.50 (1.49 - 1.50) | step tiny |" in same
    assert "fused Adam in both | Trainer 0.80 (0.80 - 0.80)" in fused
    assert len(lines) == 5  # the head, the rows above, and that of peak memory


def test_ratios_are_taken_within_a_round() -> None:
    results = [
        {"name": "plain", "round": 0, "us": 100.0},
        {"name": "ours", "round": 0, "us": 50.0},
        {"name": "plain", "round": 1, "us": 300.0},
        {"name": "ours", "round": 1, "us": 150.0},
        {"name": "ours", "round": 2, "us": 1.0},  # its plain loop has failed
    ]
    assert ratios(results, "ours", "us") == [0.5, 0.5]
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0 - 3.0)"


def test_a_clock_tells_the_time_of_a_round() -> None:
    clock = Clock()
    clock.wall = [0, 10_000, 20_000, 80_000, 90_000, 150_000]  # ns; each second step takes longer from the third on
    assert clock.metrics(warm=1)["us"] == 35.0
    assert clock.metrics(warm=1, stride=2)["us"] == 35.0
    assert clock.metrics(warm=5) == {}


def test_a_clock_tells_the_time_between_lines_of_the_log() -> None:
    clock = Clock()
    clock.wall = [step * 1000 + (5000 if step > 25 else 0) for step in range(30)]  # the host waits in step 25
    assert clock.us_between_lines(8) == (16 * 1000 + 5000) / 16 / 1e3
    assert clock.us_between_lines(20) is None


@pytest.mark.exhaustive
def test_fingerprints_of_two_runs_are_equal_and_a_changed_loss_is_reported(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    record, cases = tmp_path / "before.json", ("--case", "python", "--case", "config")
    run_python("-m", "benchmarks.fingerprint", *cases, "--json", record, cwd=REPOSITORY)
    same = run_python("-m", "benchmarks.fingerprint", *cases, "--compare", record, cwd=REPOSITORY)
    assert same.stdout.count(" equal") == 2

    changed = json.loads(record.read_text())
    changed["config"]["losses"][4] += 1e-9
    record.write_text(json.dumps(changed))
    other = run_python("-m", "benchmarks.fingerprint", *cases[2:], "--compare", record, cwd=REPOSITORY, code=1)
    assert "DIFFERS from loss 4 on" in other.stdout
    assert "Differing: config" in other.stderr


@pytest.mark.exhaustive
def test_a_layout_against_one_process(tmp_path: Path) -> None:
    updates, name = 4, "2 data"
    found = on_ranks(layouts.train, layouts.LAYOUTS[name], updates, str(tmp_path / "run"))
    single = layouts.train(layouts.ONE_PROCESS, updates, str(tmp_path / "single"))
    row = layouts.row_of(name, updates, found, single["losses"])
    assert row[:2] == [name, "2"]
    assert float(row[2]) < 1e-5
    assert float(row[4]) == pytest.approx(float(row[3]), rel=0.1)

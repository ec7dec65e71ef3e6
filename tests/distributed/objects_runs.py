"""Start `objects_script.py` alone, under torchrun or under accelerate, and read what it has left."""

import json
import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.fork_server import python
from tests.torchrun import free_port, torchrun

SCRIPT = Path(__file__).parent / "objects_script.py"
TORCHRUN = ["torchrun"]
# On a machine without a GPU these two processes compute on the CPU.
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]


@dataclass
class Run:
    code: int
    output: str
    folder: Path
    seen_folder: Path

    def rows(self) -> dict[int, dict[str, float]]:
        rows = [json.loads(line) for line in (self.folder / "metrics.json").read_text().splitlines()]
        assert len({row["iteration"] for row in rows}) == len(rows)
        return {row["iteration"]: row for row in rows}

    def lines(self) -> list[Any]:
        files = sorted(self.seen_folder.glob("rank*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def seen(self) -> dict[int, list[int]]:
        """The sample numbers of each update, all ranks together, sorted."""
        seen: dict[int, list[int]] = {}
        for iteration, numbers, *_ in self.lines():
            seen.setdefault(iteration, []).extend(numbers)
        return {iteration: sorted(numbers) for iteration, numbers in sorted(seen.items())}

    def found(self, rank: int = 0) -> dict[str, Any]:
        return dict(json.loads((self.seen_folder / f"found{rank}.json").read_text()))

    def weights(self, name: str = "final_epoch") -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "model.safetensors")


def run(folder: Path, *, launcher: list[str] | None = None, part: str = "", **said: Any) -> Run:
    arguments = json.dumps({"out": str(folder), "part": part, **said})
    if launcher in (None, TORCHRUN):
        done = torchrun(SCRIPT, arguments, processes=2 if launcher else 1, code=None)
    else:
        done = subprocess.run(
            [python(), *launcher, "--main_process_port", free_port(), str(SCRIPT), arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
    return Run(done.returncode, done.stdout, folder, folder.with_name(f"{folder.name}-seen{part}"))


def assert_same_numbers(one: Run, two: Run, tolerance: float = 1e-10) -> None:
    """Of each update, each evaluation and the weights: float64, summed in another order."""
    assert (one.code, two.code) == (0, 0), one.output + two.output
    ours, theirs = one.rows(), two.rows()
    assert list(ours) == list(theirs)
    for iteration, row in ours.items():
        for name in row.keys() - {"time", "data_time", "eta_seconds", "iteration"}:
            ours_now, theirs_now = (float("nan") if v is None else v for v in (row[name], theirs[iteration][name]))
            is_same = abs(ours_now - theirs_now) < tolerance or (math.isnan(ours_now) and math.isnan(theirs_now))
            assert is_same, (iteration, name, ours_now, theirs_now)
        assert row.keys() - {"time", "data_time"} == theirs[iteration].keys() - {"time", "data_time"}
    assert one.weights().keys() == two.weights().keys()
    for name, value in one.weights().items():
        torch.testing.assert_close(value, two.weights()[name], rtol=0, atol=tolerance)
    for moment in ("before", "results"):
        results, others = one.found()[moment], two.found()[moment]
        assert results.keys() == others.keys() >= {"loss", "accuracy"}
        assert all(abs(results[name] - others[name]) < tolerance for name in results)

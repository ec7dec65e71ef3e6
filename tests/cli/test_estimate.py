"""``trainwright estimate`` prints memory and traffic, and which layouts fit."""

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def estimate(run_python: Any, mnist_project: Path, tmp_path: Path) -> Any:
    config = mnist_project / "configs" / "config.py"
    return lambda *arguments, code=0: run_python(
        "-m", "trainwright.cli.main", "estimate", config, *arguments, cwd=tmp_path, code=code
    )


def test_memory_and_traffic_of_64_processes(estimate: Any, tmp_path: Path) -> None:
    found = json.loads(estimate("--world", 64, "--json", "train.train_micro_batch_size=8").stdout)
    assert found["layout"]["data"] == 64
    (cost,) = found["ranks"]
    assert cost["rank"] == 0
    assert cost["peak"] == sum(cost[name] for name in ("parameters", "gradients", "optimizer", "activations"))
    assert cost["traffic"]["all-reduce"] == cost["trainable"] == 4 * 669_706
    assert [*tmp_path.iterdir()] == []


def test_the_text_names_the_rank_and_the_layout(estimate: Any) -> None:
    lines = estimate("--world", 4, "--rank", 3).stdout.splitlines()
    assert lines[0] == "4 processes: 4 data"
    assert lines[1].split()[-2:] == ["rank", "3"]
    assert [line.split()[0] for line in lines[2:]] == [
        *("parameters", "gradients", "optimizer", "activations", "peak", "exchanged", "all-reduce")
    ]


@pytest.mark.exhaustive
def test_layouts_that_fit(estimate: Any) -> None:
    lines = estimate("--memory", "80GiB").stdout.splitlines()
    assert lines[0] == "1 process with 80.0 GiB each, best layout first"
    assert lines[2].endswith("fits")
    assert "parameters and states alone" in estimate("--memory", "1MiB", code=1).stdout


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--memory", "much"], ["--memory: got 'much'", "80GiB"]),
        (["--memory", "80"], ["--memory: got '80', which is a number of bytes. Give a unit: 80GiB."]),
        (["--world", "0"], ["--world: got '0'", ">= 1"]),
        (["--world", "4", "--rank", "4"], ["--rank: got 4", "0 to 3"]),
        (["train.sed=1"], ["train.sed", "Did you mean 'seed'?"]),
    ],
)
def test_a_wrong_argument_exits_2(estimate: Any, arguments: list[str], facts: list[str]) -> None:
    said = estimate(*arguments, code=2).stderr
    assert "Traceback" not in said
    for fact in facts:
        assert fact in said

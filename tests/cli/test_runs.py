"""``trainwright runs``: real runs of both APIs, that finished, failed, were stopped, and that train while it looks."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.cli.conftest import FinishedRun
from tests.toys import quiet
from trainwright import Trainer, TrainingConfig
from trainwright.cli.main import main
from trainwright.hooks.callbacks import Callback

EPOCHS, STEPS = 2, 4


@dataclass(frozen=True)
class Runs:
    folder: Path
    while_training: str  # the table of a run by itself


class Act(Callback):
    """Does something in one step."""

    def __init__(self, act: Callable[[], None], step: int) -> None:
        super().__init__()
        self.act, self.step = act, step

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        if logs["global_step"] == self.step:
            self.act()


def train(folder: Path, act: Callable[[], None] = lambda: None, step: int = 6, lr: float = 0.1) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    config = TrainingConfig(output_dir=folder, num_epochs=EPOCHS, batch_size=4, learning_rate=lr, print_steps=1)
    Trainer(torch.nn.Linear(4, 2), config, data, data, callbacks=[Act(act, step)]).train()


def stop() -> None:
    raise KeyboardInterrupt


def fail() -> None:
    raise OSError("the disk is gone")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    seen: list[str] = []

    def look() -> None:
        from contextlib import redirect_stdout
        from io import StringIO

        text = StringIO()
        with redirect_stdout(text):
            assert main(["runs", str(folder / "sweep" / "a"), "--json"]) == 0
        seen.append(text.getvalue())

    train(folder / "sweep" / "a", look)
    train(folder / "sweep" / "b", lr=0.2)
    with pytest.raises(KeyboardInterrupt):
        train(folder / "stopped", stop)
    with pytest.raises(OSError, match="the disk is gone"):
        train(folder / "failed", fail)
    return Runs(folder, seen[0])


def of(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()  # what trainings have logged
    assert main(["runs", str(folder), "--json", *arguments]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def names(found: list[dict[str, Any]]) -> list[str]:
    return [run["name"] for run in found]


def test_each_run_has_its_state_and_progress(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    found = {run["name"]: run for run in of(runs.folder, capsys)}
    states = {name: run["state"] for name, run in found.items()}
    assert states == {"sweep/a": "finished", "sweep/b": "finished", "stopped": "interrupted", "failed": "failed"}
    assert found["sweep/a"]["iteration"] == found["sweep/a"]["max_iteration"] == EPOCHS * STEPS
    assert found["failed"]["iteration"] < EPOCHS * STEPS == found["failed"]["max_iteration"]
    assert found["sweep/a"]["metric"] == found["stopped"]["metric"] == "eval_loss"
    assert 0 < found["sweep/a"]["seconds"] < 60
    row = json.loads((runs.folder / "sweep" / "a" / "metrics.json").read_text().splitlines()[-2])
    assert found["sweep/a"]["loss"] == row["total_loss"]


def test_a_run_that_trains_is_running(runs: Runs) -> None:
    (run,) = json.loads(runs.while_training)
    assert (run["state"], run["max_iteration"], run["name"]) == ("running", EPOCHS * STEPS, "a")


def test_a_run_of_a_config_file(finished: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = of(finished.folder, capsys, "--show", "optim.lr")
    assert (run["state"], run["iteration"], run["max_iteration"]) == ("finished", 60, 60)
    assert run["metric"] == "Acc@1"
    assert run["is_higher_better"] is True
    assert run["settings"]["optim.lr"] > 0


def test_sort_and_filter(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    in_order = of(runs.folder, capsys, "--sort", "best", "--state", "finished")
    assert [run["best"] for run in in_order] == sorted(run["best"] for run in in_order)
    assert names(of(runs.folder, capsys, "--sort", "name", "--reverse"))[0] == "sweep/b"
    started = [run["started"] for run in of(runs.folder, capsys, "--sort", "started")]
    assert started == sorted(started)
    assert names(of(runs.folder, capsys, "--where", "learning_rate>0.15")) == ["sweep/b"]
    assert names(
        of(runs.folder, capsys, "--where", "learning_rate!=0.2", "--where", "progress<1", "--sort", "name")
    ) == [
        "failed",
        "stopped",
    ]
    assert names(of(runs.folder, capsys, "--where", "optimizer=Adam", "--state", "failed")) == ["failed"]


class Share(nn.Module):
    """Predicts class 0; its accuracy is the part of the labels that are 0, whatever it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale.abs() * torch.tensor([[1.0, 0.0]]).expand(len(inputs), 2)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose order as numbers is another one than as texts, with a metric that should be high."""
    folder = tmp_path_factory.mktemp("sweep")
    for name, size, right, amp in [("a", 2, 5, True), ("b", 10, 10, False), ("c", 9, 0, False)]:
        data = TensorDataset(torch.zeros(10, 1), (torch.arange(10) >= right).long())
        settings: dict[str, Any] = {"num_epochs": 1, "batch_size": size, "learning_rate": 10.0**-size}
        settings |= {"metrics": ["Accuracy"], "metric_for_best_model": "accuracy", "dataloader_shuffle": amp}
        Trainer(Share(), quiet(folder / name, **settings), data, data).train()
    return folder


def test_the_best_of_a_metric_that_should_be_high_is_the_highest(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = of(sweep, capsys, "--sort", "best")
    assert [(run["name"], run["best"]) for run in found] == [("b", 1.0), ("a", 0.5), ("c", 0.0)]
    assert names(of(sweep, capsys, "--sort", "best", "--reverse")) == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("batch_size>=9", "bc"),  # as texts: "10" < "9"
        ("batch_size<10", "ac"),
        ("batch_size!=10.0", "ac"),
        ("learning_rate<1e-5", "bc"),  # 0.01, 1e-09, 1e-10
        ("best>=0.5", "ab"),
        ("best<=.5", "ac"),
        ("dataloader_shuffle=true", "a"),
        ("dataloader_shuffle != True", "bc"),
        ("optimizer>=Adam", "abc"),  # texts are compared as texts
        ("optimizer<1", ""),  # and are neither below nor above a number
        ("optimizer!=1", "abc"),
        ("name=b", "b"),
        ("state=finished", "abc"),
        ("max_steps=5", ""),  # not set
    ],
)
def test_conditions_compare_numbers_as_numbers(
    sweep: Path, condition: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "".join(names(of(sweep, capsys, "--where", condition, "--sort", "name"))) == expected


def test_the_table(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs.folder), "--sort", "name", "--show", "learning_rate"]) == 0
    head, first, *_, last = capsys.readouterr().out.splitlines()
    assert head.split()[:6] == ["name", "state", "progress", "best", "loss", "learning_rate"]
    assert first.split()[:2] == ["failed", "failed"]
    assert last == "4 runs"
    assert main(["runs", str(runs.folder), "--state", "running"]) == 0
    assert "none of 4 runs fits" in capsys.readouterr().out


def test_an_earlier_run_is_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        train(tmp_path / "run")
    assert names(of(tmp_path, capsys)) == ["run"]
    assert sorted(names(of(tmp_path, capsys, "--all"))) == ["run", "run/earlier_runs/001"]
    (tmp_path / "empty").mkdir()
    assert of(tmp_path / "empty", capsys) == []
    assert main(["runs", "nowhere"]) == 2
    assert capsys.readouterr().err == "trainwright: nowhere: no such folder.\n"


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--sort", "bst"], "Did you mean 'best'?"),
        (["--state", "finished,fail"], "'fail'. Did you mean 'failed'?"),
        (["--where", "best"], "KEY=VALUE"),
        (["--where", "optim.lr"], "quote them: --where 'optim.lr>0.005'"),  # > 0.005 was read by the shell
        (["--where", "learning_rat>1"], "Did you mean 'learning_rate'?"),
        (["--show", "optimzer"], "Did you mean 'optimizer'?"),
    ],
)
def test_wrong_arguments(runs: Runs, arguments: list[str], fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs.folder), *arguments]) == 2
    assert fact in capsys.readouterr().err


@pytest.fixture
def two(finished: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A finished run, and its copy."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in ("config.yaml", "losses.csv", "metrics.json", "run.json"):
            shutil.copy(finished.folder / file, tmp_path / name / file)
    return tmp_path / "a", tmp_path / "b"


def test_equal_runs(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *map(str, two)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "equal by bits in all 60 updates" in lines[0]
    titles = [line.removesuffix(": equal") for line in lines[1:]]
    assert set(titles) - {"Code"} == {"Configuration", "Run", "Data", "Versions", "Machine"}  # perhaps in no repository


def test_what_differs_is_listed(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, b = two
    rows = (b / "losses.csv").read_text().splitlines()
    rows[42] = f"{rows[42].partition(',')[0]},0.125"
    (b / "losses.csv").write_text("\n".join(rows) + "\n")
    settings = (b / "config.yaml").read_text()
    assert "seed: 1234" in settings
    (b / "config.yaml").write_text(settings.replace("seed: 1234", "seed: 4321"))
    record = json.loads((b / "run.json").read_text())
    record["starts"][0]["versions"]["torch"] = "2.12.0"
    (b / "run.json").write_text(json.dumps(record))
    assert main(["diff", *map(str, two)]) == 1
    said = capsys.readouterr().out
    assert "equal by bits until update 41; update 42 is the first that differs" in said
    assert "and 0.125 (1 of 60 differ)" in said
    assert ["train.seed", "1234", "4321"] in [line.split() for line in said.splitlines()]
    assert "2.12.0" in said
    assert "\n\n\n" not in said
    assert main(["diff", *map(str, two), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["losses"]["first"] == 42


def test_a_wrong_path_exits_2(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(two[0]), str(two[0].parent)]) == 2
    assert "has 2 runs (a, b …); pass the folder of one." in capsys.readouterr().err
    assert main(["diff", str(two[0]), str(two[0] / "nowhere")]) == 2
    assert "nowhere: there is no such folder" in capsys.readouterr().err

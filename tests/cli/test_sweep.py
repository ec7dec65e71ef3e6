"""``trainwright train CONFIG key=a,b --sweep``, and ``--trials``: several runs of one configuration."""

import csv
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.fork_server import python
from trainwright import DefaultTrainer
from trainwright.base.errors import ConfigError
from trainwright.cli.main import main
from trainwright.cli.sweep.results import FirstEvaluation, Result, lines_of, write_table
from trainwright.cli.sweep.source import PlannedRun
from trainwright.cli.sweep.values import Range, folder_name, name_of, read_values, short_keys
from trainwright.cli.train import main as main_of_program

CONFIG = """
import torch
from net import Net, collate, samples
from trainwright import LazyCall, get_config
from trainwright.evaluation import RegEvaluator

model = LazyCall(Net)(width=4, dims=[1])
loader = LazyCall(torch.utils.data.DataLoader)(dataset=LazyCall(samples)(), batch_size=16, collate_fn=collate)
dataloader = dict(train=loader, test=[loader])
optim = LazyCall(torch.optim.SGD)(lr=0.1)
train = get_config("common/train.py").train
train.update(output_dir="output", train_micro_batch_size=16, train_epoch=2, log_period=2)
train.evaluation.update(dict(enabled=True, eval_period=4, evaluator=LazyCall(RegEvaluator)()))
train.evaluation.update(dict(eval_metric="loss"))
"""
NET = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width, dims):
        super().__init__()
        if width == 13 and not os.path.exists("mended"):
            raise ValueError("thirteen is no width")
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x, labels):
        scores = self.layers(x)
        return {"loss": nn.functional.mse_loss(scores, labels), "prediction_scores": scores}

def samples():
    x = torch.linspace(-1, 1, 256).reshape(64, 4)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

def collate(pairs):
    return {"x": torch.stack([x for x, _ in pairs]), "labels": torch.stack([y for _, y in pairs])}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def table(folder: Path) -> dict[str, dict[str, str]]:
    with open(folder / "sweep.csv", newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def num_starts(folder: Path) -> int:
    return len(json.loads((folder / "run.json").read_text())["starts"])


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model_final" / "model.safetensors").read_bytes()).hexdigest()


def test_a_run_for_each_combination_and_the_same_command_completes_what_has_failed(
    project: Path, train: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["config.py", "optim.lr=0.1,0.01", "model.width=4,13", "--sweep", "--jobs", "2"]
    done = train(*command, cwd=project, code=1)
    folder = project / "output" / "sweep_lr_width"
    names = {f"lr={lr},width={width}" for lr in (0.1, 0.01) for width in (4, 13)}
    assert {one.name for one in folder.iterdir() if one.is_dir()} == names
    found = table(folder)
    assert [*found][:2] == ["lr=0.1,width=4", "lr=0.01,width=4"]  # the best first
    assert {name: row["state"] for name, row in found.items()} == {
        name: "failed" if "13" in name else "finished" for name in names
    }
    assert "thirteen is no width" in found["lr=0.1,width=13"]["error"]
    assert done.stdout.count("thirteen is no width") == 2  # once for each run: when it fails
    for name in names:  # a new folder has nothing to resume
        assert "holds no checkpoint" not in (folder / name / "console.txt").read_text()
    main(["runs", str(folder), "--json"])
    errors = {run["name"]: run["error"] for run in json.loads(capsys.readouterr().out) if run["state"] == "failed"}
    assert {*errors} == {name for name in names if "13" in name}
    assert all("thirteen is no width" in error for error in errors.values())
    assert "4 runs: 2 finished, 2 failed" in done.stdout
    assert "Best: output/sweep_lr_width/lr=0.1,width=4 (loss " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert (folder / "report.html").stat().st_size > 1e5

    before = weights(folder / "lr=0.1,width=4")
    (project / "mended").touch()
    done = train(*command, cwd=project)
    assert "2 complete" in done.stdout
    assert {row["state"] for row in table(folder).values()} == {"finished"}
    assert [num_starts(folder / name) for name in sorted(names)] == [1] * 4
    assert weights(folder / "lr=0.1,width=4") == before

    # More values are more runs; other settings are an error.
    done = train("config.py", "optim.lr=0.1,0.01", "model.width=4,13,5", "--sweep", "--jobs", "2", cwd=project)
    assert "4 complete" in done.stdout
    assert len(table(folder)) == 6
    done = train(*command, "train.train_epoch=3", cwd=project, code=2)
    assert "train.train_epoch: 2 before, 3 now" in done.stderr


def start(project: Path, environment: dict[str, str], *arguments: str) -> "subprocess.Popen[str]":
    command = [python(), "-m", "trainwright.cli.main", "train", "config.py", *arguments]
    return subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not (file.exists() and file.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.005)


SEARCH = ("optim.lr=log(1e-3,1e-1)", "model.width=int(4,8)", "--trials", "2", "--metric", "eval_loss")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, -signal.SIGINT), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive)],
)
def test_an_interrupted_search_that_continues_is_the_uninterrupted_one(
    project: Path, environment: dict[str, str], train: Callable, number: signal.Signals, code: int
) -> None:
    pytest.importorskip("optuna")
    arguments = [*SEARCH, "train.train_epoch=1000", "train.log_period=20", "train.evaluation.eval_period=1000"]
    folder = project / "output" / "search_lr_width"
    search = start(project, environment, *arguments)
    wait_for(folder / "trial_000" / "metrics.json")
    search.send_signal(number)
    output, _ = search.communicate(timeout=60)
    assert search.returncode == code, output
    assert "Stopped; the same command continues." in output
    assert ("press Ctrl-C again" in output) == (number == signal.SIGINT)
    assert f"{number.name}: saved after iteration" in (folder / "trial_000" / "console.txt").read_text()
    assert table(folder)["trial_000"]["state"] == "interrupted"
    assert not (folder / "trial_001").exists()

    done = train("config.py", *arguments, cwd=project, timeout=280)
    assert ["trial_000  continued" in done.stdout, "trial_001  started" in done.stdout] == [True, True]
    whole = project / "whole" / "search_lr_width"
    train("config.py", *arguments, "train.output_dir=whole", cwd=project, timeout=280)
    assert num_starts(folder / "trial_000") == 2
    assert num_starts(folder / "trial_001") == 1
    keys = ("state", "optim.lr", "model.width", "value")
    rows = [{name: [row[key] for key in keys] for name, row in table(one).items()} for one in (folder, whole)]
    assert rows[0] == rows[1]
    assert len({row["optim.lr"] for row in table(folder).values()}) == 2
    for name in rows[0]:
        assert weights(folder / name) == weights(whole / name)
    assert [float(row["value"]) for row in table(folder).values()] == sorted(
        float(row["value"]) for row in table(folder).values()
    )


def test_a_trial_that_has_failed_is_tried_again_with_its_values(project: Path, train: Callable) -> None:
    optuna = pytest.importorskip("optuna")
    command = ["config.py", "model.width=13,4", "--trials", "2", "--sampler", "random", "--metric", "corr"]
    command += ["train.seed=4"]
    train(*command, cwd=project, code=1)
    folder = project / "output" / "search_width"
    first = table(folder)
    states = {row["model.width"]: row["state"] for row in first.values()}
    assert states["13"] == "failed"
    (project / "mended").touch()
    train(*command, cwd=project)
    second = table(folder)
    assert {row["state"] for row in second.values()} == {"finished"}
    assert {name: row["model.width"] for name, row in second.items()} == {
        name: row["model.width"] for name, row in first.items()
    }
    study = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder}/optuna.db")
    assert study.direction.name == "MAXIMIZE"  # of a correlation
    results = sorted(value for trial in study.trials for value in trial.values or ())
    assert results == sorted(float(row["value"]) for row in second.values())


def test_a_wrong_metric_ends_the_search_with_its_first_run_which_then_counts(project: Path, train: Callable) -> None:
    pytest.importorskip("optuna")
    settings = ["train.train_epoch=1000", "train.log_period=20", "train.evaluation.eval_period=500"]
    command = ["config.py", "optim.lr=uniform(0.01,0.1)", *settings, "--trials", "2", "--metric"]
    done = train(*command, "eval_losss", "--direction", "minimize", cwd=project, code=2, timeout=280)
    assert "has no 'eval_losss'" in done.stderr
    assert "Did you mean 'eval_loss'?" in done.stderr
    folder = project / "output" / "search_lr"
    first = json.loads((folder / "trial_000" / "run.json").read_text())["starts"][0]
    assert first["status"] == "interrupted"  # by the first evaluation, and saved
    assert first["iterations_done"] < 4000
    train(*command, "eval_loss", cwd=project, timeout=280)
    assert [num_starts(folder / f"trial_00{n}") for n in (0, 1)] == [2, 1]


def test_a_run_that_is_killed_is_in_the_table_and_no_secret_is_in_the_record(project: Path, train: Callable) -> None:
    (project / "net.py").write_text(
        NET.replace("import os", "import os, signal").replace("raise ValueError", "os.kill(os.getpid(), 9) or print")
    )
    done = train("config.py", "model.width=13,4", "-m", "+own.api_key=hidden123", cwd=project, code=1)
    assert "width=13  failed: ended by SIGKILL" in done.stdout
    folder = project / "output" / "sweep_width"
    assert table(folder)["width=4"]["state"] == "finished"
    assert not [file for file in folder.rglob("*") if file.is_file() and b"hidden123" in file.read_bytes()]


def test_a_script_with_a_trainer_of_its_own_sweeps_too(project: Path, run_python: Callable) -> None:
    (project / "run.py").write_text(
        "import sys\nfrom trainwright import DefaultTrainer\nfrom trainwright.cli.train import main\n"
        "class Own(DefaultTrainer):\n    def build_hooks(self):\n        print('own')\n"
        "        return super().build_hooks()\nsys.exit(main(trainer_class=Own))\n"
    )
    run_python(
        "run.py",
        "--config-file",
        "config.py",
        "model.dims=[1,2],[3,4]",
        "--sweep",
        cwd=project,
        fresh=True,
        timeout=240,
    )
    folder = project / "output" / "sweep_dims"
    for name in ("dims=[1,2]", "dims=[3,4]"):
        assert "own" in (folder / name / "console.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ("optim.lr=1,2", ["'optim.lr=1,2'", "--sweep", "optim.lr=[1,2]", "optim.lr='1,2'"]),
        ("optim.lr=log(1e-3,1)", ["--trials N", "--metric"]),
        ("optim.lr=log(1e-3,1) --sweep", ["optim.lr=log(0.001,1)", "--trials N --metric NAME"]),
        ("optim.lr=0.1 --sweep", ["no setting has several values. Write"]),
        ("optim.lr='1,2' --sweep", ["optim.lr='1,2' is one value: leave out the quotes"]),
        ("optim.lr=[1,2] --sweep", ["optim.lr=[1,2] is one value: leave out the quotes or brackets"]),
        ("optim.lr=1,2 optim.lr=3 --sweep", ["'optim.lr=1,2' and 'optim.lr=3'", "one only"]),
        ("optim.lr=log(0,1) --trials 2 --metric loss", ["begins above 0"]),
        ("model.width=int(1,2.5) --trials 2 --metric loss", ["whole numbers"]),
        ("optim.lr=uniform(1,1) --trials 2 --metric loss", ["begins below its end"]),
        ("optim.lr=uniform(a,1) --trials 2 --metric loss", ["two numbers"]),
        ("optim.lr=uniform(0,1) --trials 2", ["--metric NAME"]),
        ("optim.lr=uniform(0,1) --trials 2 --metric own", ["'own'", "--direction minimize or"]),
        ("optim.lr=1,2 --sweep --metric cor", ["'cor'", "Did you mean 'corr'?", "add --direction"]),
        ("optim.lr=1,2 --sweep --metric pearsonn --direction maximize", ["Did you mean 'pearson'?"]),
        ("optim.lr=1,2 train.evaluation.enabled=False --sweep --metric corr", ["no evaluation is", "add --direction"]),
        (
            "optim.lr=1,2 train.evaluation.enabled=False --sweep --metric eval_loss",
            ["results are total_loss, grad_norm"],
        ),
        (
            "optim.lr=1,2 dataloader.test=[] --sweep --metric grad_normm --direction minimize",
            ["Did you mean 'grad_norm'?", "set dataloader.test and"],
        ),
        (
            "optim.lr=1,2 dataloader.test=[] train.overfit_batches=1 --sweep --metric cor",
            ["which the evaluation does not compute", "Did you mean 'corr'?"],
        ),
        ("optim.lr=uniform(-1,1) --trials 2 --metric loss", ["optim.lr", "-1.0"]),
        ("optim.lr=glob(*) --sweep", ["optim.lr=glob(*)", "separated by commas"]),
        ("optim.lr=1,2 --jobs 2", ["--jobs", "Add --sweep"]),
        ("model.name=1,'1' --sweep", ["1 and '1' would have one folder", "Give one of them"]),
        ("optim.lr=1,2 --sweep --sampler random", ["--sampler", "Add --trials N"]),
        ("optim.lr=1,2 --sweep --direction minimize", ["--direction", "needs --metric NAME"]),
        ("optim.lr=1,2 --sweep --jobs 0", ["got '0'; it must be a whole number >= 1"]),
        ("optim.lr=1,2 --sweep --eval-only", ["--eval-only"]),
        ("optim.lr=1,2 --sweep --fast-dev-run", ["--fast-dev-run"]),
        ("optim.lrr=1,2 --sweep", ["optim.lrr", "Did you mean 'lr'?"]),
        ("model.widht=1,2 --sweep", ["model.widht", "Did you mean 'width'?"]),
        ("optm.lr=1,2 --sweep", ["optm", "Did you mean 'optim"]),
        ("train.log_period=2,x --sweep", ["train.log_period", "'x'"]),
        ("train.output_dir=a,b --sweep", ["train.output_dir", "a folder of its own"]),
    ],
)
def test_what_cannot_be_a_sweep_is_refused_before_the_first_run(
    arguments: str,
    facts: list[str],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "net", raising=False)
    try:
        code = main(["train", "config.py", *arguments.split()])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2, said
    assert [fact for fact in facts if fact not in said.err] == []
    assert "Traceback" not in said.err
    assert not (project / "output").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"format": 2, "settings": "of another form"}', "format 2; this version of trainwright reads 1. A newer"),
        ('{"settings": {"tra', "it is damaged"),
        ("[1]", "it is damaged"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(
    content: str, said: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project / "output" / "sweep_lr"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(content)
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "net", raising=False)
    assert main(["train", "config.py", "optim.lr=1,2", "--sweep"]) == 2
    assert f"sweep.json: {said}" in capsys.readouterr().err
    assert [one.name for one in folder.iterdir()] == ["sweep.json"]


def test_a_metric_of_the_users_own_may_come_after_the_first_evaluation(tmp_path: Path) -> None:
    rows = [{"iteration": 1, "total_loss": 2.0, "accuracy": 0.5, "eval_loss": 1.0}]
    (tmp_path / "metrics.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for metric, is_own, is_refused in [
        ("accuracy", False, False), ("acuracy", False, True), ("acuracy", True, True),
        ("final_score", True, False), ("final_score", False, True), (None, False, False),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=f"has no '{metric}'") if is_refused else nullcontext():
            FirstEvaluation(metric, is_own=is_own).look([tmp_path, tmp_path / "new"])


def test_a_sweep_of_a_program_that_passes_its_arguments_on_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs would be those of another trainer."""
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit):
        main_of_program(["config.py", "optim.lr=1,2", "--sweep"], trainer_class=DefaultTrainer)
    assert "without argv" in capsys.readouterr().err


@pytest.mark.parametrize(
    "method", ["build_test_loader", "test", "build_hooks", "train_step", "run_step", "build_model"]
)
def test_methods_of_the_users_own_may_give_other_results(
    method: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = type("Own", (DefaultTrainer,), {method: getattr(DefaultTrainer, method)})
    command = [
        "run.py",
        "--config-file",
        "config.py",
        "optim.lr=1,2",
        "dataloader.test=[]",
        "--sweep",
        "--metric",
        "own",
    ]
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "net", raising=False)
    assert main_of_program(trainer_class=own) == 2
    refused = "and no evaluation is configured" in (error := capsys.readouterr().err)
    assert refused == (method == "build_model")
    assert refused or "it is unknown whether higher is better" in error


def test_without_optuna_a_search_names_the_command_that_installs_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "net", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["train", "config.py", *SEARCH]) == 2
    assert "pip install optuna" in capsys.readouterr().err


def test_commas_divide_values_outside_of_brackets_and_quotes_only() -> None:
    texts = ["a=1,2", "b=[1,2],[3,4]", "c='x,y'", "d='x,y',z", "+e=choice(p,q)", "f=range(1,4)", "g=[1,2]", "~h"]
    found = read_values([*texts, "i={j:1},{j:2}"])
    assert found.fixed == ("c='x,y'", "g=[1,2]", "~h")
    assert {key: [*texts] for key, texts in found.choices.items()} == {
        "a": ["1", "2"],
        "b": ["[1,2]", "[3,4]"],
        "d": ["'x,y'", "z"],
        "+e": ["p", "q"],
        "f": ["1", "2", "3"],
        "i": ["{j:1}", "{j:2}"],
    }
    assert len([*found.grid()]) == 2 * 2 * 2 * 2 * 3 * 2
    texts = ["a=log(1e-4, 1)", "b=int(2,4)", "c=logint(1,9)", "d=interval(0,2)", "e=tag(log,interval(1,2))"]
    found = read_values(texts)
    assert found.ranges == {
        "a": Range(1e-4, 1, is_log=True),
        "b": Range(2, 4, is_int=True),
        "c": Range(1, 9, is_log=True, is_int=True),
        "d": Range(0, 2),
        "e": Range(1, 2, is_log=True),
    }
    with pytest.raises(ConfigError, match="cannot be read"):
        read_values(["a=1,"])


def test_the_folder_of_a_sweep_of_many_settings_has_a_name_that_a_filesystem_takes() -> None:
    names = [folder_name("_".join(keys), keys) for keys in (["lr", "seed"], ["width"] * 60, ["width"] * 61)]
    assert names[0] == "lr_seed"
    assert len({*names}) == 3
    assert max(map(len, names)) <= 100


def test_names_of_folders_are_readable_and_differ() -> None:
    assert name_of({"optim.lr": "0.1", "model.dims": "[1,2]", "c": "'word'"}) == "lr=0.1,dims=[1,2],c=word"
    assert name_of({"c": "'two words'"}).startswith("c=two_words-")
    texts = ("a/b", "a_b", "'a b'", "../../a", "x" * 300, "数" * 90, "数" * 90 + "a")
    paths = [name_of({"data": text}) for text in texts]
    assert len({*paths}) == len(texts)
    assert all("/" not in path and len(path.encode()) <= 100 for path in paths)
    assert short_keys(["optim.lr", "train.lr", "a.0", "a.1"]) == {
        "optim.lr": "optim.lr", "train.lr": "train.lr", "a.0": "a.0", "a.1": "a.1"
    }  # fmt: skip


def test_a_long_error_is_cut_in_a_pipe_and_complete_in_the_file(tmp_path: Path) -> None:
    run = PlannedRun("lr=1", {"optim.lr": "1"})
    results = [Result(run, "failed", error="x" * 600 + "\nmore")]
    head, row = lines_of(results, ["optim.lr"])
    assert row.endswith("x…")
    assert len(row) == head.index("error") + 80
    write_table(results, ["optim.lr"], tmp_path)
    (file,) = tmp_path.iterdir()
    with file.open() as table:
        assert next(csv.DictReader(table))["error"] == "x" * 600 + "\nmore"

"""What a user can get wrong: one message with the facts in it, exit code 2, and nothing written over."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainwright.cli.main import main

CONFIG = "configs/config.py"
MODEL = "modeling/model.py"
DATASET = "dataset/dataset.py"


@dataclass(frozen=True)
class Fault:
    """A change of one file of the project, or arguments, and what the message must say."""

    facts: list[str]
    arguments: list[str] = field(default_factory=list)
    file: str = CONFIG
    old: str = ""
    new: str = ""


def in_file(file: str, old: str, new: str, *facts: str) -> Fault:
    return Fault(list(facts), file=file, old=old, new=new)


def on_command_line(argument: str, *facts: str) -> Fault:
    return Fault(list(facts), arguments=argument.split())


FAULTS = {
    "a misspelt key in the file": in_file(
        CONFIG, "log_period=20", "log_perid=20", "train.log_perid", "config.py", "Did you mean 'log_period'?"
    ),
    "a value after a space": on_command_line("optim.lr 0.1", "override 'optim.lr': has no value", "optim.lr=0.1"),
    "no data": on_command_line("dataloader.train.dataset.0.path=/nowhere/data", "/nowhere/data"),
    "a batch larger than the data": on_command_line(
        "train.train_micro_batch_size=2000", "train.global_batch_size", "2000", "1437"
    ),
    "an empty data set": in_file(
        DATASET, "return len(self.data)", "return 0", "dataloader.train", "MnistDataSet", "empty"
    ),
    "fields that the model does not take": in_file(
        DATASET, "inputs=DistTensorData", "images=DistTensorData", "NeuralNetwork.forward", "images", "inputs, labels"
    ),
    "a model without a loss": in_file(
        MODEL, '{"losses": losses}', '{"cost": losses}', "'cost'", "must contain 'loss'", "forward"
    ),
    "a model that returns a tensor": in_file(MODEL, '{"losses": losses}', "logits", "Tensor", "dict"),
    "a config that raises": in_file(
        CONFIG, "optim.lr = 1e-3", "optim.lr = 1 / 0", "config.py, line 42", "ZeroDivisionError: division by zero"
    ),
    "weights that are not there": on_command_line("train.load_weight=/nowhere/model", "/nowhere/model"),
}


@pytest.fixture
def project(mnist_project: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "mnist"
    shutil.copytree(mnist_project, copy, symlinks=True)
    return copy


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.exhaustive(every=4)
def test_a_fault_is_one_message_and_leaves_the_earlier_run_alone(
    name: str, project: Path, train: Callable, finished, contents: Callable, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    if fault.old:
        file = project / fault.file
        text = file.read_text()
        assert fault.old in text
        file.write_text(text.replace(fault.old, fault.new))
    folder = tmp_path / "output"
    shutil.copytree(finished.folder, folder, symlinks=True)
    before = contents(folder)

    done = train(project / CONFIG, f"train.output_dir={folder}", *fault.arguments, cwd=tmp_path, code=2)

    for fact in fault.facts:
        assert fact in done.stderr, done.stderr
    assert done.stderr.startswith("trainwright: ")
    assert "Traceback" not in done.stderr + done.stdout
    assert contents(folder) == before


def test_several_faults_are_reported_together(mnist_project: Path, train: Callable, tmp_path: Path) -> None:
    faults = ["train.log_perid=5", "train.seed=-1", "train.dist.tensor_parallel_size=0", "optim.lrr=1"]
    done = train(mnist_project / CONFIG, *faults, cwd=tmp_path, code=2)
    for fact in ("4 faults", "train.log_perid", "train.seed", "train.dist.tensor_parallel_size", "optim.lrr"):
        assert fact in done.stderr
    assert not (tmp_path / "output").exists()


def test_a_failure_in_the_middle_exits_1_and_keeps_the_checkpoints(
    project: Path, train: Callable, short, tmp_path: Path
) -> None:
    model = project / MODEL
    raising = "if self.training and (step := getattr(self, 'step', 0)) == 40:\n            1 / 0\n        self.step"
    text = model.read_text().replace(
        "        inputs = self.flatten(inputs)\n",
        f"        {raising} = getattr(self, 'step', 0) + self.training\n        inputs = self.flatten(inputs)\n",
    )
    model.write_text(text)
    done = train(project / CONFIG, *short, "train.output_dir=output", cwd=tmp_path, code=1)
    assert "ZeroDivisionError" in done.stderr
    folder = tmp_path / "output"
    assert (folder / "last_checkpoint").read_text().strip() == "model_0000029"
    assert not (folder / "model_final").exists()
    assert "iteration 41" in (folder / "log.txt").read_text()


def test_the_reason_for_refused_targets_of_data_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_parts_of_data.py").write_text("raise SystemExit('imported')")
    calls = {name: f"{{_target_: own_parts_of_data.{name}}}" for name in ("Net", "Loader")}
    Path("data.yaml").write_text(f"model: {calls['Net']}\ndataloader: {{train: {calls['Loader']}}}\n")
    assert main(["train", "data.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.count("--trust-folder") for line in lines if "is refused" in line] == [1, 0]
    assert lines[-1].endswith("target 'own_parts_of_data.Loader' is refused, as above.")

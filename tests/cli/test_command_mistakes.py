"""Mistakes on a command line are answered with the line to write, before anything is done."""

import shlex
from pathlib import Path

import pytest

from trainwright.cli.main import main
from trainwright.config.lazy.overrides import parse_override


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config file, and a run with a checkpoint."""
    (tmp_path / "config.py").write_text("train = dict()\n")
    checkpoint = tmp_path / "run" / "model_best"
    checkpoint.mkdir(parents=True)
    for path in ("run/config.yaml", "run/metrics.json", "run/model_best/model.safetensors"):
        (tmp_path / path).write_text("")
    (checkpoint / "manifest.json").write_text("{}")
    (tmp_path / "run" / "run.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("command", "facts"),
    [
        ("train --output_dir out --num_epochs 3 config.py", ["train.output_dir=out", "train.train_epoch=3"]),
        ("train config.py --batch_size=8 --fp16", ["train.train_micro_batch_size=8", "train.amp.enabled=True"]),
        ("train --config-name config", ["trainwright train config.py"]),
        ("train config.py --cfg-options optim.lr=0.1", ["Overrides have no option"]),
        ("train config.py -n 2", ["trainwright launch -n 2 train"]),
        ("train config.py --resume=run", ["--resume takes no value", "train.output_dir=run"]),
        ("train .", ["Did you mean 'config.py'?"]),
        ("train run/model_best", ["Did you mean 'run/config.yaml'?"]),
        ("train run/model_best/model.safetensors", ["trainwright eval run/model_best"]),
        ("eval run --output a.csv", ["--predictions FILE.csv"]),
        ("eval run --batch_size 8", ["train.test_micro_batch_size=N"]),
        ("eval config.py --weights run/model_best", ["--checkpoint NAME"]),
        ("eval run train.output_dir=.", ["the run is run", "trainwright eval ."]),
        ("eval run train.output_dir=other", ["the run is run. Leave it out."]),
        ("eval run --trainer train.py", ["is for runs of the Python API"]),
        ("eval config.py run", ["trainwright eval run"]),
        ("predict run --predictions a.csv", ["'--output'"]),
        ("checkpoint export run --format onnx", ["trainer.export('model.onnx')"]),
        ("checkpoint export run model.pt", ["--output model.pt"]),
        ("report run -o curves.png", ["HTML", "--png"]),
        ("report run --format png", ["'--png'"]),
        ("report run/metrics.json", ["pass the folder of a run: run"]),
        ("report run/model_best", ["Did you mean 'run'?"]),
        ("diff run/model_best run", ["Did you mean 'run'?"]),
        ("replay run/model_best --step 1", ["the output folder of a run: run"]),
        ("runs config.py", ["is a file"]),
        ("runs rum", ["Did you mean 'run'?"]),
        ("find lr config.py --min 1", ["'--lowest'"]),
        ("find lr config.py -o curve.png", ["'--plot'"]),
        ("find lr config.py -o optim.lr=0.1", ["Overrides have no option"]),
        ("estimate config.py -o memory.json", ["Allowed: --", "--json"]),
        ("estimate config.py --gpus 8", ["'--world'"]),
        ("estimate cofig.py", ["Did you mean 'config.py'?"]),
        ("launch -n 2 run.yaml", ["train run.yaml"]),
        ("--config-file config.py", ["trainwright train config.py"]),
        (
            "train config.py --resume run/model_best",
            ["newest checkpoint of train.output_dir=run.", "eval run/model_best"],
        ),
        ("train config.py --resume run/model_9", ["train.output_dir=run is the folder of the run"]),
        ("train config.py --resume=run/model_best", ["The run is train.output_dir=run"]),
    ],
)
def test_a_wrong_command_line_is_answered_with_the_right_one(
    command: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(command.split())
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    shown = capsys.readouterr().err
    assert code == 2
    assert [fact for fact in facts if fact not in shown] == [], shown


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("optim.betas=(0.9,0.95)", "'optim.betas=[0.9,0.95]'"),
        ("train=dict(train_iter=5,seed=1)", "'train={train_iter: 5,seed: 1}'"),
        ("train.train_iter=5,", "train.train_iter=5"),
        ("train.output_dir=~/run", "\"train.output_dir='~/run'\""),
    ],
)
def test_a_value_in_another_notation_is_written_as_overrides_have_it(text: str, line: str) -> None:
    with pytest.raises(ValueError, match="cannot be read") as error:
        parse_override(text)
    assert str(error.value).endswith(f"Write {line}")
    parse_override(shlex.split(line)[0])


def test_all_keys_that_nothing_reads_are_named_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(folder / "config.py"), "epochs=3", "batch=16", "TRAIN.SEED=1"]) == 2
    shown = capsys.readouterr().err
    assert all(key in shown for key in ("'train.train_epoch'", "'train.train_micro_batch_size'", "'train.seed'"))


@pytest.mark.parametrize(("name", "text"), [("points.csv", "x,y\n1,2\n"), ("rows.jsonl", '{"x": 1}\n')])
def test_predictions_do_not_replace_another_file(
    name: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_text(text)
    assert main(["eval", "run", "--predictions", name]) == 2
    assert f"{name} exists, and has no predictions of this command" in capsys.readouterr().err
    assert (folder / name).read_text() == text


def test_predictions_replace_those_of_an_earlier_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "evaluated_twice"]) == 0
    monkeypatch.chdir("evaluated_twice")
    assert main(["train", "config.py", "train.train_epoch=1", "train.output_dir=run"]) == 0
    for name in ("p.csv", "p.jsonl", "p.parquet"):
        for _ in range(2):
            assert main(["eval", "run", "--predictions", name, "train.output_dir='run'"]) == 0
        assert Path(name).stat().st_size > 1000
    twice = "\ndataloader['test'] = {'a': dataloader['test'][0], 'b': dataloader['test'][0]}"
    Path("two.py").write_text(Path("config.py").read_text() + twice)
    assert main(["train", "two.py", "train.train_epoch=1", "train.output_dir=two"]) == 0
    for _ in range(2):
        assert main(["eval", "two", "--predictions", "two.csv"]) == 0


FAILS = """
from tests.toys import Classifier, file_config, points
from trainwright import LazyCall
from trainwright.hooks import Callback

class Reads(Callback):
    def on_train_batch_end(self, batch, logs):
        if logs["global_step"] == 1:
            logs["valeu"]

cfg = file_config("out", Classifier, points, train_iter=3, train_micro_batch_size=8)
model, dataloader, train = cfg.model, cfg.dataloader, cfg.train
train.callbacks = [LazyCall(Reads)()]
"""


def test_an_error_of_the_library_in_a_callback_names_its_line_and_fails_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text(FAILS)
    assert main(["train", "fails.py"]) == 1
    said = capsys.readouterr().err
    assert "logs has no 'valeu'" in said
    assert "The error came from fails.py:9 in on_train_batch_end; --traceback shows all calls." in said


FLOAT = FAILS.replace("(Callback)", "(DatasetEvaluator)").replace(
    "hooks import Callback", "evaluation import DatasetEvaluator"
)
FLOAT = (
    FLOAT[: FLOAT.index("    def on_train")]
    + """
    def reset(self): ...
    def process(self, inputs, outputs): ...
    def evaluate(self):
        return 0.5

cfg = file_config("float", Classifier, points, points, train_iter=3, train_micro_batch_size=8)
cfg.train.evaluation.evaluator = LazyCall(Reads)()
model, dataloader, train = cfg.model, cfg.dataloader, cfg.train
"""
)


def test_an_error_of_the_final_evaluation_fails_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("float.py").write_text(FLOAT)
    assert main(["train", "float.py"]) == 1
    assert "Reads returned float as its metrics; it must return a dict" in capsys.readouterr().err

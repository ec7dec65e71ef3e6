"""``trainwright train`` on the example project, as a user runs it."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.fork_server import python

REPOSITORY = Path(__file__).parents[2]
TIMINGS = {"time", "data_time"}  # seconds: the only figures that differ between two equal runs


def without_timings(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in rows]


def accuracy_printed(output: str) -> float:
    return float(re.findall(r"(?:Evaluation|Epoch).* Acc@1 ([\d.]+)", output)[-1])


# What a run leaves.


def test_a_run_leaves_its_files(finished) -> None:
    names = {path.name for path in finished.folder.iterdir() if not path.name.startswith(".")}
    events = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    # Of 14, 29, 44 and 59 the newest three stay.
    assert names - events - {"curves.png"} == {  # a picture on a machine so busy that the training is a long one
        "config.yaml",
        "log.txt",
        "losses.csv",
        "metrics.json",
        "run.json",
        "last_checkpoint",
        "model_0000029",
        "model_0000044",
        "model_0000059",
        "model_best",
        "model_final",
    }
    assert (finished.folder / "last_checkpoint").read_text().strip() == "model_final"
    assert "Traceback" not in finished.done.stdout + finished.done.stderr


def test_metrics_json_holds_each_iteration_once_and_ends_with_the_final_evaluation(finished, read_rows) -> None:
    rows = read_rows(finished.folder)
    lines = (finished.folder / "metrics.json").read_text().splitlines()
    assert [json.dumps(row, sort_keys=True) for row in rows] == lines
    assert [row["iteration"] for row in rows] == [9, 19, 29, 39, 49, 59, 60]
    assert [row["iteration"] for row in rows if "Acc@1" in row] == [19, 39, 60]
    assert rows[-1].keys() == {"Acc@1", "iteration"}
    assert rows[-2]["total_loss"] < rows[0]["total_loss"] / 2
    assert {"lr", "data_time", "time", "total_loss"} <= rows[1].keys()


def test_log_txt_holds_what_the_console_showed(finished) -> None:
    messages = [re.sub(r"^[\d:]* +", "", line) for line in finished.done.stdout.splitlines()]
    logged = (finished.folder / "log.txt").read_text()
    assert len(messages) > 10
    for message in messages:
        assert message in logged


def test_in_a_pipe_lines_are_plain(finished) -> None:
    assert "\r" not in finished.done.stdout + finished.done.stderr
    assert "\x1b" not in finished.done.stdout + finished.done.stderr
    assert re.search(r"iteration 20/60 .*total_loss [\d.]+ .*lr [\d.]+e-\d+ .*samples/s", finished.done.stdout)
    # A command has its folder, and a busy machine gets advice.
    shown = [line for line in finished.done.stdout.splitlines() if "Advice: " not in line]
    assert max(len(line) for line in shown if str(finished.folder) not in line) <= 120


@pytest.mark.parametrize("streams", ["| head -1", "<&- >&- 2>&-"])
@pytest.mark.exhaustive(every=4)
def test_where_nothing_reads_its_lines_a_run_is_as_ever(
    finished, environment, short, sha, read_rows, tmp_path: Path, streams: str
) -> None:
    words = [python(), "-m", "trainwright.cli.main", "train", finished.config, *short, "train.output_dir=output"]
    command = f"set -o pipefail; {shlex.join(map(str, words))} {streams}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert without_timings(read_rows(tmp_path / "output")) == without_timings(read_rows(finished.folder))
    assert sha(tmp_path / "output" / "model_final") == sha(finished.folder / "model_final")


# Doing it again.


def test_config_yaml_makes_the_same_run_bit_for_bit(finished, train, sha, read_rows, tmp_path: Path) -> None:
    project = finished.config.parents[1]  # its modules are found from here
    train(finished.folder / "config.yaml", f"train.output_dir={tmp_path}/again", cwd=project)
    assert sha(tmp_path / "again" / "model_final") == sha(finished.folder / "model_final")
    assert without_timings(read_rows(tmp_path / "again")) == without_timings(read_rows(finished.folder))


@pytest.mark.exhaustive
def test_tools_train_net_is_the_same_program(finished, run_python, short, sha, tmp_path: Path) -> None:
    script = REPOSITORY / "tools" / "train_net.py"
    run_python(script, "--config-file", finished.config, *short, "train.output_dir=output", cwd=tmp_path, fresh=True)
    assert sha(tmp_path / "output" / "model_final") == sha(finished.folder / "model_final")


# Evaluating only, and a quick look.


def test_eval_only_gives_the_accuracy_of_the_checkpoint_and_leaves_the_runs_folder_alone(
    finished, train, read_rows, contents, tmp_path: Path
) -> None:
    before = contents(finished.folder)
    arguments = [f"train.load_weight={finished.folder}/model_final", f"train.output_dir={finished.folder}"]
    done = train("--eval-only", finished.config, *arguments, cwd=tmp_path)
    assert accuracy_printed(done.stdout) == pytest.approx(read_rows(finished.folder)[-1]["Acc@1"], abs=1e-4)
    assert contents(finished.folder) == before


def test_eval_only_without_weights_is_an_error(finished, train, tmp_path: Path) -> None:
    done = train(finished.config, "--eval-only", "train.output_dir=output", cwd=tmp_path, code=2)
    assert "train.load_weight" in done.stderr
    assert "output/model_best" in done.stderr
    assert "Traceback" not in done.stderr


def test_fast_dev_run_goes_through_everything_beside_the_real_run(
    finished, train, contents, read_rows, tmp_path: Path
) -> None:
    folder = tmp_path / "output"
    shutil.copytree(finished.folder, folder, symlinks=True)
    train(finished.config, "--fast-dev-run", f"train.output_dir={folder}", cwd=tmp_path)
    rows = read_rows(folder / "fast_dev_run")
    assert [row["iteration"] for row in rows] == list(range(21))
    assert [row["iteration"] for row in rows if "Acc@1" in row] == [9, 20]
    assert (folder / "fast_dev_run" / "model_final").is_dir()
    shutil.rmtree(folder / "fast_dev_run")
    assert contents(folder) == contents(finished.folder)


# Overrides.


def test_overrides_of_every_kind_reach_the_run(mnist_project: Path, train, tmp_path: Path) -> None:
    train(
        "train.train_epoch=0",
        "--traceback",
        mnist_project / "configs" / "config.py",
        "train.train_iter=3",
        "optim.lr=5e-3",
        "optim.betas=[0.8,0.95]",
        "train.amp={enabled: false}",
        "train.checkpointer.max_to_keep=null",
        "~train.scheduler.alpha",
        "--resume",
        "train.output_dir='out put'",
        "dataloader.test.0.num_workers=1",
        "+note='a: b, c'",
        cwd=tmp_path,
    )
    saved = yaml.safe_load((tmp_path / "out put" / "config.yaml").read_text())
    assert saved["optim"]["lr"] == 5e-3
    assert saved["optim"]["betas"] == [0.8, 0.95]
    assert saved["train"]["amp"]["enabled"] is False
    assert saved["train"]["checkpointer"]["max_to_keep"] is None
    assert saved["train"]["checkpointer"]["period"] == 500
    assert saved["dataloader"]["test"][0]["num_workers"] == 1
    assert saved["note"] == "a: b, c"
    assert "resume" not in saved["train"]
    rows = (tmp_path / "out put" / "metrics.json").read_text()
    assert '"iteration": 3' in rows


@pytest.mark.exhaustive
def test_a_folder_with_an_odd_name_and_a_deleted_working_folder(
    finished, environment, short, sha, read_rows, tmp_path: Path
) -> None:
    folder = tmp_path / "a${x}"
    # Deleted after the imports: torch itself asks for it in some of them.
    program = (
        "import os, sys, torch._dynamo, trainwright.engine; from trainwright.cli.train import main;"
        " torch.ones(2, 2) @ torch.ones(2, 2); os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone');"
        " sys.exit(main(sys.argv[1:]))"
    )
    place = "train.output_dir=" + str(folder).replace("${", r"\${")
    for more in ("train.train_iter=30", "--resume"):
        words = [python(), "-c", program, finished.config, *short, place, more]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert (done.returncode, done.stderr.decode()) == (0, "")
    assert b"/model_final." in done.stdout  # the newest, which can be read
    assert read_rows(folder)[-1]["iteration"] == 60
    saved = yaml.safe_load((folder / "config.yaml").read_text())["train"]["output_dir"]
    assert saved == str(folder).replace("${", r"\${")

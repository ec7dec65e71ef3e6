"""Processes under ``trainwright launch``: arguments, exit codes, and a command in several processes."""

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from trainwright.cli.main import main

SCRIPT = """
import os, sys
from trainwright.parallel import get_rank, get_world_size, setup_dist_util
from trainwright.base.dist import synchronize

setup_dist_util({"device_type": "cpu"})
how, *arguments = sys.argv[1:]
print(f"rank {get_rank()} of {get_world_size()}: {arguments}", flush=True)
synchronize()
if get_rank() == 1 and how == "kill":
    os.kill(os.getpid(), 9)
if how == "refuse":
    from trainwright.base.errors import ConfigError

    raise ConfigError("all processes refuse")
if get_rank() == 1 and how == "stop":
    sys.exit(128 + 15)
if get_rank() == 1 and how == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(1)
"""

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(run_python: Callable, tmp_path: Path) -> Launch:
    (tmp_path / "script.py").write_text(SCRIPT)
    return lambda *arguments, **how: run_python("-m", "trainwright", "launch", *arguments, cwd=tmp_path, **how)


def test_a_script_runs_in_several_processes_and_again_after_a_failure(launch: Launch) -> None:
    done = launch("-n", 2, "--max-restarts", 1, "script.py", "once", "--to", "-n=7")
    for rank in (0, 1):
        assert done.stdout.count(f"rank {rank} of 2: ['--to', '-n=7']") == 2


def test_a_killed_process_is_named(launch: Launch) -> None:
    done = launch("-n", 2, "script.py", "kill", code=128 + 9)
    last = done.stderr.splitlines()[-1]
    assert all(fact in last for fact in ("rank 1", "SIGKILL", "out of memory")), done.stderr
    assert "ChildFailedError" not in done.stderr


def test_an_error_of_all_processes_is_named_and_is_no_stop(launch: Launch) -> None:
    done = launch("-n", 2, "script.py", "refuse", code=1)
    assert "failed with ConfigError, exit code 1" in done.stderr.splitlines()[-1], done.stderr


@pytest.fixture
def fresh_ranks(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts interpreters that have imported nothing."""
    monkeypatch.setitem(environment, "PYTHON_EXEC", sys.executable)


def test_an_error_before_the_processes_meet_is_named(launch: Launch, fresh_ranks: None, tmp_path: Path) -> None:
    before = 'import os, time\nimport trainwright\nif os.environ["RANK"] == "0": time.sleep(60)\nimport nothing_there\n'
    (tmp_path / "script.py").write_text(before)
    done = launch("-n", 2, "script.py", code=1)
    assert re.search("rank 1 .*failed with ModuleNotFoundError, exit code 1", done.stderr.splitlines()[-1]), done.stderr


def test_a_wrong_config_of_all_processes_is_one_traceback(launch: Launch, fresh_ranks: None, tmp_path: Path) -> None:
    wrong = (
        "import time\nfrom trainwright import TrainingConfig\ntry: TrainingConfig(batch_sise=3)\nfinally: time.sleep(2)"
    )
    (tmp_path / "script.py").write_text(wrong)
    done = launch("-n", 2, "script.py", code=1)
    assert done.stderr.count("Did you mean 'batch_size'?") == 1, done.stderr


@pytest.fixture
def temporary(tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files of the processes."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setitem(environment, "TMPDIR", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.mark.exhaustive
def test_a_stopped_process_is_named_and_no_folder_stays(launch: Launch, temporary: Path) -> None:
    done = launch("-n", 2, "script.py", "stop", code=128 + 15, fresh=True)  # a fork would know another folder
    last = done.stderr.splitlines()[-1]
    assert re.search(r"rank 1 .*was stopped by SIGTERM and has ended with exit code 143\.", last), done.stderr
    assert [*temporary.iterdir()] == []


@pytest.mark.exhaustive
def test_log_files_stay_in_a_folder_that_is_named(launch: Launch, temporary: Path) -> None:
    done = launch("-n", 1, "--redirects", "3", "script.py", "run", fresh=True)  # a fork would know another folder
    (folder,) = temporary.iterdir()
    assert f"the log files are in {folder}" in done.stderr
    (log,) = folder.rglob("stdout.log")
    assert "rank 0 of 1" in log.read_text()


@pytest.mark.exhaustive
def test_the_exit_code_is_that_of_the_process_that_failed(launch: Launch, config: Path) -> None:
    done = launch("-n", 2, "train", config, "train.precison=1", code=2)
    assert "exit code 2; the messages of the job are above" in done.stderr


@pytest.mark.exhaustive
def test_a_training_that_may_restart_resumes(launch: Launch, config: Path, tmp_path: Path) -> None:
    arguments = (
        "train.train_epoch=0",
        "train.train_iter=4",
        "train.output_dir=output",
        "dataloader.train.num_workers=0",
    )
    done = launch("-n", 2, "--max-restarts", 1, "train", config, *arguments)
    assert "adds --resume" in done.stderr
    assert (tmp_path / "output" / "model_final").is_dir()


@pytest.mark.exhaustive
def test_a_lost_connection_is_tried_again(launch: Launch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        conf = "is_host=0,read_timeout=1"  # of another host, which does not listen
        arguments = ("-n", 1, "--nnodes", 2, "--rdzv-endpoint", endpoint, "--rdzv-conf", conf)
        done = launch(*arguments, "--rejoin", 1, "script.py", "run", code=75)
    assert done.stderr.count("trainwright launch: no connection to the other hosts: ") == 2
    assert done.stderr.count("joins the other hosts again in 5 s") == 1


def test_more_processes_than_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert main(["launch", "-n", "4", "train", "config.py"]) == 2
    message = capsys.readouterr().err
    assert "--nproc-per-node: got 4, but this machine has 2 GPUs" in message
    assert "CUDA_VISIBLE_DEVICES=" in message


def test_torchrun_knows_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are passed on, which the help lists before `-m`."""
    from torch.distributed.run import get_args_parser

    with pytest.raises(SystemExit, match="0"):
        main(["launch", "--help"])
    listed = re.findall(r"^  (--[a-z-]+)[ ,]", capsys.readouterr().out.partition("--module")[0], re.MULTILINE)
    ours = {"--rejoin", "--resume"}
    if TorchVersion(torch.__version__) < "2.12":
        ours.add("--shutdown-timeout")
    assert {"--nnodes", "--rdzv-endpoint", "--tee"} <= {*listed}
    assert {*listed} - ours <= {*get_args_parser()._option_string_actions}


def test_a_refusal_of_all_processes_is_one_message_with_its_exit_code(launch: Launch, config: Path) -> None:
    sizes = ("train.train_micro_batch_size=8", "train.global_batch_size=8", "train.num_accumulation_steps=null")
    done = launch("-n", 2, "train", config, *sizes, code=2)
    assert done.stderr.count("train.global_batch_size: 8 must be divisible by") == 1
    assert "The smallest that fits is 16." in done.stderr
    assert "see its traceback" not in done.stderr


def test_a_script_may_continue_and_python_is_left_out(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text('import os\nprint("resume", os.environ.get("TRAINWRIGHT_RESUME"))')
    assert "resume 1" in launch("-n", 1, "--resume", "script.py").stdout
    assert "resume None" in launch("-n", 1, "script.py").stdout
    assert "--resume has no effect with the command runs" in launch("-n", 1, "--resume", "runs", ".").stderr
    assert "'python' is left out" in launch("-n", 1, "python", "script.py", code=2).stderr


def test_more_processes_than_cores(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.cli.launch._run", lambda arguments: 0)
    assert main(["launch", "-n", "1000", "script.py"]) == 2  # no such file
    assert main(["launch", "-n", "1000", __file__]) == 0
    assert "1000 processes share" in capsys.readouterr().err

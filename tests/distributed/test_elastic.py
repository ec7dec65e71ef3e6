"""Another number of processes keeps the samples of each update; a restart by the launcher needs no other command."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.distributed.test_data_parallel import Run, train
from tests.fork_server import python

SCRIPT = Path(__file__).parent / "restart_script.py"

CONSTANT = ("train.scheduler.warmup_factor=1.0", "train.scheduler.alpha=1.0")  # whatever the length of a run
SIZES = ("train.train_micro_batch_size=2", "train.global_batch_size=8", *CONSTANT)


def seen_by(*runs: Run) -> dict[int, list[int]]:
    """The samples of each iteration; a later run counts."""
    return {iteration: numbers for run in runs for iteration, numbers in run.seen().items()}


def test_2_then_1_then_4_processes_train_on_the_samples_of_one_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *SIZES, "train.train_iter=9", processes=2)
    assert whole.code == 0, whole.output
    runs, folder = [], tmp_path / "run"
    for processes, until in ((2, 3), (1, 6), (4, 9)):
        own = ("--resume", "train.dist.elastic=True", "train.global_batch_size=null") if runs else ()
        run = train(folder, *SIZES, *own, f"train.train_iter={until}", processes=processes)
        assert run.code == 0, run.output
        runs.append(run)
    assert "1 data ranks instead of 2, 8 samples per update as before" in runs[1].output
    assert seen_by(*runs) == whole.seen()
    losses, found = ({i: row["total_loss"] for i, row in run.rows().items() if i < 9} for run in (whole, runs[-1]))
    assert found == pytest.approx(losses, rel=1e-5)


def test_a_number_of_processes_that_does_not_divide_the_batch_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = train(folder, *SIZES, "train.train_iter=2", processes=2)
    assert first.code == 0, first.output
    rest = train(folder, "--resume", "train.dist.elastic=True", "train.train_micro_batch_size=3", "train.train_iter=4")
    assert rest.code != 0
    assert "global_batch_size=8" in rest.output, rest.output
    assert "train_micro_batch_size=3" in rest.output


def launch(folder: Path, *arguments: str) -> str:
    launcher = [python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [*launcher, "--master-addr", "127.0.0.1", "--master-port", str(port), str(SCRIPT), str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_killed_rank_is_restarted_and_the_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    launch(tmp_path / "whole")
    output = launch(tmp_path / "run", "kill")
    assert "The launcher has restarted this run: it continues from its latest checkpoint." in output
    for rank in range(2):
        whole, run = ((tmp_path / f"{name}-{rank}").read_text().splitlines() for name in ("whole-seen-0", "run-seen-1"))
        assert whole[5:] == run  # the checkpoint was saved after 5 updates
    last = [next((tmp_path / name / "checkpoints" / "16").glob("model.safetensors")) for name in ("whole", "run")]
    assert last[0].read_bytes() == last[1].read_bytes()

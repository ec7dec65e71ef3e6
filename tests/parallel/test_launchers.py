"""What launchers set: steps of Slurm, restarts by torchrun, and which of its processes have ended."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.fork_server import python
from tests.torchrun import REPOSITORY, free_port
from trainwright.parallel import startup_watch
from trainwright.parallel.mpi_environment import missing_address, mpi_variables
from trainwright.parallel.restarts import is_continued
from trainwright.parallel.slurm_environment import first_host, step_variables
from trainwright.parallel.startup_watch import ended_siblings, siblings_awaited

# As `srun --nodes 2 --ntasks 4` sets them for the third task.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "gpu[03-05]",
    "SLURM_STEP_NODELIST": "gpu[04-05]",
}


def test_the_variables_of_a_task() -> None:
    assert step_variables(STEP) == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "gpu04",
        "MASTER_PORT": str(15000 + (16 * 4711 + 1) % 15000),
    }


def test_a_master_that_the_user_sets_stays() -> None:
    found = step_variables({**STEP, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.7", "29500")


def test_a_task_that_sees_only_its_own_gpu_uses_index_0() -> None:
    second = {**STEP, "SLURM_LOCALID": "1"}
    assert step_variables(second)["LOCAL_RANK"] == "1"
    assert step_variables({**second, "SLURM_GPUS_PER_TASK": "h100:1"})["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": ""},  # the batch script, which would wait for tasks that nothing starts
        {"SLURM_STEP_ID": "4294967291"},  # the same, as newer versions number it
        {"SLURM_STEP_ID": "4294967290"},  # an interactive shell
        {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "0"},  # a process of torchrun within the step
    ],
    ids=["batch", "batch-step", "shell", "one-task", "torchrun"],
)
def test_other_programs_of_a_job_are_one_process(changes: dict[str, str]) -> None:
    assert step_variables({**STEP, **changes}) == {}


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize("started", [OPEN_MPI, HYDRA], ids=["open-mpi", "hydra"])
def test_the_variables_of_mpi(started: dict[str, str]) -> None:
    found = mpi_variables(started)
    assert found == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    here = {**started, **found}
    text = missing_address(here)
    assert text is not None
    assert text.startswith("This is one of 4 processes of mpirun, and MASTER_ADDR, MASTER_PORT are not set:")
    assert "`mpirun -n 4 -x MASTER_ADDR=HOST -x MASTER_PORT=29500 COMMAND`" in text
    assert "`trainwright launch -n 4 SCRIPT`" in text
    assert missing_address({**here, "MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None
    for other in ({"RANK": "0"}, {"WORLD_SIZE": "1"}):  # of torchrun, or separate runs
        assert mpi_variables({**started, **other}) == {}


def test_pmi_without_a_local_rank_asks_for_it() -> None:
    started = {"PMI_RANK": "3", "PMI_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert "LOCAL_RANK is not set" in str(missing_address({**started, **mpi_variables(started)}))
    assert mpi_variables({**started, "PMI_SIZE": "1"}) == {}
    assert missing_address({"RANK": "0", "WORLD_SIZE": "2"}) is None  # of another launcher: torch's own message


PROGRAM = """
import torch
from trainwright import Trainer, TrainingConfig
from trainwright.base.dist import get_world_size

data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4), torch.arange(16) % 2)
config = TrainingConfig(output_dir="run", num_epochs=1, batch_size=4, device_str="cpu", progress_bar=False)
Trainer(torch.nn.Linear(4, 2), config, data).train()
print("trained on", get_world_size())
"""


@pytest.mark.parametrize("has_address", [True, False])
def test_processes_of_mpirun_train_together_or_are_refused(tmp_path: Path, has_address: bool) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} if has_address else {}
    removed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    processes = [
        subprocess.Popen(
            [python(), "train.py"],
            cwd=tmp_path,
            env={
                **inherited,
                **address,
                "PYTHONPATH": str(REPOSITORY),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    if has_address:
        assert all("trained on 2" in output for output in outputs), outputs
        return
    assert all(process.returncode == 1 for process in processes)
    assert "This is one of 2 processes of mpirun" in outputs[0]
    assert outputs[1].count("\n") <= 2, outputs[1]  # one process prints it
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1,a2", "a1"), ("n[1-3,7],m1", "n1"), ("r[0-1]n[2,5]x,b", "r0n2x"), ("n007", "n007"), ("", "localhost")],
)  # fmt: skip
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_the_tasks_of_a_step_meet(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from trainwright.parallel import get_rank, get_world_size, setup_dist_util\n"
        "from trainwright.base.dist import all_gather_object\n"
        "setup_dist_util({'device_type': 'cpu'})\n"
        "print(get_world_size(), all_gather_object(get_rank()))\n"
    )
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    tasks = [
        subprocess.Popen(
            [python(), str(script)],
            env={**os.environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    assert [task.communicate(timeout=60)[0] for task in tasks] == ["2 [0, 1]\n"] * 2


JOB = {
    "TORCHELASTIC_RUN_ID": "a",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "LOCAL_WORLD_SIZE": "3",
}


def start(processes: Path, pid: int, environment: dict[str, str]) -> None:
    (processes / str(pid)).mkdir()
    (processes / str(pid) / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in environment.items()))


def test_a_process_that_has_ended_is_found_by_its_rank(tmp_path: Path) -> None:
    own = JOB | {"LOCAL_RANK": "0"}
    start(tmp_path, 10, own)
    start(tmp_path, 11, JOB | {"LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"})  # of another attempt
    start(tmp_path, 12, JOB | {"LOCAL_RANK": "2"})
    start(tmp_path, 13, {"HOME": "/"})
    (tmp_path / "14").mkdir()  # it has ended meanwhile
    assert ended_siblings(own, tmp_path) == {1}
    start(tmp_path, 15, JOB | {"LOCAL_RANK": "1"})
    assert ended_siblings(own, tmp_path) == set()


def test_one_process_with_the_variables_of_several_logs_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup_watch, "_FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(startup_watch, "_LOG_AFTER_S", 0.0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}.items():
        monkeypatch.setenv(name, value)
    with siblings_awaited():
        end = time.monotonic() + 20
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.05)
    (line,) = caplog.messages
    assert "waits for the other processes of WORLD_SIZE=2 at 127.0.0.1:29777" in line


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    started = {os.getppid(): 1000.0, os.getpid(): 2000.0}
    monkeypatch.setattr("trainwright.parallel.restarts._start_of", started.get)
    file = tmp_path / "last_checkpoint"
    file.write_text("5")
    return file


@pytest.mark.parametrize(
    ("saved_at", "expected"),
    [(500, False), (1500, True), (2500, False)],
    ids=["an earlier job", "an earlier attempt", "this process"],
)
def test_whose_checkpoint_it_is(checkpoint: Path, saved_at: int, expected: bool) -> None:
    os.utime(checkpoint, (saved_at, saved_at))
    assert is_continued(checkpoint) is expected


def test_without_a_checkpoint_or_a_launcher(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(checkpoint, (1500, 1500))
    assert not is_continued(checkpoint.with_name("none"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not is_continued(checkpoint)


@pytest.mark.parametrize("count", ["0", "1"])
def test_a_system_without_start_times(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    monkeypatch.setattr("trainwright.parallel.restarts._start_of", lambda process: None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert is_continued(checkpoint) is (count == "1")


def test_a_job_that_a_queue_starts_again_continues(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(checkpoint, (500, 500))  # before this launcher
    monkeypatch.setenv("TRAINWRIGHT_RESUME", "1")
    assert is_continued(checkpoint)
    assert not is_continued(checkpoint.with_name("none"))

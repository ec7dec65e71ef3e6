"""A step of Slurm is a start of several processes."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.fork_server import python
from trainwright.parallel.slurm_environment import first_host, step_variables

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
        "from trainwright.parallel.dist import all_gather_object\n"
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

"""A step of Slurm (``srun``) in the variables of torchrun, which torch reads."""

import re
from collections.abc import Mapping

_LAST_STEP = 0xFFFFFFF0  # larger numbers are Slurm's own: the batch script, an interactive shell


def step_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """``RANK``, ``WORLD_SIZE`` and so on of this task; empty unless ``srun`` started several tasks of this program.

    The first host of the step is the master. Variables that are set, for example by torchrun within the step, stay.

    >>> step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
    >>> step_variables({**step, "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "12"})["MASTER_ADDR"]
    'gpu07'
    """
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    is_step = int(environment.get("SLURM_STEP_ID") or _LAST_STEP) < _LAST_STEP
    if not is_step or int(num_tasks) == 1 or "RANK" in environment or "SLURM_PROCID" not in environment:
        return {}
    job, step = (int(environment.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # A task that sees only its own GPU has it at index 0, as under `torchrun --virtual-local-rank`.
    has_own_gpu = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1"
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": "0" if has_own_gpu else environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")),
        "MASTER_PORT": str(15000 + (16 * job + step) % 15000),  # below the ports that systems give to clients
    }
    return {name: environment.get(name, value) for name, value in found.items()}


def first_host(nodes: str) -> str:
    """
    >>> first_host("gpu[07-09,12],cpu1"), first_host("rack[2,4]n[0-3]"), first_host("a,b")
    ('gpu07', 'rack2n0', 'a')
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).partition(",")[0] or "localhost"

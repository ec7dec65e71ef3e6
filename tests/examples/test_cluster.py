"""The templates for clusters: each is read by its own parser or schema, and starts the command on each node."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from trainwright.cli.launch import parser

TEMPLATES = Path(__file__).parents[2] / "examples" / "cluster"
SLURM = TEMPLATES / "slurm.sbatch"
TRAIN = ["train", "config.py", "model.layers=[1, 2]", "data.path=it's here"]
CONFIG = """
from tests.distributed.project import Model, Samples

from trainwright.config import LazyCall, get_config
from trainwright.data import build_image_train_loader

model = LazyCall(Model)()
dataloader = dict(train=LazyCall(build_image_train_loader)(dataset=LazyCall(Samples)(length=16), num_workers=0))
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train
train.update(dict(train_iter=4, train_micro_batch_size=2, global_batch_size=4))
"""


def option(arguments: Sequence[str], name: str) -> str:
    """Of ``trainwright launch``, read as it reads it; an option that it does not have is an error."""
    known, unknown = parser().parse_known_args(arguments)
    assert unknown == []
    return str(getattr(known, name.replace("-", "_")))


def submit(folder: Path, **environment: str) -> list[list[str]]:
    """The arguments of ``trainwright`` when bash runs the script, with srun and scontrol as on two nodes."""
    programs = {
        "trainwright": 'printf "%s\\0" "$@" >> calls; printf "\\n" >> calls; exit ${CODE:-0}',
        "srun": 'while [ "${1#--}" != "$1" ]; do echo "$1" >> srun_options; shift; done; "$@"',
        "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > requeued; else printf "gpu07\\ngpu08\\n"; fi',
    }
    for name, body in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    variables = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[07-08]", **environment}
    variables["PATH"] = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(["bash", SLURM, *TRAIN], cwd=folder, env={**os.environ, **variables}, check=False)
    assert done.returncode == int(environment.get("CODE", 0))
    return [line.split("\0")[:-1] for line in (folder / "calls").read_text().splitlines()]


class TestSlurm:
    def test_the_script_runs_the_command_on_each_node(self, tmp_path: Path) -> None:
        (call,) = submit(tmp_path, SLURM_CPUS_PER_TASK="24")
        name, *arguments = call
        assert name == "launch"
        assert option(arguments, "rdzv-endpoint") == "gpu07:29500"
        assert (option(arguments, "nnodes"), option(arguments, "rdzv-id")) == ("2", "7")
        assert option(arguments, "resume") == "True"
        assert arguments[-4:] == TRAIN
        assert not (tmp_path / "requeued").exists()
        assert "--cpus-per-task=24" in (tmp_path / "srun_options").read_text()

    def test_its_settings_are_read(self) -> None:
        """``sbatch`` reads them before the first command."""
        lines = SLURM.read_text().splitlines()
        assert lines[0] == "#!/bin/bash"
        first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
        settings = [line.split()[1:] for line in lines if line.startswith("#SBATCH")]
        assert settings == [line.split()[1:] for line in lines[:first_command] if line.startswith("#SBATCH")]
        assert all(len(setting) == 1 and setting[0].startswith("--") for setting in settings)
        expected = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--requeue", "--signal=TERM@120"]
        assert all([setting] in settings for setting in expected)

    @pytest.mark.parametrize(
        ("code", "restarts", "is_queued"),
        [("143", "9", True), ("1", "0", True), ("75", "2", True), ("1", "3", False), ("2", "0", False)],
        ids=["stopped after a save", "failed", "lost", "failed too often", "wrong arguments"],
    )
    def test_when_it_is_queued_again(self, code: str, restarts: str, is_queued: bool, tmp_path: Path) -> None:
        submit(tmp_path, CODE=code, SLURM_RESTART_COUNT=restarts)
        assert (tmp_path / "requeued").exists() == is_queued


class TestKubernetes:
    SERVICE, JOB = yaml.safe_load_all((TEMPLATES / "kubernetes.yaml").read_text())
    (CONTAINER,) = JOB["spec"]["template"]["spec"]["containers"]

    def test_the_schema_of_kubernetes(self) -> None:
        validator = pytest.importorskip("kubernetes_validate")
        for resource in (self.SERVICE, self.JOB):
            validator.validate(resource, validator.latest_version(), strict=True)

    def test_each_pod_finds_the_first(self) -> None:
        spec, pod = self.JOB["spec"], self.JOB["spec"]["template"]
        name, launch, *arguments = self.CONTAINER["command"]
        assert (name, launch) == ("trainwright", "launch")
        assert spec["completionMode"] == "Indexed"
        assert str(spec["completions"]) == str(spec["parallelism"]) == option(arguments, "nnodes")
        service = self.SERVICE["metadata"]["name"]
        assert pod["spec"]["subdomain"] == service
        assert self.SERVICE["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert self.SERVICE["spec"]["clusterIP"] == "None"
        assert self.SERVICE["spec"]["publishNotReadyAddresses"]  # the pods meet before they are ready
        assert option(arguments, "rdzv-endpoint") == f"{self.JOB['metadata']['name']}-0.{service}:29500"
        assert option(arguments, "local-addr") == f"$({self.CONTAINER['env'][0]['name']})"
        assert option(arguments, "resume") == "True"

    def test_volumes_are_mounted(self) -> None:
        mounted = {mount["name"]: mount["mountPath"] for mount in self.CONTAINER["volumeMounts"]}
        assert {volume["name"] for volume in self.JOB["spec"]["template"]["spec"]["volumes"]} == {*mounted}
        assert f"train.output_dir={mounted['output']}/run" in self.CONTAINER["command"]


@pytest.mark.exhaustive
def test_torchrun_trains_on_two_nodes(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"NODES": "2", "HEAD": "127.0.0.1", "PORT": str(port), "PROCESSES": "1", "SEEN_FOLDER": str(tmp_path)}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", TEMPLATES / "torchrun.sh", "train", "config.py", f"train.output_dir={tmp_path / 'run'}"]
    nodes = [
        subprocess.Popen(command, cwd=tmp_path, env={**environment, **variables}, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert "1 accumulation x 2 processes" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.sh"])
def test_bash_reads_it(name: str) -> None:
    subprocess.run(["bash", "-n", TEMPLATES / name], check=True)

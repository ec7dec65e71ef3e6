"""Job files: each is read by the cluster's own parser or schema, and starts what `trainwright launch` would start."""

import ast
import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright.cli.main import main

TRAIN = ("train", "config.py", "model.layers=[1, 2]", "data.path=it's here")
KUBERNETES = ("--image", "registry/project:1", "--volume", "runs:/output")


def job_file(capsys: pytest.CaptureFixture[str], cluster: str, *options: str, nodes: str = "2") -> str:
    assert main(["launch", "-n", "4", "--nnodes", nodes, "--to", cluster, "--print", *options, *TRAIN]) == 0
    return capsys.readouterr().out


def calls_of(script: str, folder: Path, **environment: str) -> list[list[str]]:
    """The arguments of ``trainwright`` when bash runs the script, with srun and scontrol as on two hosts."""
    programs = {
        "trainwright": 'printf "%s\\0" "$@" >> calls; printf "\\n" >> calls; exit ${CODE:-0}',
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; "$@"',
        "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > requeued; else printf "gpu07\\ngpu08\\n"; fi',
    }
    for name, body in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    paths = {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", script], cwd=folder, env={**os.environ, **paths, **environment}, check=False)
    return [line.split("\0")[:-1] for line in (folder / "calls").read_text().splitlines()]


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


class TestSlurm:
    def test_the_script_runs_the_command_on_each_host(self, capsys: Any, tmp_path: Path) -> None:
        text = job_file(capsys, "slurm", "--time", "24:00:00", "--name", "my-run")
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        (call,) = calls_of(text, tmp_path, SLURM_NNODES="2", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="gpu[07-08]")
        assert call[0] == "launch"
        assert option(call, "--rdzv-endpoint") == "gpu07:29500"
        for name, value in (("--nnodes", "2"), ("--nproc-per-node", "4"), ("--rdzv-id", "7")):
            assert option(call, name) == value
        assert call[-5:] == [*TRAIN, "--resume"]
        assert not (tmp_path / "requeued").exists()

    def test_its_settings(self, capsys: Any) -> None:
        lines = job_file(capsys, "slurm", "--time", "24:00:00", "--name", "my-run").splitlines()
        assert lines[0] == "#!/bin/bash"
        first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
        settings = [line.removeprefix("#SBATCH ") for line in lines[:first_command] if line.startswith("#SBATCH")]
        assert {"--job-name=my-run", "--nodes=2", "--gpus-per-node=4", "--time=24:00:00", "--requeue"} <= {*settings}
        assert all(setting.startswith("--") for setting in settings)

    def test_without_gpus_it_asks_for_cores(self, capsys: Any) -> None:
        text = job_file(capsys, "slurm", "--gpus-per-node", "0")
        assert "#SBATCH --cpus-per-task=4" in text
        assert "--gpus-per-node" not in text

    def test_cpus_and_memory_of_a_host_reach_the_step(self, capsys: Any) -> None:
        text = job_file(capsys, "slurm", "--cpus-per-task", "24", "--mem", "64G", "--exclusive")
        settings = {"--gpus-per-node=4", "--cpus-per-task=24", "--mem=64G", "--exclusive"}
        assert {f"#SBATCH {setting}" for setting in settings} <= {*text.splitlines()}
        assert "--cpus-per-task=24" in next(line for line in text.splitlines() if line.startswith("srun"))

    def test_an_elastic_job_keeps_its_hosts_when_one_fails(self, capsys: Any) -> None:
        text = job_file(capsys, "slurm", nodes="1:2")
        assert "#SBATCH --nodes=1-2" in text
        assert text.count("--no-kill") == 2
        assert '--nnodes 1:"$SLURM_NNODES"' in text

    @pytest.mark.parametrize(
        ("code", "restarts", "is_queued"),
        [("143", "9", True), ("1", "0", True), ("75", "2", True), ("1", "3", False), ("2", "0", False)],
        ids=["stopped after a save", "failed", "lost", "failed too often", "wrong arguments"],
    )
    def test_when_it_is_queued_again(
        self, code: str, restarts: str, is_queued: bool, capsys: Any, tmp_path: Path
    ) -> None:
        variables = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "CODE": code, "SLURM_RESTART_COUNT": restarts}
        calls_of(job_file(capsys, "slurm"), tmp_path, **variables)
        assert (tmp_path / "requeued").exists() == is_queued


class TestKubernetes:
    def test_the_schema_of_kubernetes(self, capsys: Any) -> None:
        validator = pytest.importorskip("kubernetes_validate")
        for resource in yaml.safe_load_all(job_file(capsys, "kubernetes", *KUBERNETES, nodes="1:2")):
            validator.validate(resource, validator.latest_version(), strict=True)

    def test_each_pod_finds_the_first(self, capsys: Any) -> None:
        service, job = yaml.safe_load_all(job_file(capsys, "kubernetes", *KUBERNETES, "--name", "my-run"))
        spec, pod = job["spec"], job["spec"]["template"]
        assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
        assert service["metadata"]["name"] == pod["spec"]["subdomain"] == "my-run"
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]  # the pods meet before they are ready
        (container,) = pod["spec"]["containers"]
        command = container["command"]
        assert option(command, "--rdzv-endpoint") == "my-run-0.my-run:29500"
        assert option(command, "--local-addr") == f"$({container['env'][0]['name']})"
        assert command[-5:] == [*TRAIN, "--resume"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}

    def test_cpus_and_memory_are_requested(self, capsys: Any) -> None:
        validator = pytest.importorskip("kubernetes_validate")
        _, job = yaml.safe_load_all(
            job_file(capsys, "kubernetes", *KUBERNETES, "--cpus-per-task", "24", "--mem", "64G")
        )
        validator.validate(job, validator.latest_version(), strict=True)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        memory = {"memory": "64Gi"}
        assert container["resources"] == {
            "requests": {"cpu": 24, **memory},
            "limits": {"nvidia.com/gpu": 4, **memory},
        }

    def test_volumes_are_mounted(self, capsys: Any) -> None:
        _, job = yaml.safe_load_all(job_file(capsys, "kubernetes", *KUBERNETES))
        pod = job["spec"]["template"]["spec"]
        mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {"shm": "/dev/shm", "output": "/output"}
        assert {volume["name"] for volume in pod["volumes"]} == {*mounted}


class TestSkyPilot:
    OPTIONS = ("--accelerator", "H100", "--volume", "runs:/output")

    def test_the_schema_of_skypilot(self, capsys: Any) -> None:
        schemas = pytest.importorskip("sky.utils.schemas")
        import jsonschema

        task = yaml.safe_load(job_file(capsys, "skypilot", *self.OPTIONS))
        jsonschema.validate(task, schemas.get_task_schema())
        jsonschema.validate(task["resources"], schemas.get_resources_schema())

    def test_the_fields_of_its_documentation(self, capsys: Any) -> None:
        task = yaml.safe_load(job_file(capsys, "skypilot", *self.OPTIONS, "--image", "registry/project:1"))
        assert {*task} <= {"name", "workdir", "num_nodes", "resources", "volumes", "setup", "run"}
        assert {*task["resources"]} <= {"accelerators", "cpus", "image_id", "job_recovery"}
        assert task["resources"]["accelerators"] == "H100:4"
        assert task["resources"]["image_id"] == "docker:registry/project:1"
        assert (task["num_nodes"], task["volumes"]) == (2, {"/output": "runs"})

    def test_its_commands_run_the_command_on_each_host(self, capsys: Any, tmp_path: Path) -> None:
        task = yaml.safe_load(job_file(capsys, "skypilot", *self.OPTIONS))
        (call,) = calls_of(task["run"], tmp_path, SKYPILOT_NODE_IPS="10.0.0.4\n10.0.0.5")
        assert option(call, "--rdzv-endpoint") == "10.0.0.4:29500"
        assert call[-5:] == [*TRAIN, "--resume"]


class TestRay:
    def test_it_is_a_program_with_the_arguments(self, capsys: Any) -> None:
        tree = ast.parse(job_file(capsys, "ray"))
        values = {
            node.targets[0].id: ast.literal_eval(node.value)  # type: ignore[attr-defined]
            for node in tree.body
            if isinstance(node, ast.Assign) and node.targets[0].id.isupper()  # type: ignore[attr-defined]
        }
        assert (values["NODES"], values["BUNDLE"]) == (2, {"CPU": 4, "GPU": 4})
        assert values["ARGUMENTS"][-5:] == [*TRAIN, "--resume"]

    @pytest.mark.exhaustive
    def test_ray_runs_it(self, capsys: Any, tmp_path: Path) -> None:
        pytest.importorskip("ray")
        text = job_file(capsys, "ray", "--gpus-per-node", "0", nodes="1").replace("'CPU': 4", "'CPU': 1")
        (tmp_path / "job.py").write_text(text)
        paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        (tmp_path / "trainwright").write_text(
            f'#!/bin/bash\nprintf "%s\\0" "$@" > {shlex.quote(str(tmp_path))}/calls\n'
        )
        (tmp_path / "trainwright").chmod(0o755)
        subprocess.run(["python", "job.py"], cwd=tmp_path, env={**os.environ, **paths}, check=True, timeout=120)
        call = (tmp_path / "calls").read_text().split("\0")[:-1]
        assert call[-5:] == [*TRAIN, "--resume"]


def test_a_job_is_written_into_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["-n", "4", "--to", "slurm", *TRAIN]
    assert main(["launch", *arguments]) == 0
    assert "sbatch job.sbatch" in capsys.readouterr().out
    assert (tmp_path / "job.sbatch").read_text().startswith("#!/bin/bash\n")
    assert main(["launch", *arguments]) == 2
    assert "job.sbatch exists" in capsys.readouterr().err
    assert main(["launch", "--to", "slurm", *TRAIN]) == 2
    assert "set --nproc-per-node" in capsys.readouterr().err
    assert main(["launch", "-n", "4", "--to", "slurm", "--print", "--image", "registry/project:1", *TRAIN]) == 0
    assert "--image has no effect with --to slurm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--to", "kubernetes"], ["needs --image", "need --volume"]),
        (["--to", "skypilot"], ["--accelerator", "H100", "need --volume"]),
        (["--to", "slurm", "--name", "My_Run"], ["--name", "'My_Run'"]),
        (["--to", "slurm", "--mem", "64 GB"], ["--mem", "'64 GB'", "64G"]),
        (["--to", "ray", "--volume", "output"], ["--volume", "'output'", "NAME:PATH"]),
        (["--to", "slurm", "--rdzv-endpoint", "a:1"], ["--rdzv-endpoint", "remove it"]),
    ],
    ids=["image", "accelerator", "name", "memory", "volume", "hosts"],
)
def test_what_a_cluster_needs(options: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "-n", "4", "--nnodes", "2", *options, *TRAIN]) == 2
    message = capsys.readouterr().err
    assert all(fact in message for fact in facts), message
    assert all(line.startswith("trainwright") for line in message.splitlines()), message


def test_a_script_continues_when_the_queue_starts_its_job_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "-n", "4", "--to", "slurm", "--print", "train.py", "x"]) == 0
    words = capsys.readouterr().out.split()
    assert words.index("launch") < words.index("--resume") < words.index("train.py")

"""Job files of clusters for the arguments of ``trainwright launch``: Slurm, Kubernetes, SkyPilot, Ray.

Each host runs ``trainwright launch`` once; the job file gives it the address of the first host, and starts again what
a failure has ended: Slurm queues the job again, Kubernetes replaces the pod, SkyPilot recovers the job, Ray retries.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainwright.config.errors import ConfigError, did_you_mean

GRACE_S = 120  # from SIGTERM to SIGKILL: time for the last checkpoint
REJOINS = ("--rejoin", "10")
_SAVED, _LOST, _WRONG = 143, 75, 2  # exit codes: stopped by SIGTERM after a save; connection lost; wrong arguments
_MOST_FAILURES = 3  # after which a job ends

_USED_BY = {
    "time": ("slurm",),
    "exclusive": ("slurm",),
    "mem": ("slurm", "kubernetes", "skypilot"),
    "image": ("kubernetes", "skypilot"),
    "volume": ("kubernetes", "skypilot"),
    "accelerator": ("skypilot",),
}


def write_job_file(args: argparse.Namespace, options: Sequence[str], command: Sequence[str]) -> None:
    """Write or print the job file of ``args.to``.

    Raises:
        ConfigError: the cluster needs an argument that is missing, or an argument is wrong.
    """
    if args.to not in CLUSTERS:
        raise ConfigError(f"launch: --to: got {args.to!r}. {did_you_mean(args.to, CLUSTERS)}")
    args.processes = int(args.nproc_per_node)
    args.gpus = args.processes if args.gpus_per_node is None else args.gpus_per_node
    args.cpus = args.cpus_per_task or (None if args.gpus else args.processes)
    args.nodes = f"{args.min_nodes}:{args.max_nodes}" if args.min_nodes < args.max_nodes else str(args.max_nodes)
    for option, clusters in _USED_BY.items():
        if getattr(args, option) is not None and args.to not in clusters:
            print(f"trainwright launch: --{option} has no effect with --to {args.to}.", file=sys.stderr)
    if faults := _faults(args):
        raise ConfigError("\ntrainwright: ".join(f"launch: {fault}" for fault in faults))
    render, default_name, submit = CLUSTERS[args.to]
    rejoins = args.max_nodes > 1 and args.to != "kubernetes" and "--rejoin" not in options  # it replaces a failed pod
    text = render(args, [*(REJOINS if rejoins else ()), *options, *command])
    if args.print:
        print(text, end="")
        return
    file = Path(args.job_file or default_name)
    if file.exists():
        raise ConfigError(f"launch: {file} exists: remove it, or choose another name with --job-file.")
    file.write_text(text, encoding="utf-8")
    print(f"{file}: submit it with `{submit.format(path=file)}`")


def _faults(args: argparse.Namespace) -> list[str]:
    faults = []
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", args.name):
        faults.append(f"--name: got {args.name!r}; it must have lower-case letters, digits and '-', at most 52.")
    if args.volume is not None and not re.fullmatch(r"[^:]+:/.*", args.volume):
        faults.append(f"--volume: got {args.volume!r}; it must be NAME:PATH, such as checkpoints:/output")
    if args.mem is not None and not re.fullmatch(r"[0-9]+[KMGT]", args.mem):
        faults.append(f"--mem: got {args.mem!r}; it must be a whole number with K, M, G or T, such as 64G.")
    if args.to == "kubernetes" and not args.image:
        faults.append("--to kubernetes: needs --image, a container image with trainwright and your project.")
    if args.to == "skypilot" and args.gpus and not args.accelerator:
        faults.append("--to skypilot: needs --accelerator, the type of the GPUs, such as H100 (or --gpus-per-node 0).")
    if args.to in ("kubernetes", "skypilot") and args.max_nodes > 1 and args.volume is None:
        faults.append(f"--to {args.to}: several hosts need --volume NAME:PATH, a shared volume for the output folder.")
    return faults


def slurm(job: argparse.Namespace, arguments: Sequence[str]) -> str:
    elastic = job.min_nodes < job.max_nodes
    settings = {
        "job-name": job.name,
        "nodes": job.nodes.replace(":", "-"),
        "ntasks-per-node": 1,  # each starts its processes itself
        "gpus-per-node": job.gpus or None,
        "cpus-per-task": job.cpus,
        "mem": job.mem,
        "time": job.time,
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{GRACE_S}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in settings.items() if value is not None]
    flags = {"exclusive": job.exclusive, "requeue": True, "no-kill": elastic}
    lines += [f"#SBATCH --{name}" for name, is_on in flags.items() if is_on]
    nodes = f'{job.min_nodes}:"$SLURM_NNODES"' if elastic else '"$SLURM_NNODES"'
    hosts = f'--nnodes {nodes} --rdzv-endpoint "$head:{job.port}" --rdzv-id "$SLURM_JOB_ID"'
    # A step does not inherit the CPUs of a task, since Slurm 22.05.
    settings_of_srun = "--kill-on-bad-exit=0" + (" --no-kill" if elastic else "")
    settings_of_srun += f" --cpus-per-task={job.cpus}" if job.cpus else ""
    return f"""\
#!/bin/bash
{chr(10).join(lines)}

# Put here what activates your environment, for example: source .venv/bin/activate

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {settings_of_srun} trainwright launch {hosts} \\
    {shlex.join(arguments)}
code=$?

# Stopped before the time limit, after a save: continue in a new place of the queue. After a failure, too, a few times.
case "$code:${{SLURM_RESTART_COUNT:-0}}" in
    {_SAVED}:*) scontrol requeue "$SLURM_JOB_ID" ;;
    0:* | {_WRONG}:*) ;;
    *:[0-{_MOST_FAILURES - 1}]) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$code"
"""


def kubernetes(job: argparse.Namespace, arguments: Sequence[str]) -> str:
    """An indexed Job with a headless Service, which gives the pods their names; needs no operator."""
    first = f"{job.name}-0.{job.name}"
    hosts = ["--nnodes", job.nodes, "--rdzv-endpoint", f"{first}:{job.port}", "--rdzv-id", job.name]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if job.volume:
        claim, _, path = job.volume.partition(":")
        mounts.append({"name": "output", "mountPath": path})
        volumes.append({"name": "output", "persistentVolumeClaim": {"claimName": claim}})
    container = {
        "name": "trainwright",
        "image": job.image,
        "command": ["trainwright", "launch", *hosts, "--local-addr", "$(POD_IP)", *arguments],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": _resources(job),
        "volumeMounts": mounts,
    }
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",  # the Job replaces a pod that failed
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": volumes,
    }
    wrong_arguments = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    disruption = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    spec = {
        "completionMode": "Indexed",
        "completions": job.max_nodes,
        "parallelism": job.max_nodes,
        "backoffLimit": 10 * job.max_nodes,
        "podFailurePolicy": {"rules": [wrong_arguments, disruption]},
        "template": {"metadata": {"labels": {"app": job.name}}, "spec": pod},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {"clusterIP": "None", "selector": {"app": job.name}, "publishNotReadyAddresses": True},
    }
    own = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job.name}, "spec": spec}
    return f"{_yaml(service)}---\n{_yaml(own)}"


def _resources(job: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What a pod needs, and the most that it gets: all of its memory and GPUs, and CPUs that are free."""
    memory = {"memory": f"{job.mem}i"} if job.mem else {}
    requests = ({"cpu": job.cpus} if job.cpus else {}) | memory
    limits = memory | ({"nvidia.com/gpu": job.gpus} if job.gpus else {"cpu": job.cpus})
    return ({"requests": requests} if requests else {}) | {"limits": limits}


def skypilot(job: argparse.Namespace, arguments: Sequence[str]) -> str:
    """A task, for ``sky jobs launch``, which starts it again after a preemption."""
    hosts = f'--nnodes {job.nodes} --rdzv-endpoint "$head:{job.port}" --rdzv-id {job.name}'
    run = f"""\
head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
trainwright launch {hosts} \\
  {shlex.join(arguments)}
"""
    resources: dict[str, Any] = {
        **({"accelerators": f"{job.accelerator}:{job.gpus}"} if job.gpus else {}),
        **({"cpus": f"{job.cpus}+"} if job.cpus else {}),
        **({"memory": f"{job.mem}B+"} if job.mem else {}),
        "job_recovery": {"max_restarts_on_errors": 10, "recover_on_exit_codes": [_LOST, _SAVED]},
    }
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.max_nodes, "resources": resources, "workdir": "."}
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    else:
        task["setup"] = "pip install trainwright\n"
    if job.volume:
        name, _, path = job.volume.partition(":")
        task["volumes"] = {path: name}
    return _yaml(task | {"run": run})


def ray(job: argparse.Namespace, arguments: Sequence[str]) -> str:
    """A program for ``ray job submit``: one task on each host runs ``trainwright launch``."""
    bundle = {"CPU": job.cpus or job.processes, **({"GPU": job.gpus} if job.gpus else {})}
    return f'''\
"""Runs `trainwright launch` on each of {job.max_nodes} hosts of a Ray cluster."""

import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {job.max_nodes}
BUNDLE = {bundle!r}  # of each host
ARGUMENTS = {[*arguments]!r}

ray.init()
group = placement_group([BUNDLE] * NODES, strategy="STRICT_SPREAD")
ray.get(group.ready())


def on_host(index):
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return {{"num_cpus": BUNDLE["CPU"], "num_gpus": BUNDLE.get("GPU", 0), "scheduling_strategy": place}}


@ray.remote
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=10, retry_exceptions=True)  # a host that comes back joins the others again
def launch(head):
    hosts = ["--nnodes", "{job.nodes}", "--rdzv-endpoint", f"{{head}}:{job.port}", "--rdzv-id", "{job.name}"]
    hosts += ["--local-addr", ray.util.get_node_ip_address()]
    subprocess.run(["trainwright", "launch", *hosts, *ARGUMENTS], check=True)


head = ray.get(address.options(**on_host(0)).remote())
ray.get([launch.options(**on_host(index)).remote(head) for index in range(NODES)])
'''


def _yaml(value: dict[str, Any]) -> str:
    import yaml

    class Readable(yaml.SafeDumper):  # type: ignore[misc] # yaml ships no types
        pass

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Readable.add_representer(str, text)
    rendered: str = yaml.dump(value, Dumper=Readable, sort_keys=False, width=120)
    return rendered


# How the file is written, its default name, and how it is submitted.
CLUSTERS: dict[str, tuple[Callable[[argparse.Namespace, Sequence[str]], str], str, str]] = {
    "slurm": (slurm, "job.sbatch", "sbatch {path}"),
    "kubernetes": (kubernetes, "job.yaml", "kubectl apply -f {path}"),
    "skypilot": (skypilot, "job.yaml", "sky jobs launch {path}"),
    "ray": (ray, "job.py", "ray job submit --working-dir . -- python {path}"),
}

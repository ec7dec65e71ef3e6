"""Data parallelism: join the processes of a launcher (``torchrun``), wrap the model on each rank, and leave them.

Every rank holds the model and trains on its share of each global batch.
"""

import atexit
import gc
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.base.devices import find_device
from trainwright.base.dist import all_gather_object, get_local_rank, get_rank, get_world_size, use_mesh
from trainwright.base.errors import ConfigError
from trainwright.base.open_files import allow_files, allowed_files, connect_when_used, needed_files
from trainwright.parallel.connections import LOST_AFTER_S, end_lost_connections
from trainwright.parallel.faults import Limits, leave_to_first, stop_watching, watch_faults
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import use_layout
from trainwright.parallel.mpi_environment import missing_address, mpi_variables
from trainwright.parallel.simulated import simulation
from trainwright.parallel.slurm_environment import step_variables
from trainwright.parallel.startup_watch import siblings_awaited

_wrapped: WeakSet[DistributedDataParallel] = WeakSet()


def wrap_data_parallel(model: nn.Module, device: torch.device, *, find_unused_parameters: bool = False) -> nn.Module:
    """The model in torch's DistributedDataParallel, which averages gradients; itself when there is one rank.

    ``find_unused_parameters``: some parameters take no part in some steps. Costs a walk through the graph in each.
    """
    if get_world_size() == 1:
        return model
    active = simulation()
    kind = DistributedDataParallel if active is None else active.replica
    wrapped = kind(
        model,
        device_ids=None if device.type == "cpu" else [device],
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,  # gradients are not copied: faster, and one copy of them less in memory
    )
    watch_wrapped(wrapped)
    return wrapped


def watch_wrapped(model: nn.Module) -> None:
    """Let :func:`release_process_group` know of a model that was wrapped elsewhere."""
    if isinstance(model, DistributedDataParallel):
        _wrapped.add(model)


def release_process_group() -> None:
    """Let go of the process group in every wrapped model: they cannot train any more.

    While anything holds the group its threads run on, and one that is still busy with its last exchange when Python
    ends aborts the process, after all work was done (gloo on torch 2.13, in about one of ten runs of two processes).
    """
    for model in _wrapped:
        for name in ("reducer", "logger", "process_group"):
            setattr(model, name, None)
    gc.collect()  # wrapped models that are out of use may wait for the collector with what they hold


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's model, without the data-parallel wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def pick_device(device_type: str | None = None) -> torch.device:
    """This process's device: the accelerator if there is one, else the CPU; or the type that is asked for.

    An accelerator that is asked for and not there is one warning and the CPU.

    Raises:
        ConfigError: there are more processes on this machine than devices.
    """
    device = find_device(device_type)
    if device.type == "cpu":
        return device
    if device_type is None or torch.device(device_type).index is None:
        local_rank, devices = get_local_rank(), torch.accelerator.device_count()
        if local_rank >= devices:
            raise ConfigError(
                f"{os.environ.get('LOCAL_WORLD_SIZE', local_rank + 1)} processes were started on this machine, which"
                f" has {devices} {device.type} devices: start at most {devices} (--nproc-per-node), or set"
                " CUDA_VISIBLE_DEVICES= (empty) to train on the CPU."
            )
        device = torch.device(device.type, local_rank)
    assert device.index is not None, "found with its index, or given one here"
    torch.accelerator.set_device_index(device.index)
    return device


logger = logging.getLogger("trainwright.parallel")

HANG_TIMEOUT_S = 300.0
FIRST_UPDATE_S = 1800.0  # before the first update: a process may download data or compile, while the others wait


def num_launched() -> int:
    """The number of processes of a launcher: torchrun, ``accelerate launch``, Slurm's ``srun`` or MPI's ``mpirun``."""
    os.environ.update(step_variables(os.environ))
    os.environ.update(mpi_variables(os.environ))
    return int(os.environ.get("WORLD_SIZE", 1))


def launched_rank() -> int:
    """The rank of this process, also before it joins the others."""
    return get_rank() or (int(os.environ.get("RANK", 0)) if num_launched() > 1 else 0)


def setup_dist_util(
    sizes: Mapping[str, object] | None = None,
    *,
    timeout_s: float | None = None,
    name: Callable[[str], str] = "train.dist.{}".format,
    check: Callable[[], None] | None = None,
) -> torch.device:
    """Join the process group when a launcher started several processes, and return this process's device.

    ``sizes`` are the settings of the layout (see :class:`~trainwright.parallel.layout.Layout`) and ``device_type``;
    ``name`` gives the name of a setting in a message. The data-parallel size follows from how many processes there are.
    ``check`` is called where the processes have met, before the layout is used.
    A process that stays at one place for ``timeout_s`` ends the job. By default it is the setting ``hang_timeout_s``;
    without that five minutes, and half an hour before the first update of a training and outside of one.

    Raises:
        ConfigError: the layout or the device does not fit the number of processes. Raised before any process waits for
            another.
    """
    sizes = sizes or {}
    num_processes = num_launched()
    if dist.is_initialized():
        num_processes = dist.get_world_size()
    device_type = None if sizes.get("device_type") is None else str(sizes["device_type"])
    try:
        layout = Layout.of(sizes, num_processes, name)
        if num_processes > 1:
            _check_processes(device_type, num_processes, name)
    except ConfigError as error:
        leave_to_first(error)
        raise
    device = pick_device(device_type)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if layout.offload and backend == "nccl":  # host memory is exchanged, too
        backend = "cpu:gloo,cuda:nccl"
    if num_processes == 1 and not layout.is_plain and not dist.is_initialized():  # FSDP2 needs a group
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        leave_at_exit()
    if num_processes > 1 and not dist.is_initialized():
        given: Any = timeout_s or sizes.get("hang_timeout_s")
        _join(backend, Limits(HANG_TIMEOUT_S, FIRST_UPDATE_S) if given is None else Limits(given, given), num_processes)
    if num_processes > 1 and check is not None:
        check()
    use_layout(layout, device.type)
    _warn_of_no_effect(sizes, layout, num_processes, name)
    return device


def _check_processes(device_type: str | None, num_processes: int, name: Callable[[str], str]) -> None:
    """Raise if several processes would use one device, or do not know where to meet."""
    kind, _, number = (device_type or "").partition(":")
    if number and kind != "cpu":
        raise ConfigError(
            f"{name('device_type')}: got {device_type!r}, one device, for {num_processes} processes; use {kind!r}, of"
            " which each process uses one, or None."
        )
    if not dist.is_initialized() and (missing := missing_address(os.environ)) is not None:
        raise ConfigError(missing)


def _join(backend: str, limits: Limits, num_processes: int) -> None:
    """Meet the other processes; a collective that takes longer than the limit ends all of them."""
    if not allow_files(num_processes) and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "This system lets a process open %s files, and %d processes may need %d each, for their connections. Raise"
            " the limit if torch reports \"Too many open files\": `ulimit -n %d` before the start, LimitNOFILE= of a"
            " service, `--ulimit nofile=` of a container.",
            allowed_files(), num_processes, needed_files(num_processes), needed_files(num_processes),
        )  # fmt: skip
    connect_when_used(num_processes)
    # The group's own limit comes later: its error names neither the processes nor their places.
    try:
        with siblings_awaited():
            dist.init_process_group(backend, timeout=timedelta(seconds=limits.first_s + 60), **_store_of_attempt())
    except ValueError as error:  # of the launcher's environment
        raise ConfigError(
            f"{error}. The environment has WORLD_SIZE={os.environ.get('WORLD_SIZE')}, as a launcher sets it, but the"
            " rest does not fit. Start the processes with `trainwright launch` or torchrun; for one process, unset"
            " WORLD_SIZE."
        ) from error
    except dist.DistStoreError as error:
        error.add_note(
            f"Rank {os.environ.get('RANK', 0)} has waited for {num_processes} processes to meet. Another one has"
            " ended before it built its trainer, or cannot reach the first one."
        )
        raise
    _watch(limits)
    leave_at_exit()
    if os.environ.get("LOCAL_WORLD_SIZE") != str(num_processes):  # several hosts
        end_lost_connections(min(limits.later_s, LOST_AFTER_S))


def _warn_of_no_effect(
    sizes: Mapping[str, Any], layout: Layout, num_processes: int, name: Callable[[str], str]
) -> None:
    if num_processes == 1 and layout.is_plain:
        _warn_of_one_process(sizes, name)
    if sizes.get("zero_offload") and not layout.offload:
        logger.warning("%s has no effect without ZeRO (%s).", name("zero_offload"), name("zero_stage"))
    asked = sizes.get("data_parallel_size") or 1
    if asked not in (1, layout.data):
        processes = f"{num_processes} process{'es were' if num_processes > 1 else ' was'} started"
        logger.warning(
            "%s is %s, but %s: training on %d data-parallel ranks.",
            name("data_parallel_size"), asked, processes, layout.data,
        )  # fmt: skip


def _warn_of_one_process(sizes: Mapping[str, Any], name: Callable[[str], str]) -> None:
    names = "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size"
    least = {**dict.fromkeys(names, 2), "zero_stage": 1}
    asked = [key for key, number in least.items() if (sizes.get(key) or 0) >= number]
    if asked:
        text = ", ".join(f"{name(key)}={sizes[key]}" for key in asked)
        logger.warning(
            "%s has no effect: there is only one process. `trainwright launch -n 2 …`, or torchrun, starts several.",
            text,
        )


def _store_of_attempt() -> dict[str, Any]:
    """The store where the processes meet, if torchrun has restarted them.

    torchrun keeps one store for all attempts (torch 2.13), and a process may find there where another one listened in
    the attempt before. `trainwright launch` has torchrun make a new one, which also covers several hosts: only on one
    host do all processes know the number of the attempt.
    """
    get = os.environ.get
    attempt = get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or get("GROUP_WORLD_SIZE") != "1" or get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    stores: Any = dist  # it does not declare them as exported
    store = stores.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"store": stores.PrefixStore(f"attempt_{attempt}", store), "rank": rank, "world_size": world_size}


def _watch(limits: Limits) -> None:
    """Exchange reports of failures over a further connection to the store of the launcher's environment."""
    stores: Any = dist  # it does not declare them as exported
    store, host, port = None, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is not None and port is not None:
        with suppress(RuntimeError):  # the processes have met elsewhere
            store = stores.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
    # The first one's name: a host that joins later counts other restarts, and the store has reports of earlier ones.
    found = all_gather_object((uuid.uuid4().hex, store is not None))
    if not all(has_store for _, has_store in found):  # a process without it would never come to a meeting
        return
    reports = stores.PrefixStore(f"faults_{found[0][0]}", store)
    watch_faults(reports, dist.get_rank(), dist.get_world_size(), limits, shut_down)


def leave_at_exit() -> None:
    """See to it that the process leaves its group before it ends."""
    atexit.unregister(shut_down)  # once is enough
    atexit.register(shut_down)


def shut_down() -> None:
    """Leave the process group, if there is one; models under data parallelism cannot train any more."""
    if dist.is_available() and dist.is_initialized():
        stop_watching()
        use_mesh(None)
        release_process_group()
        dist.destroy_process_group()

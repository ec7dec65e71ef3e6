"""What one process knows about its host: addresses, versions, devices, disk."""

import os
import platform
import shutil
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK = b"\0" * 4_000_000
_MAX_CHUNKS, _MAX_WRITE_S = 16, 1.5


@dataclass
class Facts:
    """Of one rank. ``free_bytes`` and ``bytes_per_s`` are of the output folder; ``folder_fault`` if it has one.

    ``files``: how many it may open; None: any number.
    """

    rank: int = 0
    host: str = "host"
    versions: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    resolved: str = ""
    device: str = "cpu"
    device_index: int = 0
    devices: int = 0
    cores: int = 1
    threads: int = 1
    shm_bytes: int | None = None
    files: int | None = None
    free_bytes: int = 0
    bytes_per_s: float = 0.0
    folder_fault: str = ""
    sees_token: bool = True
    clock_s: float = 0.0
    master_fault: str = ""


def facts_of_this_process(rank: int) -> Facts:
    """Everything but the folder, the clock and the master."""
    import torch

    import trainwright
    from trainwright.base.devices import count_cpus
    from trainwright.base.open_files import allowed_files

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    resolved = ""  # the address of this host's name, which gloo and torchrun use unless they are given another
    with suppress(OSError):
        resolved = socket.gethostbyname(socket.gethostname())
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "trainwright": trainwright.__version__}
    return Facts(
        rank=rank,
        host=platform.node(),
        versions=versions,
        addresses=addresses(),
        resolved=resolved,
        device="cpu" if accelerator is None else accelerator.type,
        device_index=0 if accelerator is None else int(torch.accelerator.current_device_index()),
        devices=torch.accelerator.device_count(),
        cores=count_cpus(),
        threads=torch.get_num_threads(),
        files=allowed_files(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    )


def addresses() -> dict[str, str]:
    """The IPv4 address of each network interface, without the loopback; empty where the system does not list them."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(256, b"\0")
            try:
                answer = fcntl.ioctl(asked.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:  # has none
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                found[name] = address
    return found


def port_fault(port: int) -> str:
    """Why a process of this host cannot listen on ``port``; empty if it can."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def connection_fault(address: str, port: int) -> str:
    """Why this process cannot connect there; empty if it can."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        return f"{address}:{port}: {error.strerror or error}"
    return ""


def measure_folder(folder: Path, facts: Facts) -> None:
    """Write a file of at most 64 MB to the disk, and remove it."""
    path = folder / f".trainwright-doctor-{facts.host}-{os.getpid()}"
    try:
        facts.free_bytes = shutil.disk_usage(folder).free
        start, written = time.perf_counter(), 0
        with path.open("wb", buffering=0) as file:
            while written < _MAX_CHUNKS and time.perf_counter() - start < _MAX_WRITE_S:
                file.write(_CHUNK)
                os.fsync(file.fileno())
                written += 1
        facts.bytes_per_s = written * len(_CHUNK) / (time.perf_counter() - start)
    except OSError as error:
        facts.folder_fault = f"{folder}: {error.strerror or error}"
    finally:
        with suppress(OSError):
            path.unlink()

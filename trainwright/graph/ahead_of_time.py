"""Graphs compiled ahead of time by AOTInductor, cached on disk: no Python between kernels, no compilation at a restart.

AOTInductor compiles a graph to one shared library. A step of a tiny network takes 20 us; the same kernels called from
Python take 30 us. It is used on CPUs; on CUDA, a CUDA graph saves more.
"""

import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainwright.base.files import sync_file
from trainwright.graph.compile_graph import check

logger = logging.getLogger("trainwright.engine")


def ahead_of_time(
    graph: torch.fx.GraphModule, flat: Sequence[Tensor], options: dict[str, Any]
) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], bool] | None:
    """The compiled graph, which takes its inputs as a list, and whether it was in the cache.

    None for graphs with constants and for other devices than the CPU. Raises the errors of the compiler.
    """
    has_constants = any(node.op == "get_attr" for node in graph.graph.nodes)
    if has_constants or any(tensor.device.type != "cpu" for tensor in flat):
        return None
    cached = _folder() / f"{_key(graph, flat, options)}.pt2"
    if cached.exists():
        try:
            return _load(cached), True
        except (OSError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.info("Graph mode: %s cannot be read and is compiled again: %s", cached, reason)
    _compile(graph, flat, options, cached)
    call = _load(cached)
    try:
        check(call, graph, flat)
    except Exception:
        cached.unlink(missing_ok=True)
        raise
    return call, False


def _load(cached: Path) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    loader: Any = torch._inductor.aoti_load_package(str(cached)).loader
    call: Callable[[list[Tensor]], Sequence[Tensor]] = loader.boxed_run
    return call


def _compile(graph: torch.fx.GraphModule, flat: Sequence[Tensor], options: dict[str, Any], cached: Path) -> None:
    exported = torch.export.export(graph, tuple(flat), strict=False)
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        made = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(Path(folder) / cached.name),
            inductor_configs={**options},  # it adds to them
        )
        sync_file(made)
        os.replace(made, cached)  # atomic, also if two processes compile it


def _folder() -> Path:
    """In the cache folder of inductor, which ``TORCHINDUCTOR_CACHE_DIR`` sets."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "trainwright"


def _key(graph: torch.fx.GraphModule, flat: Sequence[Tensor], options: dict[str, Any]) -> str:
    """A hash of everything that the compiled library depends on."""
    from torch._inductor import config

    with config.patch({"aot_inductor.metadata": {}}):  # a compilation stores its own target there
        settings = config.get_hash()
    forms = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in flat]
    parts = (
        graph.code, forms, sorted(options.items()), torch.__version__, torch.version.git_version, settings,
        _processor(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _processor() -> list[str]:
    """The processor that the code is compiled for: several machines may share the folder."""
    found = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    for field in ("model name", "flags", "Features"):
        found += [line for line in lines if line.startswith(field)][:1]
    return found

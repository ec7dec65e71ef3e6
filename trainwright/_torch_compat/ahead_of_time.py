"""Programs as native code that is kept on disk: called without Python in between, and not compiled at the next start.

AOTInductor makes of a graph one shared library, with the calls of its kernels in it. For a tiny network a step so
called takes 20 us, where the same kernels called from Python take 30. It is for CPUs; on CUDA a CUDA graph does more.
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

from trainwright._torch_compat.compile_graph import check

logger = logging.getLogger("trainwright.engine")


def ahead_of_time(
    graph: torch.fx.GraphModule, flat: Sequence[Tensor], options: dict[str, Any]
) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], bool] | None:
    """The compiled graph, which takes its inputs as a list, and whether it was on disk; None: this way is not for it.

    Raises whatever the compiler raises.
    """
    has_constants = any(node.op == "get_attr" for node in graph.graph.nodes)
    if has_constants or any(tensor.device.type != "cpu" for tensor in flat):
        return None
    kept = _folder() / f"{_key(graph, flat, options)}.pt2"
    if kept.exists():
        try:
            return _loaded(kept), True
        except (OSError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.info("Graph mode: %s cannot be read, and is compiled again: %s", kept, reason)
    _compile(graph, flat, options, kept)
    call = _loaded(kept)
    try:
        check(call, graph, flat)
    except Exception:
        kept.unlink(missing_ok=True)
        raise
    return call, False


def _loaded(kept: Path) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    loader: Any = torch._inductor.aoti_load_package(str(kept)).loader
    call: Callable[[list[Tensor]], Sequence[Tensor]] = loader.boxed_run
    return call


def _compile(graph: torch.fx.GraphModule, flat: Sequence[Tensor], options: dict[str, Any], kept: Path) -> None:
    exported = torch.export.export(graph, tuple(flat), strict=False)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(Path(folder) / kept.name),
            inductor_configs={**options},  # it adds to them
        )
        os.replace(made, kept)  # whole or absent, also where two processes make it


def _folder() -> Path:
    """Beside what inductor keeps: where ``TORCHINDUCTOR_CACHE_DIR`` says."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "trainwright"


def _key(graph: torch.fx.GraphModule, flat: Sequence[Tensor], options: dict[str, Any]) -> str:
    """Of everything that the library depends on."""
    from torch._inductor import config

    with config.patch({"aot_inductor.metadata": {}}):  # a compilation leaves there what it was made for
        settings = config.get_hash()
    forms = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in flat]
    parts = (
        graph.code, forms, sorted(options.items()), torch.__version__, torch.version.git_version, settings,
        _processor(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _processor() -> list[str]:
    """What the compiler makes code for: the folder may be one that several machines see."""
    found = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    for field in ("model name", "flags", "Features"):
        found += [line for line in lines if line.startswith(field)][:1]
    return found

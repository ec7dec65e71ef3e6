"""One training in a process of its own: ``python -m benchmarks.worker PEER[:VARIANT] '{"model": "mlp", …}'``.

The last line of its output is ``RESULT`` and a JSON object.
"""

import importlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULT = "RESULT "
FOLDER = "BENCHMARK_FOLDER"  # the variable with the folder that all processes of a run share


def print_result(result: Mapping[str, Any]) -> None:
    """Print the measurements; only on rank 0."""
    if int(os.environ.get("RANK", 0)) == 0:
        print("\n" + RESULT + json.dumps(result), flush=True)


@contextmanager
def folder_of_run() -> Iterator[str]:
    """An empty folder, the same one in all processes of a measurement."""
    if FOLDER not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
        return
    shared = Path(os.environ[FOLDER], f"run{next(_runs)}")
    shared.mkdir(exist_ok=True)
    yield str(shared)


_runs = itertools.count()


def measure(peer: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train once, in this process, and return the measurements.

    ``settings``: the fields of a :class:`~benchmarks.job.Job`; ``counts``, a function of :mod:`benchmarks.counting`;
    ``ends_at_first_step``, for :mod:`benchmarks.resume`.
    """
    began = time.perf_counter_ns()
    counts, ends_at_first_step = settings.pop("counts", None), settings.pop("ends_at_first_step", False)
    if ends_at_first_step:
        importlib.import_module("torch._dynamo")  # otherwise the first optimizer of torch imports it
    name, _, variant = peer.partition(":")
    module = importlib.import_module(f"benchmarks.peers.{name}")
    imported = time.perf_counter_ns()
    from benchmarks.clock import peak_mib
    from benchmarks.job import Job

    result: dict[str, Any] = {"name": peer, "import_s": (imported - began) / 1e9}
    with folder_of_run() as folder:
        job = Job(**{"folder": folder, **settings})
        if ends_at_first_step:
            end_at_first_step(job, result)
        if counts:
            from benchmarks import counting

            result |= getattr(counting, counts)(job, lambda: module.train(job, variant))
        else:
            module.train(job, variant)
        result["fit_s"] = (time.perf_counter_ns() - imported) / 1e9
    result |= job.clock.metrics(job.warm, job.accumulation)
    result["us_between_lines"] = job.clock.us_between_lines(job.log_every)
    if job.device != "cpu":
        import torch

        result["gpu_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return result | {"peak_mib": peak_mib(), "first_steps_ns": job.clock.wall[:2]}


def end_at_first_step(job: Any, result: dict[str, Any]) -> None:
    """Print ``result`` and end this process at the first forward pass in training mode.

    The time is measured from this call.
    """
    start, make_net = time.perf_counter(), job.net

    def end(module: Any, inputs: Any) -> None:
        if module.training:
            print_result({**result, "s": time.perf_counter() - start, "read": job.read.num_read})
            os._exit(0)  # without saving or printing

    def net() -> Any:
        model = make_net()
        model.register_forward_pre_hook(end)
        return model

    job.net = net  # type: ignore[method-assign]


def main() -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    print_result(measure(sys.argv[1], json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()

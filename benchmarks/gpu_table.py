"""Everything that needs a GPU, in one Markdown table: ``python -m benchmarks.gpu_table [--into bench-out/gpu.md]``.

Collectives, prefetching, saves from pinned memory, the gradient scaler of float16, graph mode with CUDA graphs, steps
without waits, GPT-2 of 24 layers of width 1024 against the compiled plain loop, and each layout of processes that the
GPUs allow. Each row runs in a process of its own with a time limit. A row that fails is reported as ``failed: reason``,
and the others run; a row that the machine or the time does not allow is reported as ``not run: reason``.

Exit codes: 0, no row has failed; 1, one has; 2, there is no GPU, so nothing was measured. ``--device cpu --tiny`` tests
this program without a GPU.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import PEAK_TFLOPS
from benchmarks.rounds import TITLES, machine, run

NO_GPU = "make gpu: torch finds no CUDA GPU on this machine, so nothing was measured."
HEAD = ("measurement", "result", "must be", "passed", "seconds")
ROWS = {
    "collectives": "Collectives",
    "prefetch": "Prefetching on a second stream",
    "saves": "Asynchronous save from pinned memory",
    "fp16": "Gradient scaler, float16",
    "graph": "Graph mode against eager steps",
}
# Settings of TrainingConfig by the number of processes that they need.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2": (2, {}),
    "data 2, ZeRO 1": (2, {"zero_stage": 1}),
    "data 2, ZeRO 2": (2, {"zero_stage": 2}),
    "data 2, ZeRO 3": (2, {"zero_stage": 3}),
    "tensor 2": (2, {"tensor_parallel_size": 2}),
    "tensor 2, sequence parallel": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pipeline 2": (2, {"pipeline_parallel_size": 2}),
    "data 4, ZeRO 3 in 2 copies": (4, {"zero_stage": 3, "replicate_size": 2}),
    "data 2, ZeRO 3, tensor 2": (4, {"zero_stage": 3, "tensor_parallel_size": 2}),
    "tensor 2, pipeline 2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "data 2, tensor 2, pipeline 2": (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "data 8, ZeRO 3": (8, {"zero_stage": 3}),
}
# What several processes do with GPUs only: the function of `benchmarks.gpu_needs`, the processes, their layout.
_ZERO, _PIPELINE, _TENSOR = {"zero_stage": 3}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
NEEDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "A check before each step, ZeRO 3": ("order", 2, _ZERO),
    "A check before each step, pipeline 2": ("order", 2, _PIPELINE),
    "A check before each step, pipeline 2, ZeRO 3": ("order", 4, _PIPELINE | _ZERO),
    "Evaluations of a pipeline between steps": ("evaluations", 2, _PIPELINE),
    "NCCL connected at once (device_id)": ("eager", 2, {}),
    "Dropout, tensor 2": ("dropout", 2, _TENSOR),
    "Dropout, tensor 2, sequence parallel": ("dropout", 2, _TENSOR | {"sequence_parallel": True}),
    "Parameters in pinned host memory, ZeRO 3": ("offload", 2, _ZERO | {"zero_offload": True}),
    "Compiled blocks, ZeRO 3": ("compiled", 2, _ZERO),
    "Compiled blocks, tensor 2": ("compiled", 2, _TENSOR),
    "Peak against estimate, one process": ("peak", 1, {}),
    "Peak against estimate, ZeRO 3": ("peak", 2, _ZERO),
    "A hang while the others wait for their GPUs": ("hanging", 2, {}),
}
MEDIUM = {"model": "gpt_medium", "steps": 48, "batch": 16, "precision": "bf16", "log_every": 8}
TINY = {"model": "mlp", "steps": 24, "batch": 32, "log_every": 6}


@dataclass(frozen=True)
class Row:
    about: str
    result: str
    expected: str = ""
    passed: bool | None = None  # None: nothing to compare with
    seconds: float = 0.0

    def text(self) -> str:
        verdict = "-" if self.passed is None else "yes" if self.passed else "**no**"
        cells = (self.about, self.result, self.expected or "-", verdict, f"{self.seconds:.0f}")
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


@dataclass
class Suite:
    """Runs rows until the time is over. ``gpus``: the GPUs, or the processes on the CPU.

    ``shares_gpu``: layouts run with a tiny model in 8 processes at most. Where these are more than the GPUs, all use
    the first GPU, which shows that a layout works with NCCL, but nothing about its speed.
    """

    device: str
    tiny: bool
    gpus: int
    minutes: float
    peak_tflops: float | None = None
    only: Sequence[str] = ()
    shares_gpu: bool = False
    start: float = field(default_factory=time.monotonic)

    def rows(self) -> Iterator[Row]:
        """The rows in the order of their importance, each when it is measured; ``only``: those with such a text."""
        yield from (row for row in self._all_rows() if row is not None)

    def _all_rows(self) -> Iterator[Row | None]:
        for name, about in ROWS.items():
            ranks = self.gpus if name == "collectives" else 1
            yield self._guarded(about, partial(self._checked, name, ranks))
        for peer in ("objects", "config"):
            about = f"{TITLES[peer]}: no step between two log lines waits for the GPU"
            yield self._guarded(about, partial(self._waits, peer))
        for peer in ("objects", "objects:graph"):
            yield self._guarded(f"{TITLES[peer]}, MLP: launches", partial(self._launches, peer))
        yield from self._needs()
        yield from self._against_plain_loop()
        yield from self._layouts()

    def _needs(self) -> Iterator[Row | None]:
        """With a GPU for each process, or with all of them on the first one: see `benchmarks.gpu_needs`."""
        losses = list[float]()
        for about, (name, ranks, layout) in NEEDS.items():
            yield self._guarded(about, partial(self._need, name, ranks, layout, losses))

    def _need(self, name: str, ranks: int, layout: Mapping[str, Any], losses: list[float]) -> Row:
        if name == "hanging":
            return self._hang(ranks)
        is_compared = name in ("order", "evaluations", "offload", "compiled")
        if is_compared and not losses:
            losses += self._function("layout", is_tiny=True)["losses"]
        expected = losses if is_compared else []
        is_tiny = self.tiny or name != "peak"
        return _judged(
            self._function(name, ranks=ranks, layout=layout, expected=expected, is_tiny=is_tiny, shares_gpu=True)
        )

    def _hang(self, ranks: int) -> Row:
        from benchmarks.gpu_needs import WAITED

        start = time.monotonic()
        found = self._run_function("hanging", ranks=ranks, is_tiny=True, shares_gpu=True)
        seconds, is_named = time.monotonic() - start, WAITED in found.get("output", "")
        text = "ended, with the places of all processes" if is_named else f"not reported: {found.get('error', '')}"
        return Row(
            "", f"{text}, after {seconds:.0f} s", "a report of all processes within 60 s", is_named and seconds < 60
        )

    def _against_plain_loop(self) -> Iterator[Row | None]:
        """Steps of the large GPT: eager ones against the plain loop, graph mode against the compiled plain loop."""
        about = "MLP" if self.tiny else "GPT-2, 24 layers, width 1024, bfloat16"
        compared = {"plain:fused": ["objects", "config"], "plain:compile": ["objects:graph", "config:graph"]}
        if self.tiny:
            compared = {"plain:fused": ["objects"]}
        for base, peers in compared.items():
            plain: dict[str, Any] = {}
            for peer in (base, *peers):
                yield self._guarded(f"{about}: {TITLES[peer]}", partial(self._steps, peer, plain))

    def _layouts(self) -> Iterator[Row | None]:
        about, losses = "Layout: {}", list[float]()

        def one() -> Row:
            found = self._function("layout")
            losses.extend(found["losses"])
            return _judged(found)

        if self._processes > 1:
            yield self._guarded(about.format("one process"), one)
        for name, (ranks, layout) in LAYOUTS.items():
            measure = partial(self._layout, ranks, layout, losses)
            yield self._guarded(about.format(name), measure)

    @property
    def _processes(self) -> int:
        return 8 if self.shares_gpu else self.gpus

    def _layout(self, ranks: int, layout: Mapping[str, Any], expected: Sequence[float]) -> Row:
        if ranks > self._processes:
            return Row("", f"not run: needs {ranks} GPUs, there are {self.gpus}")
        return _judged(self._function("layout", ranks=ranks, layout=layout, expected=expected))

    def _checked(self, name: str, ranks: int) -> Row:
        return _judged(self._function(name, ranks=ranks))

    def _waits(self, peer: str) -> Row:
        if self.device == "cpu":
            return Row("", "not run: steps on a CPU never wait")
        self._worker(peer, TINY | {"steps": 60, "log_every": 20, "counts": "syncs"})
        return Row("", "none waits", "torch.cuda.set_sync_debug_mode raises no error", True)

    def _launches(self, peer: str) -> Row:
        found = self._worker(peer, TINY | {"data": "columns", "steps": 60, "log_every": 20, "counts": "launches"})
        is_replayed, count = peer.endswith(":graph"), found["launches"]
        return Row("", f"{count:.1f} a step", "<= 12" if is_replayed else "", count <= 12 if is_replayed else None)

    def _steps(self, peer: str, plain: dict[str, Any]) -> Row:
        job = TINY if self.tiny else MEDIUM
        found = self._worker(peer, job)
        ms = found["us_between_lines"] / 1e3
        parts, passed = [f"{ms:.2f} ms a step"], None
        if not plain:
            plain["ms"] = ms
        else:
            ratio = ms / plain["ms"]
            parts.append(f"{ratio:.3f} of the plain loop")
            passed = None if self.tiny else ratio <= 1.05
        flops = _flops(job)
        if flops and self.peak_tflops:
            parts.append(f"MFU {100 * flops / (ms / 1e3) / (self.peak_tflops * 1e12):.1f} %")
        if found.get("gpu_peak_mib"):
            parts.append(f"{found['gpu_peak_mib']:,.0f} MiB of the GPU")
        return Row("", ", ".join(parts), "" if passed is None else "<= 1.05", passed)

    def _worker(self, peer: str, job: Mapping[str, Any]) -> dict[str, Any]:
        return self._result(run(peer, {**job, "device": self.device}, timeout_s=self._limit(), **self._gpus(1)))

    def _function(self, name: str, ranks: int = 1, **more: Any) -> dict[str, Any]:
        return self._result(self._run_function(name, ranks, **more))

    def _run_function(
        self, name: str, ranks: int = 1, *, is_tiny: bool | None = None, shares_gpu: bool = False, **more: Any
    ) -> dict[str, Any]:
        """``shares_gpu``: more processes than GPUs use the first one, also where the suite's layouts do not."""
        shares_gpu = (self.shares_gpu or shares_gpu) and ranks > self.gpus
        is_tiny = self.tiny or (name == "layout" and self.shares_gpu) if is_tiny is None else is_tiny
        settings = {"device": self.device, "tiny": is_tiny, "ranks": ranks, **more}
        options: dict[str, Any] = {"module": "benchmarks.gpu_rows", "shares_gpu": shares_gpu, **self._gpus(ranks)}
        return run(name, settings, timeout_s=self._limit(), **options)

    def _gpus(self, ranks: int) -> dict[str, str]:
        """One process gets one GPU; several get all of them."""
        if self.device == "cpu":
            return {"GLOO_SOCKET_IFNAME": "lo"}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.gpus)))
        return {"CUDA_VISIBLE_DEVICES": visible.partition(",")[0] if ranks == 1 else visible}

    @staticmethod
    def _result(found: dict[str, Any]) -> dict[str, Any]:
        if "error" in found:
            raise RowError(found["error"])
        return found

    def _left(self) -> float:
        return self.start + 60 * self.minutes - time.monotonic()

    def _limit(self) -> float:
        return min(240.0, self._left())  # a large program compiles for minutes

    def _guarded(self, about: str, measure: Callable[[], Row]) -> Row | None:
        """The row of ``measure``, or the reason why there is none; None if it was not requested."""
        if self.only and not any(text in about for text in self.only):
            return None
        if self._left() < 5:
            return Row(about, f"not run: the {self.minutes:g} minutes were over")
        start = time.monotonic()
        try:
            row = measure()
        except Exception as error:  # the other rows are still of use
            reason = str(error) if isinstance(error, RowError) else f"{type(error).__name__}: {error}"
            row = Row("", f"failed: {' '.join(reason.split())[:300]}", passed=False)
        return Row(about, row.result, row.expected, row.passed, time.monotonic() - start)


class RowError(Exception):
    """The process of a row has failed; the text is the last line of its output."""


def _judged(found: Mapping[str, Any]) -> Row:
    return Row("", found["result"], found["expected"], found["passed"])


def _flops(job: Mapping[str, Any]) -> float | None:
    from benchmarks.models import flops_of_step

    return flops_of_step(job["model"], job["batch"])


def table(rows: Sequence[Row], about: str) -> str:
    """The Markdown table of the rows, with ``about`` the machine below it."""
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|---|---|--:|", *(row.text() for row in rows), "", f"({about})"]
    return "\n".join(lines) + "\n"


def described(device: str, gpus: int) -> str:
    """The machine of a table, in words."""
    import torch

    facts = machine()
    if device == "cuda":
        versions = f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        facts = {"gpu": f"{gpus} x {torch.cuda.get_device_name(0)}", "versions": versions, **facts}
    return "; ".join(f"{name} {value}" for name, value in facts.items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path("bench-out/gpu.md"), help="the file of the table")
    parser.add_argument("--minutes", type=float, default=9.5, help="no row begins after them, and none runs longer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only test this program")
    parser.add_argument("--processes", type=int, help="default: the number of GPUs; on a CPU 2")
    parser.add_argument(
        "--rows", default="", help="texts separated by commas: only rows with one of them in their name"
    )
    parser.add_argument(
        "--share-gpu",
        action="store_true",
        help="run layouts that need more GPUs than there are in processes that share the first one",
    )
    parser.add_argument("--peak-tflops", type=float, help="peak of the GPU in bfloat16, if its name is not known")
    args = parser.parse_args(arguments)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    gpus = args.processes or (torch.cuda.device_count() if args.device == "cuda" else 2)
    name = torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"
    peak = args.peak_tflops or next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
    about, rows = described(args.device, gpus), list[Row]()
    args.into.parent.mkdir(parents=True, exist_ok=True)
    only = [text.strip() for text in args.rows.split(",") if text.strip()]
    for row in Suite(args.device, args.tiny, gpus, args.minutes, peak, only, args.share_gpu).rows():
        print(row.text(), flush=True)
        rows.append(row)
        args.into.write_text(table(rows, about))  # after each row: an interrupted run keeps what it has measured
    print(f"{args.into}: {len(rows)} rows, {sum(row.passed is False for row in rows)} of them failed", file=sys.stderr)
    return int(any(row.passed is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Run processes alternately, and print a table of their measurements.

Each process runs once per round, A B C A B C, so a slowdown of the machine affects all. The table shows the median
over the rounds, with the smallest and the largest value; ratios are computed within each round.
"""

import argparse
import importlib.util
import json
import os
import platform
import pty
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.worker import FOLDER, RESULT

REPOSITORY = Path(__file__).parents[1]
PLAIN = "plain"
_ERROR = re.compile(r"(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception|Exit|Interrupt)\b.*)")  # the last line of a traceback
TITLES = {
    "plain": "plain loop",
    "plain:fused": "plain loop, fused Adam",
    "plain:fetch": "plain loop, fused Adam, complete batches",
    "plain:compile": "plain loop, compiled model",
    "plain:medium": "plain loop, matmul precision medium",
    "objects:passed": "Trainer, the plain loop's Adam",
    "config:passed": "DefaultTrainer, the plain loop's Adam",
    "objects": "Trainer",
    "config": "DefaultTrainer",
    "objects:graph": "Trainer, graph mode",
    "config:graph": "DefaultTrainer, graph mode",
}
OURS = ("objects", "config")
PASSED = ("objects:passed", "config:passed")
FUSED = "plain:fused"  # the plain loop with the optimizer that our trainers build
# Peers, with the module that must be installed.
PEERS = {
    "accelerate": "accelerate",
    "transformers": "transformers",
    "lightning": "lightning",
    "fabric": "lightning",
    "composer": "composer",
    "mmengine": "mmengine",
    "ignite": "ignite",
    "keras": "keras",
}


def installed_peers() -> list[str]:
    return [peer for peer, module in PEERS.items() if importlib.util.find_spec(module) is not None]


def say_missing() -> None:
    missing = sorted(set(PEERS) - set(installed_peers()))
    if missing:
        print(f"Not installed, so not measured: {', '.join(missing)}.", file=sys.stderr)


def environment(**more: str) -> dict[str, str]:
    """The environment of a measured process: one thread, no network, no GPU unless requested."""
    quiet = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    one_thread = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "KERAS_BACKEND": "torch"}
    return {**os.environ, **quiet, **one_thread, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", **more}


def run(
    peer: str,
    settings: Mapping[str, Any],
    *,
    timeout_s: float = 900,
    module: str = "benchmarks.worker",
    shares_gpu: bool = False,
    **variables: str,
) -> dict[str, Any]:
    """Run one training of ``peer`` in a process of its own, or in ``ranks`` processes, and return its result.

    If it fails, the result has ``error``, the last line of its ``output``. ``shares_gpu``: all processes use the first
    GPU.
    """
    ranks = settings.get("ranks", 1)
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:  # one for all processes, which share a checkpoint
        command = [sys.executable, "-m", module, peer, json.dumps(settings)]
        variables = {FOLDER: folder, **variables}
        outputs: list[_Process] = []
        deadline = time.monotonic() + timeout_s
        try:
            for rank in range(ranks):
                of_rank = _of_rank(rank, ranks, port, shares_gpu)
                outputs.append(_Process(command, of_rank | variables, settings))
            texts = [output.finish(max(0.0, deadline - time.monotonic())) for output in outputs]
        finally:  # after Ctrl-C, none may go on using the GPU of later measurements
            for output in outputs:
                output.kill()
    for line in reversed(texts[0].splitlines()):
        if line.startswith(RESULT):
            return json.loads(line[len(RESULT) :]) | {"spawned_ns": outputs[0].spawned_ns}
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    errors = [match[1] for line in lines if (match := _ERROR.match(line))]
    error = errors[0] if errors else lines[-1] if lines else "no output"
    return {"name": peer, "error": error, "output": "\n".join(texts)}


def take_turns(peers: Sequence[str], settings: Mapping[str, Any], *, rounds: int, **variables: str) -> list[Any]:
    """The results of every round."""
    results = []
    for number in range(rounds):
        for peer in peers:
            results.append(run(peer, settings, **variables) | {"round": number})
            if sys.stderr.isatty():
                print(f"\rround {number + 1} of {rounds}: {peer}\033[K", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return results


class _Process:
    """A process whose output is read while it runs; with ``features``, stderr is a terminal."""

    def __init__(self, command: list[str], variables: dict[str, str], settings: Mapping[str, Any]) -> None:
        self._errors = ""
        self._reader = self._terminal = None
        target: Any = subprocess.STDOUT
        if settings.get("features"):
            self._terminal, target = pty.openpty()
            self._reader = threading.Thread(target=self._read_terminal, daemon=True)
        self.spawned_ns = time.perf_counter_ns()
        self._process = subprocess.Popen(
            command, env=environment(**variables), stdout=subprocess.PIPE, stderr=target, text=True
        )
        if self._reader is not None:
            os.close(target)
            self._reader.start()

    def finish(self, timeout_s: float) -> str:
        try:
            text, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            text = "killed: it ran longer than its time limit"
        if self._reader is not None and self._terminal is not None:
            self._reader.join()
            os.close(self._terminal)
        return text if RESULT in text else f"{text}\n{self._errors}"

    def kill(self) -> None:
        self._process.kill()  # nothing, if it has ended

    def _read_terminal(self) -> None:
        assert self._terminal is not None
        try:
            while piece := os.read(self._terminal, 2**16):
                self._errors = (self._errors + piece.decode(errors="replace"))[-10_000:]
        except OSError:  # the other end is closed
            pass


def _of_rank(rank: int, ranks: int, port: int, shares_gpu: bool) -> dict[str, str]:
    if ranks == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "NODE_RANK": 0}
    if shares_gpu:  # NCCL refuses two processes of one host on one GPU: each one is a host of its own
        numbers |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": rank, "NCCL_HOSTID": rank}
    named = {name: str(value) for name, value in numbers.items()}
    if shares_gpu:
        named |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return named | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": named["NODE_RANK"]}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# Tables.


def base_of(name: str) -> str:
    """The plain loop with the optimizer of ``name``: our trainers build the fused one, unless they get another."""
    return FUSED if name.partition(":")[0] in OURS and name not in PASSED else PLAIN


def ratios(results: Iterable[Mapping[str, Any]], name: str, metric: str, base: str = PLAIN) -> list[float]:
    """``metric`` of ``name`` divided by that of ``base``, in each round that has both."""
    by_round: dict[int, dict[str, float]] = {}
    for result in results:
        if metric in result:
            by_round.setdefault(result["round"], {})[result["name"]] = result[metric]
    return [row[name] / row[base] for row in by_round.values() if name in row and row.get(base)]


def values(results: Iterable[Mapping[str, Any]], name: str, metric: str) -> list[float]:
    return [result[metric] for result in results if result["name"] == name and metric in result]


def spread(numbers: Sequence[float], digits: int) -> str:
    """The median, and in brackets the smallest and the largest."""
    if not numbers:
        return "-"
    middle, least, most = (f"{value:,.{digits}f}" for value in (statistics.median(numbers), min(numbers), max(numbers)))
    return f"{middle} ({least} - {most})" if len(numbers) > 1 else middle


def print_table(
    results: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, int]], ratio_of: str, base: str = PLAIN
) -> None:
    """A row for each peer; ``columns``: title and digits by metric.

    If the plain loop was measured with several optimizers, there is a second ratio: to that with the same one.
    """
    names = list(dict.fromkeys(result["name"] for result in results))
    has_same = base == PLAIN and {PLAIN, FUSED} <= {*names}
    same = ["same optimizer"] if has_same else []
    rows = [["", f"ratio of {columns[ratio_of][0]}", *same, *(title for title, _ in columns.values())]]
    for name in names:
        failed = [result["error"] for result in results if result["name"] == name and "error" in result]
        if failed and not values(results, name, ratio_of):
            rows.append([TITLES.get(name, name), f"failed: {failed[0][:100]}"])
            continue
        cells = [spread(values(results, name, metric), digits) for metric, (_, digits) in columns.items()]
        same = [spread(ratios(results, name, ratio_of, base_of(name)), 2)] if has_same else []
        rows.append([TITLES.get(name, name), spread(ratios(results, name, ratio_of, base), 2), *same, *cells])
    widths = [
        max(len(row[place]) for row in rows if place < len(row) and len(row) > 2) for place in range(len(rows[0]))
    ]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())


def machine() -> dict[str, Any]:
    import torch

    names = [line.partition(":")[2].strip() for line in _cpu_info() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def parser_of(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """What all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each takes its turn")
    parser.add_argument("--json", type=Path, help="a file for all measurements, for benchmarks.table")
    return parser


def write(path: Path | None, benchmark: str, case: str, results: Sequence[Mapping[str, Any]]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    command = f"python -m {benchmark} {' '.join(_without_json(sys.argv[1:]))}".strip()
    content = {"benchmark": benchmark.rpartition(".")[2], "case": case, "command": command, "machine": machine()}
    path.write_text(json.dumps(content | {"results": list(results)}, indent=1) + "\n")


def _without_json(arguments: list[str]) -> list[str]:
    if "--json" in arguments:
        place = arguments.index("--json")
        arguments = arguments[:place] + arguments[place + 2 :]
    return [argument for argument in arguments if not argument.startswith("--json=")]

"""What n real processes spend on what they agree on: meeting, comparisons, the stop check, saves, loads, evaluations.

    nice -n 10 python -m benchmarks.control_plane --processes 8 32 64

Each process is forked from one that has loaded everything, so that hundreds fit into memory (about 20 MiB each), and
has one thread for computations and a tiny sharded model. Prints Markdown: CPU time of rank 0 and the median of the
others, what they write to sockets and files, and the time until all are done. The processes share the cores of this
machine, so that this time grows with their number in any case; their CPU time does not.
"""

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from trainwright import Trainer, TrainingConfig
from trainwright.base.agreed_checks import AgreedChecks
from trainwright.checkpoint import Checkpointer
from trainwright.data import ColumnDataset
from trainwright.data.same_samples import Data, check_same_samples
from trainwright.parallel import setup_dist_util
from trainwright.parallel.data_parallel import shut_down
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.rank_checks import check_same_model, check_same_settings

LAYERS, WIDTH = 8, 8
CHECKS = 10
WATCHED_S = 4.0
RANKS_OF_HOST = 8
TIMEOUT_S = 900.0
WATCHES = ("trainwright-faults", "trainwright-connections")  # threads that look around once a second
STORE = "BENCHMARK_STORE"  # the variable with the process of the store
Part = tuple[str, Callable[[], object], int]  # what is measured, and how many of them a call makes


class Model(nn.Sequential):
    """Layers of one shape, as the blocks of a large model are, and a loss."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def parts(folder: Path, num_ranks: int) -> Iterator[Part]:
    """What is measured, in the order in which a run makes it.

    The training is data parallel: in a sharded one, the exchange of weights would be measured too.
    """
    yield "meet", lambda: setup_dist_util({"device_type": "cpu"}), 1
    torch.manual_seed(0)
    data = ColumnDataset(x=torch.randn(2 * num_ranks, WIDTH), labels=torch.zeros(2 * num_ranks, dtype=torch.int64))
    model = Model()
    config = TrainingConfig(
        output_dir=str(folder), batch_size=1, num_epochs=1, learning_rate=0.1, log_steps=1000, metrics=["accuracy"],
        save_enabled=False, eval_strategy="no", progress_bar=False, device_str="cpu",
    )  # fmt: skip
    yield "compare settings", lambda: check_same_settings(config.to_dict()), 1
    yield "compare the model", lambda: check_same_model(model), 1
    yield "compare the data", lambda: check_same_samples({"data": Data(data, {"seed": 0})}), 1
    made: list[Trainer] = []
    yield "build a trainer", lambda: made.append(Trainer(model, config, data, data)), 1
    yield "train, 2 updates", made[0].train, 1
    checks = AgreedChecks(0, period_s=0)
    yield "agreed stop, a check", lambda: [checks.largest(step, 0, 0) for step in range(CHECKS)], CHECKS
    yield "evaluate, 2 batches", made[0].evaluate, 1
    if num_ranks > 1:
        yield "make groups", lambda: setup_dist_util({"zero_stage": 3, "device_type": "cpu"}), 1
    mesh, sharded = current_mesh(), Model()
    if mesh is not None:
        for layer in (*sharded, sharded):
            fully_shard(layer, mesh=mesh.device_mesh["replicate", "shard"])
    optimizer = torch.optim.AdamW(sharded.parameters())
    for parameter in sharded.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    checkpointer = Checkpointer(
        sharded, folder / "checkpoints", optimizer=optimizer, mesh=None if mesh is None else mesh.device_mesh
    )
    yield "prepare saves", checkpointer.prepare, 1

    def save() -> None:
        checkpointer.save("model_0000001", iteration=1)
        checkpointer.wait()

    yield "save", save, 1
    yield "load", lambda: checkpointer.load(folder / "checkpoints" / "model_0000001"), 1
    yield "hang watch, a second", lambda: time.sleep(WATCHED_S), round(WATCHED_S)


def measured(folder: Path, num_ranks: int) -> dict[str, dict[str, float]]:
    """The costs of each part, in this process."""
    found = {}
    for name, call, count in parts(folder, num_ranks):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        before = counters()
        call()
        after = counters()
        found[name] = {key: (after[key] - before[key]) / count for key in before} | {"sockets": num_sockets()}
        found[name]["mib"] = own_mib()
    torch.distributed.barrier()
    return found


def counters() -> dict[str, float]:
    written = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    own = Path("/proc/self/task")
    watches = [own / str(thread.native_id) for thread in threading.enumerate() if thread.name in WATCHES]
    watch_s = sum(map(cpu_s, watches))
    return {
        "wall_s": time.perf_counter(),
        "cpu_s": time.process_time() - watch_s,
        "watch_s": watch_s,
        "store_s": sum(map(cpu_s, Path(f"/proc/{os.environ[STORE]}/task").iterdir())),
        "writes": int(written["syscw"]),
    }


def cpu_s(thread: Path) -> float:
    return int((thread / "schedstat").read_text().split()[0]) / 1e9


def num_sockets() -> int:
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found += os.readlink(path).startswith("socket:")
    return found


def own_mib() -> float:
    """The memory that this process shares with no other one."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def run(rank: int, num_ranks: int, port: int, store: int, folder: Path) -> None:
    """One process."""
    local = min(RANKS_OF_HOST, num_ranks)
    numbers = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ[STORE] = str(store)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        found = measured(folder, num_ranks)
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        shut_down()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # without the exit handlers of the parent process


def serve(ready: int, stop: int) -> None:
    """The store where the processes meet, as torchrun's agent holds it; writes its port, and waits for the end."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(ready, f"{store.port}\n".encode())
    os.read(stop, 1)
    os._exit(0)


def forked(call: Callable[[], object]) -> int:
    process = os.fork()
    if process == 0:
        try:
            call()
        finally:
            os._exit(1)
    return process


def results_of(num_ranks: int) -> list[dict[str, Any]]:
    """What each rank has measured, by rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reading, ready = os.pipe()
        stopped, stopping = os.pipe()
        server = forked(lambda: serve(ready, stopped))
        port = int(os.read(reading, 100))
        started = time.monotonic()
        ranks = {forked(partial(run, rank, num_ranks, port, server, folder)): rank for rank in range(num_ranks)}
        try:
            while ranks:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process in ranks:
                    rank = ranks.pop(process)
                    if status:
                        raise SystemExit(f"rank {rank} of {num_ranks} has failed.")
                elif time.monotonic() > started + TIMEOUT_S:
                    raise SystemExit(f"{len(ranks)} of {num_ranks} processes still run after {TIMEOUT_S:g} s.")
                else:
                    time.sleep(0.05)
        finally:
            for process in [*ranks, server]:
                os.kill(process, 9)
                os.waitpid(process, 0)
            for pipe in (reading, ready, stopped, stopping):
                os.close(pipe)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def load_all() -> None:
    """Load what a run uses, in a run of one process, so that the forked processes share it."""
    with tempfile.TemporaryDirectory() as folder:
        for _, call, _ in parts(Path(folder), 1):
            call()
    deadline = time.monotonic() + 10  # a thread that has ended may leave the system later
    while (has_threads := threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    if has_threads:
        raise SystemExit("benchmarks.control_plane: this process has threads, which the forked ones would not have.")


COLUMNS: dict[str, Callable[[list[dict[str, float]]], str]] = {
    "ms of CPU: rank 0, others": lambda ranks: _both(ranks, "cpu_s", 1e3),
    "ms of CPU of the watching threads of rank 0, and of the store": lambda ranks: (
        f"{_shown(1e3 * ranks[0]['watch_s'])}, {_shown(1e3 * ranks[0]['store_s'])}"
    ),
    "writes to sockets and files: rank 0, others": lambda ranks: _both(ranks, "writes", 1),
    "open sockets afterwards: rank 0, others": lambda ranks: _both(ranks, "sockets", 1),
    "MiB of memory of its own: rank 0, others": lambda ranks: _both(ranks, "mib", 1),
    "seconds until all are done": lambda ranks: f"{max(rank['wall_s'] for rank in ranks):.2f}",
}


def _both(ranks: list[dict[str, float]], key: str, scale: float) -> str:
    first, *others = (scale * rank[key] for rank in ranks)
    return f"{_shown(first)}, {_shown(statistics.median(others))}"


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def table(results: dict[int, list[dict[str, Any]]], cell: Callable[[list[dict[str, float]]], str]) -> str:
    """A row for each part, a column for each number of processes."""
    first = next(iter(results.values()))[0]
    lines = [f"| {' | '.join(['processes', *map(str, results)])} |", f"|---|{'--:|' * len(results)}"]
    for name in first:
        cells = [cell([rank[name] for rank in ranks]) for ranks in results.values()]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--json", type=Path, help="a file for the measurements of all processes")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault(
        "RES_OPTIONS", "timeout:1 attempts:1"
    )  # the store looks up names, which a machine may not know
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    load_all()
    gc.freeze()  # a collection writes into the memory of each object, which would not be shared any more
    results = {}
    for size in args.processes:
        results[size] = results_of(size)
        print(f"{size} processes are measured", file=sys.stderr, flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(results))
    for title, cell in COLUMNS.items():
        print(f"\n{title}:\n\n{table(results, cell)}")


if __name__ == "__main__":
    main()

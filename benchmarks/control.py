"""What one process of many spends on a step's checks, a save and a load, whatever the number of the others.

    python -m benchmarks.control --processes 64 256 1024

No others run: torch's fake process group stands for them. To make a whole checkpoint, this process takes their places
one after another, and what they send to rank 0 is kept for its turn. Prints a Markdown table of CPU time and of the
peak of Python's memory, for the last rank and for rank 0.
"""

import argparse
import itertools
import os
import pickle
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.base import dist
from trainwright.checkpoint import Checkpointer
from trainwright.data.seeding import random_state
from trainwright.hooks.signals import Interruptions
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import use_layout

ROWS, LAYERS, STEPS = 1024, 24, 200
ROW_BYTES = 20_000  # enough for the random state of a process


class State:
    """As a trainer's: with a random state of each process."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 1, "rank": {"random": random_state()}}

    def ranks_to_load(self, state: Any, count: int) -> list[int]:
        return [dist.get_rank()]

    def load_state_dict(self, state: Any) -> None: ...


class Others:
    """What the other processes send and receive, in their turns."""

    def __init__(self, folder: Path) -> None:
        self.shares = folder / "shares"  # their files until rank 0's turn
        self.shares.mkdir()
        self.sent: dict[int, bytes] = {}  # by rank
        self.objects: list[Any] = []  # that rank 0 has sent in its load
        self._num_names = self.num_objects = 0

    def begin(self) -> None:
        self._num_names = self.num_objects = 0
        for replaced in (self.broadcast, self.gather, self.broadcast_object_list):
            setattr(torch.distributed, replaced.__name__, replaced)
        dist.largest = self.largest
        dist.new_cpu_group = lambda timeout=None: torch.distributed.group.WORLD

    def largest(self, *numbers: int, group: Any = None) -> list[int]:
        if group is not None:  # the writer's: whether it has failed, and bytes
            return [0, max(numbers[1], *(len(one) for one in self.sent.values()), 0)]
        return [0, 1, ROW_BYTES] if len(numbers) == 3 else [*numbers]  # a save's: rank 0 writes

    def broadcast(self, line: torch.Tensor, _: int, group: Any = None) -> None:
        """Of a file name: the folder to write to, then that of the checkpoint."""
        self._num_names += 1
        if dist.get_rank():
            name = self.shares.name if self._num_names == 1 else "one"
            line[: len(name) + 1] = torch.tensor([0, *os.fsencode(name)])
        elif self._num_names == 1:
            folder = self.shares.parent / bytes(line[1:].tolist()).rstrip(b"\0").decode()
            for path in self.shares.iterdir():
                os.link(path, folder / path.name)

    def gather(self, sent: torch.Tensor, rows: Any, **_: Any) -> None:
        if rows is None:
            self.sent[dist.get_rank()] = bytes(sent.tolist())
            return
        self.sent[0] = bytes(sent.tolist())
        for rank, row in enumerate(rows):
            row[: len(self.sent[rank])] = torch.tensor([*self.sent[rank]])

    def broadcast_object_list(self, values: list[Any], **_: Any) -> None:
        if dist.get_rank() == 0 and self.num_objects == len(self.objects):
            self.objects.append(pickle.dumps(values))
        values[:] = pickle.loads(self.objects[self.num_objects])
        self.num_objects += 1


def turn(rank: int, size: int, what: str, others: Others, is_traced: bool = False) -> tuple[Others, dict[str, float]]:
    """Save or load as ``rank``; returns what others get, and the seconds, or the MiB if it ``is_traced``."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    mesh = use_layout(Layout(data=size, zero_stage=3), "cpu")
    assert mesh is not None
    model = nn.Sequential(*(nn.Linear(4, ROWS) for _ in range(LAYERS)))
    fully_shard(model, mesh=mesh.device_mesh["replicate", "shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    folder = others.shares.parent
    checkpointer = Checkpointer(model, folder, mesh=mesh.device_mesh, optimizer=optimizer, trainer=State())
    others.begin()
    checkpointer.prepare()
    for path in others.shares.glob(f"*-{rank:05d}-of-*"):
        path.unlink()
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: checkpointer.load(folder / "one"),
        "save": lambda: save(checkpointer),
        "step": lambda: check_steps(checkpointer),
    }
    if what == "load":
        calls[what]()  # the first one loads parts of torch
        others.num_objects = 0
    found = {}
    for name in ("save", "step") if what == "save" else ("load",):
        if is_traced:
            tracemalloc.start()
        begin = time.process_time()
        calls[name]()
        found[name] = tracemalloc.get_traced_memory()[1] / 2**20 if is_traced else time.process_time() - begin
        tracemalloc.stop()
    checkpointer.close()
    torch.distributed.destroy_process_group()
    return others, found


def save(checkpointer: Checkpointer) -> None:
    checkpointer.save("one", iteration=1)
    checkpointer.wait()


def check_steps(checkpointer: Checkpointer) -> None:
    """What each step checks, with an exchange in each."""
    hook = Interruptions(checkpointer, print, period_s=0)
    hook.trainer = argparse.Namespace(iter=0, start_iter=0)
    hook.before_train()
    for hook.trainer.iter in range(STEPS):
        hook.before_step()
    hook.after_end()


def measured(size: int) -> dict[tuple[int, str], list[float]]:
    """{(rank, what): (MiB, seconds)}."""
    found = defaultdict[tuple[int, str], list[float]](list)
    with tempfile.TemporaryDirectory() as base, get_context("fork").Pool(1, maxtasksperchild=1) as processes:
        others = Others(Path(base))
        for rank in range(1, size - 1):
            others, _ = processes.apply(turn, (rank, size, "save", others))
        for what, ranks in (("save", (size - 1, 0)), ("load", (0, size - 1))):
            for rank, is_traced in itertools.product(ranks, (True, False)):
                others.objects = [] if rank == 0 else others.objects
                others, costs = processes.apply(turn, (rank, size, what, others, is_traced))
                for name, cost in costs.items():
                    found[rank, name].append(cost)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[64, 256, 1024])
    sizes = parser.parse_args().processes
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # here, so that the processes of the turns have loaded all of torch
        turn(1, 2, "save", Others(Path(folder)))
    results = {size: measured(size) for size in sizes}
    print(f"| {' | '.join(['', *(f'{size:,} processes' for size in sizes)])} |\n|---|{'---|' * len(sizes)}")
    for first, who in ((False, "a rank"), (True, "rank 0")):
        for what, label, scale, unit in (
            ("step", "checks of a step", 1e6 / STEPS, "us"),
            ("save", "save", 1e3, "ms"),
            ("load", "load", 1e3, "ms"),
        ):
            cells = [results[size][0 if first else size - 1, what] for size in sizes]
            shown = [f"{scale * seconds:.0f} {unit}, {mib:.1f} MiB" for mib, seconds in cells]
            print(f"| {' | '.join([f'{who}: {label}', *shown])} |")


if __name__ == "__main__":
    main()

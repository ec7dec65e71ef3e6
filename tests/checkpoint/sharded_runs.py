"""What two or three processes do with sharded checkpoints, for `test_sharded_saving`."""

import builtins
import errno
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.distributed.layouts import checkpointer_of, content, full, load, step
from tests.toys import llama
from trainwright.base import dist
from trainwright.checkpoint import Checkpointer, CheckpointError, keep_newest, verify
from trainwright.engine.loop import TrainerBase
from trainwright.hooks import PeriodicCheckpointer


def full_disk(folder: str) -> dict[str, Any]:
    """The disk of rank 1 is full at its second save."""
    checkpointer, model, optimizer = checkpointer_of("zero 2", folder, 0.25)
    found: dict[str, Any] = {}
    checkpointer.save("model_1", iteration=1)
    checkpointer.wait()
    fsync = os.fsync
    if dist.get_rank() == 1:

        def fails(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = fails
    checkpointer.save("model_2", iteration=2)
    step(model, optimizer, 0.25)  # training continues
    found["after"] = content(model, optimizer)
    checkpointer._writer.background.wait()
    found["has_failed"] = checkpointer.has_failed()
    os.fsync = fsync
    try:
        checkpointer.wait()
    except OSError as error:
        found["error"] = (type(error).__name__, error.errno, str(error.filename), error.__notes__)
    dist.synchronize()
    found["names"] = sorted(os.listdir(folder))
    found["resumed"] = Checkpointer(model, folder, mesh=checkpointer.mesh).get_checkpoint_file()
    checkpointer.save("model_3", iteration=3)
    checkpointer.wait()
    dist.synchronize()
    found["then"] = sorted(os.listdir(folder))
    return found


def links(folder: str) -> dict[str, Any]:
    """The best and the last checkpoint of an iteration, and retention."""
    attached = {"config.json": b"{}", "preprocessor/words.txt": b"a b"}
    checkpointer, model, optimizer = checkpointer_of("zero 2", folder, 0.25, attachments=lambda: attached)
    checkpointer.prepare()
    for iteration in (0, 1, 2):
        step(model, optimizer, 0.1)
        name = f"model_{iteration:07d}"
        checkpointer.save(name, iteration=iteration, on_commit=lambda: keep_newest(folder, "model", 2))
        checkpointer.save("model_best", tag_last=False, iteration=iteration, metric=float(iteration))
    checkpointer.save("model_final", iteration=2)
    checkpointer.save("model_final", iteration=2, keep_trained=True, more=1)
    checkpointer.wait()
    dist.synchronize()
    return {"names": sorted(os.listdir(folder)), "weights": {n: full(value) for n, value in model.state_dict().items()}}


def apart(folder: str) -> str:
    """Every rank has a folder of its own, in a training that saves."""
    checkpointer, *_ = checkpointer_of("zero 2", Path(folder, str(dist.get_rank())), 0.25)
    trainer = NoSteps()
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, 1)])
    try:
        trainer.train(0, 2)
    except CheckpointError as error:
        return f"after {trainer.iterations_done} steps: {error}"
    return "not refused"


class NoSteps(TrainerBase):
    def run_step(self) -> None: ...


def states(folder: str) -> list[str]:
    """States that cannot be shared, and states of other kinds."""
    checkpointer, model, _ = checkpointer_of("zero 2", folder, 0.25)

    class Own:
        def state_dict(self) -> Any:
            return {"weight": model.head.weight} if dist.get_rank() == 1 else {"weight": torch.zeros(1)}

        def load_state_dict(self, state: Any) -> None: ...

    checkpointer.add_checkpointable("own", Own())
    said = []
    for other in (checkpointer, Checkpointer(model, folder)):
        try:
            other.save("one")
        except CheckpointError as error:
            said.append(f"{type(error).__name__}: {error}")
    return [*said, *os.listdir(folder)]


def train(folder: str, rank: int = -1, operation: int = -1) -> None:
    """Two steps, each saved; ``rank`` is killed before the n-th file operation of the second save."""
    checkpointer, model, optimizer = checkpointer_of("zero 2", folder, 0.25)
    done = checkpointer.resume_or_load("").get("iteration", 0)
    if done < 1:
        step(model, optimizer, 0.25)
        checkpointer.save("model_1", iteration=1)
        checkpointer.wait()
    if done < 2:
        step(model, optimizer, 0.5)
        count = count_operations(operation if dist.get_rank() == rank else -1)
        checkpointer.save("model_2", iteration=2)
        checkpointer.wait()
        Path(folder, f"operations-{dist.get_rank()}").write_text(str(count[0]))


def count_operations(fatal: int) -> list[int]:
    """Count file operations from now on; the process is killed before the one with this number."""
    count = [0]

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if count[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1
            return function(*args, **kwargs)

        return call

    for name in ("mkdir", "fsync", "rename", "replace", "link", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    builtins.open = counted(open)
    return count


def forked(function: Any, *arguments: Any, world_size: int = 2) -> list[int]:
    """Run ``function`` on forked processes of one group; returns how each ended."""
    import torch.distributed

    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world_size):
            if not (child := os.fork()):
                code = 1
                with suppress(BaseException):
                    torch.distributed.init_process_group(
                        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
                    )
                    function(*arguments)
                    code = 0
                os._exit(code)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def kill_each(base: str, every: int) -> list[Any]:
    """Kill each rank before every n-th operation of a save; then resume. Returns what differs from an unbroken run."""
    unbroken = Path(base, "unbroken")
    assert forked(train, str(unbroken)) == [0, 0]
    expected = load("one process", str(unbroken), values={"iteration": 2})
    cases = [
        (rank, operation)
        for rank in (0, 1)
        for operation in range(rank, int((unbroken / f"operations-{rank}").read_text()), every)
    ]
    faults: list[Any] = [] if len(cases) > 2 else ["too few operations", cases]
    for rank, operation in cases:
        folder = Path(base, f"{rank}-{operation}")
        codes = forked(train, str(folder), rank, operation)
        if codes[rank] != -signal.SIGKILL or codes[1 - rank] != 1:
            faults.append((rank, operation, codes))
        if (left := verify(folder / "model_1").iteration) != 1:
            faults.append((rank, operation, left))
        if (codes := forked(train, str(folder))) != [0, 0]:
            faults.append((rank, operation, "not resumed", codes))
            continue
        found = load("one process", str(folder), values={"iteration": 2})
        faults += [(rank, operation, n) for n, value in found[0].items() if not torch.equal(value, expected[0][n])]
        faults += [(rank, operation, p.name) for p in folder.iterdir() if p.name.startswith(".tmp")]
    return faults


def all_of_them(base: str) -> dict[str, Any]:
    found = {}
    for function in (full_disk, links, apart, states):
        Path(base, function.__name__).mkdir(exist_ok=True)
        dist.synchronize()
        found[function.__name__] = function(str(Path(base, function.__name__)))
        dist.synchronize()
    return found


def save_llama(folder: str) -> None:
    """A tied and an untied model of transformers, sharded over all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for is_tied in (True, False):
        model = llama(is_tied=is_tied)
        config = model.config.to_json_string().encode()
        fully_shard(model, mesh=mesh)
        checkpointer = Checkpointer(
            model, f"{folder}/{is_tied}", mesh=mesh, attachments=lambda config=config: {"config.json": config}
        )
        checkpointer.save("model_final", iteration=1)
        checkpointer.wait()

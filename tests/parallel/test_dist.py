import subprocess

from tests.fork_server import python

WORKER = """
import os, sys
import torch
import torch.distributed as dist
from trainwright.checkpoint import Checkpointer, CheckpointError, CheckpointTypeError

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)

class Gathered:
    '''State of all ranks, collected by all.'''
    own = None
    def __init__(self, value): self.value = value
    def state_dict(self):
        values = [None, None]
        dist.all_gather_object(values, self.value)
        return {"values": values}
    def load_state_dict(self, state): self.value = state["values"][rank]

try:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    run = folder + "/run"
    checkpointer = Checkpointer(model, run, memory=Gathered(f"rank {rank}"))
    checkpointer.save("model_0000009", iteration=9)

    other = Gathered("")
    assert Checkpointer(torch.nn.Linear(1, 1), run, memory=other).resume_or_load("") == {"iteration": 9}
    assert other.value == f"rank {rank}"

    # A full disk on the rank that writes is an error of the same type on all ranks.
    real_mkdir = os.mkdir
    def mkdir(*_): raise OSError(28, "No space left on device")
    os.mkdir = mkdir
    try:
        checkpointer.save("model_0000019", iteration=19)
        assert rank == 0 or not checkpointer.has_failed()
        checkpointer.wait()
        raise SystemExit("no error")
    except OSError as error:
        assert error.errno == 28 and "model_0000019" in str(error), error
    os.mkdir = real_mkdir

    # State that only one rank cannot save is refused by all: none waits for the other.
    bad = Gathered(1)
    if rank == 1:
        bad.state_dict = lambda: {"value": object()}
    else:
        bad.state_dict = lambda: {"value": 1}
    try:
        Checkpointer(model, run, bad=bad).save("model_0000029", iteration=29)
        raise SystemExit("no error")
    except CheckpointTypeError as error:
        assert "bad.value" in str(error)
    dist.barrier()
    with open(run + "/model_0000009/model.safetensors", "ab") as file:
        file.write(b"x") if rank == 0 else None
    dist.barrier()
    try:
        checkpointer.load(run + "/model_0000009")
        raise SystemExit("no error")
    except CheckpointError as error:
        assert "the manifest says" in str(error)
    print("passed")
finally:
    dist.destroy_process_group()
"""


def test_two_ranks_save_resume_and_fail_together(tmp_path):
    ranks = [
        subprocess.Popen(
            [python(), "-W", "ignore", "-c", WORKER, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            out, err = process.communicate(timeout=60)
            assert out.strip() == "passed", err
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert not (tmp_path / "run" / "model_0000029").exists()

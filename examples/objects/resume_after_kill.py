"""Shows exact resume: a run that is killed and restarted ends with the weights of an uninterrupted run.

    python examples/objects/resume_after_kill.py

The program starts itself, kills that run with SIGKILL after its first checkpoint, and restarts it.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from digits import digits
from torch import nn

from trainwright import Trainer, TrainingConfig
from trainwright.hooks import Callback

OUTPUT = Path("output", "objects", "resume_after_kill")


class Slow(Callback):
    """Slows the run down, so that it can be killed in time."""

    def on_train_batch_end(self, batch: object, logs: object) -> None:
        time.sleep(0.005)


def train(folder: Path) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    config = TrainingConfig(
        output_dir=folder,
        num_epochs=6,
        batch_size=32,
        learning_rate=3e-3,
        save_steps=20,  # in addition to the ends of epochs
        resume_from_checkpoint=True,  # also for the first start: without a checkpoint a new run begins
    )
    trainer = Trainer(model, config, *digits())
    trainer.add_callback(Slow())
    print(f"{folder.name} starts after step {trainer.state.global_step} of {trainer.total_steps}")
    trainer.train()
    return trainer


def kill_in_the_middle(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, __file__, str(folder)])
    while not Path(folder, "checkpoints", "060").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    print("killed:", process.wait() == -signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
        sys.exit()
    kill_in_the_middle(OUTPUT / "killed")
    resumed, uninterrupted = train(OUTPUT / "killed"), train(OUTPUT / "uninterrupted")
    pairs = zip(resumed.model.parameters(), uninterrupted.model.parameters(), strict=True)
    print("the same weights, bit for bit:", all(torch.equal(a, b) for a, b in pairs))
    print("the same evaluation:", resumed.evaluate() == uninterrupted.evaluate())

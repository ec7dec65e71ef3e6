"""Trains with a mirror, and kills itself at an operation on the store.

Usage: ``mirror_program.py FOLDER URL NUMBER MOMENT LOG``. ``NUMBER`` counts the operations that change the store, from
1; 0: none. ``MOMENT``: after the operation, or in the middle of it, with a part of its content written.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint import Checkpointer, keep_newest
from trainwright.checkpoint.mirror_store import Store

CHANGES = ("put_file", "pipe_file", "cp_file", "mv", "rm")
ITERATIONS, BEST_AT = 4, 1


def prune(folder: Path) -> None:
    keep_newest(folder, "model", 1)


def train(folder: Path, url: str | None) -> str:
    """Train from the newest checkpoint to the end; returns the weights as text."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpointer = Checkpointer(model, folder, optimizer=optimizer, mirror=url)
    done = checkpointer.resume_or_load("", resume=True).get("iteration", -1) + 1
    for iteration in range(done, ITERATIONS):
        step(model, optimizer, iteration)
        if iteration == BEST_AT:
            checkpointer.save("model_best", tag_last=False, iteration=iteration, accuracy=0.5)
            wait_for_copies(checkpointer)
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration, prune=prune)
        wait_for_copies(checkpointer)
    checkpointer.close()
    return text_of(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
    torch.manual_seed(iteration)
    optimizer.zero_grad()
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()


def wait_for_copies(checkpointer: Checkpointer) -> None:
    """Wait for the copy, so that a run makes the same operations each time."""
    checkpointer.wait()
    if checkpointer.mirror is not None:
        checkpointer.mirror._background.wait()


def text_of(model: nn.Module) -> str:
    return " ".join(value.detach().numpy().tobytes().hex() for value in model.state_dict().values())


def die_at(number: int, moment: str, log: Path) -> None:
    real, count = Store._do, 0

    def do(self: Store, operation: str, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        if operation not in CHANGES:
            return real(self, operation, *arguments, **options)
        count += 1
        target = arguments[-1 if operation in ("put_file", "cp_file", "mv") else 0]
        if count == number and moment == "half":
            if operation in ("put_file", "pipe_file"):
                content = Path(arguments[0]).read_bytes() if operation == "put_file" else arguments[1]
                real(self, "pipe_file", target, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(self, operation, *arguments, **options)
        with log.open("a") as file:
            file.write(f"{operation} {target}\n")
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Store._do = do  # type: ignore[method-assign]


if __name__ == "__main__":
    folder, url, number, moment, log = sys.argv[1:]
    die_at(int(number), moment, Path(log))
    train(Path(folder), url)

"""An out-of-memory error lists the largest tensors and settings that need less memory, in the names of its API."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inspect.check.seeded_bugs import Net, config_files, objects
from trainwright.engine.out_of_memory import add_memory_note, is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_are_of_the_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_largest_tensors_have_names(tmp_path: Path) -> None:
    trainer: Any = objects(tmp_path / "run")
    trainer.model = torch.nn.Linear(2000, 2500)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
    trainer.model(torch.ones(2, 2000)).sum().backward()
    trainer.optimizer.step()
    error = MemoryError()
    add_memory_note(error, trainer)
    lines = error.__notes__[0].splitlines()
    assert lines[0].startswith("Memory: 19.1 MiB parameters and buffers, 19.1 MiB gradients, 19.1 MiB states")
    assert {line.split("float32  ")[1] for line in lines[2:5]} == {
        *("weight", "gradient of weight", "momentum_buffer of weight")
    }


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (objects, ["batch_size=16, gradient_accumulation_steps=2", "gradient_checkpointing=True", "'bf16'"]),
        (
            config_files,
            [
                "train.train_micro_batch_size=16 train.num_accumulation_steps=2 train.global_batch_size=32",
                "train.activation_checkpoint.enabled=True",
                "trainwright find batch-size",
            ],
        ),
    ],
)
def test_the_error_of_a_training(build: Any, settings: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    trainer = build(tmp_path / "run")
    calls = []

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(self, *arguments, **named)

    plain = Net.forward
    monkeypatch.setattr(Net, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    note = next(note for note in raised.value.__notes__ if note.startswith("Memory:"))
    assert "states of the optimizer" in note.splitlines()[0]
    for text in settings:
        assert text in note

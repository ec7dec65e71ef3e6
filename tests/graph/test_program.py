"""Programs: compiled in a process that has compiled nothing, kept on disk, recorded once and replayed."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.graph.conftest import Run, Small, captures, has_compiler, train_by_trainer
from tests.graph.test_step import checkpoints
from trainwright.graph.program import Replayed

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


class Recorder:
    """As a CUDA graph: recording computes nothing, and each replay writes to the outputs of the recording."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, launch: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], object], Sequence[Tensor]]:
        self.recorded += 1
        outputs = [torch.zeros(())]

        def replay() -> None:
            for output, value in zip(outputs, launch(), strict=True):
                output.copy_(value)

        return replay, outputs


def add_to(inputs: list[Tensor]) -> list[Tensor]:
    batch, total = inputs
    total.add_(batch)
    return [total * 10]


def test_each_call_computes_once_with_its_own_batch_and_its_own_outputs() -> None:
    recorder, total = Recorder(), torch.zeros(())
    call = Replayed(add_to, [0], recorder)
    figures = [call([torch.tensor(float(value)), total])[0] for value in range(1, 7)]
    assert [figure.item() for figure in figures] == [10.0, 30.0, 60.0, 100.0, 150.0, 210.0]
    assert total == 21
    assert recorder.recorded == 1


def test_memory_that_has_moved_is_recorded_again() -> None:
    recorder, total = Recorder(), torch.zeros(())
    call = Replayed(add_to, [0], recorder)
    for _ in range(5):
        call([torch.ones(()), total])
    total.data = torch.tensor(100.0)
    assert call([torch.ones(()), total])[0] == 1010
    assert recorder.recorded == 2


def test_what_cannot_be_recorded_is_called(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(launch: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    total = torch.zeros(())
    call = Replayed(add_to, [0], refuse)
    for _ in range(5):
        call([torch.ones(()), total])
    assert total == 5
    assert [record.getMessage() for record in caplog.records] == [
        "Graph mode: the launches of a step are not recorded in a CUDA graph: operation not permitted when stream is"
        " capturing."
    ]


NO_FOLDER = """
import logging, sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from trainwright import Trainer, TrainingConfig

logging.basicConfig(level="INFO")
data = TensorDataset(torch.randn(32, 6), torch.arange(32) % 4)
config = TrainingConfig(
    output_dir=sys.argv[1], graph=True, loss="CrossEntropyLoss", batch_size=8, num_epochs=2, eval_strategy="no",
    save_enabled=False, progress_bar=False, metrics=None,
)
for _ in range(2):
    trainer = Trainer(nn.Linear(6, 4), config, train_dataset=data)
    trainer.train()
    assert trainer.iter == 8
"""


@pytest.mark.exhaustive
def test_a_folder_that_cannot_be_used_leaves_the_steps_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(blocked))
    done = subprocess.run(
        [sys.executable, "-c", NO_FOLDER, str(tmp_path / "run")],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "stay eager" in line]
    assert lines
    assert "torch's compiler cannot be imported (FileExistsError" in lines[0]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """The folder of a program that inductor has compiled, and the losses of its training."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        return folder, Run("inductor", net=Small, updates=5).values()


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("damage", ["text", "half"])
def test_a_program_on_disk_that_cannot_be_read_is_compiled_again(
    damage: str,
    compiled: tuple[Path, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, losses = compiled
    shutil.copytree(folder, tmp_path / "cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (kept,) = (tmp_path / "cache" / "trainwright").iterdir()
    content = kept.read_bytes()
    kept.write_bytes(b"not a program" if damage == "text" else content[: len(content) // 2])
    second = Run("inductor", net=Small, updates=5)
    third = Run("inductor", net=Small, updates=5)
    assert caplog.text.count("cannot be read and is compiled again") == 1
    assert ["loaded from disk" in line for line in captures(caplog)] == [False, True]
    assert losses.tolist() == second.values().tolist() == third.values().tolist()
    assert [*(tmp_path / "cache" / "trainwright").iterdir()] == [kept]


FRESH = """
import logging, torch
from torch import nn
from tests.graph.conftest import losses

def layers():
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    return *first, nn.Dropout(0.2), nn.Flatten(), nn.Linear(72, 4)

logging.basicConfig(level="INFO")
torch.testing.assert_close(losses("inductor", *layers())[0], losses(None, *layers())[0], rtol=1e-5, atol=1e-5)
"""


@pytest.mark.exhaustive
@needs_compiler
def test_a_network_with_pooling_is_a_program_in_a_process_that_has_compiled_nothing() -> None:
    """Where a test before it has compiled, inductor is there whole already."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FRESH], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "are one program" in done.stderr
    assert "stay eager" not in done.stderr


@needs_compiler
@pytest.mark.exhaustive
def test_a_resumed_program_of_inductor_goes_on_bit_for_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then taken from disk, and the log says so."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    saving: dict[str, Any] = {"save_steps": 25, "save_total_limit": 9}
    whole = train_by_trainer(tmp_path / "whole", **saving)
    resumed = train_by_trainer(tmp_path / "resumed", str(checkpoints(tmp_path / "whole")), **saving)
    found = re.findall(r"are one program \(.*\), (.*) in \d+\.\d s\.", caplog.text)
    assert found == ["compiled by inductor", "loaded from disk"]
    eager = train_by_trainer(tmp_path / "eager", graph=False, save_enabled=False)
    losses = [torch.tensor([v for v, _ in each.storage.history("total_loss").values()]) for each in (whole, eager)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)  # fused kernels sum in another order
    assert resumed.iter == whole.iter == 60
    assert "Trained 40 iterations" in caplog.text
    for left, right in zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(left, right)
    theirs, ours = (trainer.optimizer.state_dict()["state"] for trainer in (whole, resumed))
    for key, state in theirs.items():
        assert all(torch.equal(value, ours[key][name]) for name, value in state.items())


@pytest.mark.exhaustive
@needs_compiler
def test_a_second_start_compiles_nothing(compiled: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, losses = compiled
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    kept = list((folder / "trainwright").iterdir())
    assert len(kept) == 1

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a compiler was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(subprocess, "check_output", refuse)
    assert Run("inductor", net=Small, updates=5).values().tolist() == losses.tolist()
    assert list((folder / "trainwright").iterdir()) == kept

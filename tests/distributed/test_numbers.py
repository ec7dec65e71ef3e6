"""Two processes: NaN on one of them is found by both."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.torchrun import torchrun
from trainwright.checkpoint import verify

HERE = Path(__file__).parent
TRAIN_NET = HERE.parents[1] / "tools" / "train_net.py"


@dataclass
class Run:
    code: int
    output: str
    folder: Path
    seconds: float

    def checkpoints(self) -> list[str]:
        return sorted(p.name for p in self.folder.glob("model_0*"))


def train(folder: Path, *arguments: str) -> Run:
    start = time.monotonic()
    config = ("--config-file", HERE / "numbers_project.py")
    done = torchrun(TRAIN_NET, *config, *arguments, f"train.output_dir={folder}", code=None)
    return Run(done.returncode, done.stdout, folder, time.monotonic() - start)


@pytest.mark.parametrize(
    ("spoils", "at", "arguments", "says", "saved"),
    [
        ("loss", 6, (), "Iteration 7: total_loss is nan", 1),
        ("own metric", 6, (), "Iteration 7: aux_loss is nan", 1),
        ("loss", 7, (), "Iteration 8: total_loss is nan", 1),  # the last one before a save
        ("loss", 4 * 2 + 1, ("train.num_accumulation_steps=2",), "Iteration 5: total_loss is nan", 1),
        ("gradient", 6, ("train.log_period=100",), "parameters (body.0.weight, body.0.bias) are not", 1),
    ],
    ids=["in a period", "seen by one rank", "before a save", "in a window", "gradient"],
)
@pytest.mark.exhaustive(every=6)
def test_what_one_rank_meets_ends_all_of_them(
    tmp_path: Path, spoils: str, at: int, arguments: tuple[str, ...], says: str, saved: int
) -> None:
    run = train(tmp_path / "run", f"model.spoils={spoils}", f"model.at={at}", *arguments)
    assert run.code != 0
    assert run.seconds < 30
    assert says in run.output, run.output
    printed = run.output.count(
        "trainwright: "
    )  # both have said it, with no traceback; or one, and the other that it has
    assert printed >= 1, run.output
    assert printed + run.output.count(", because rank ") == 2, run.output
    assert "Traceback (most recent call last)" not in run.output.partition("torch/distributed")[0], run.output
    assert "exitcode  : 1" in run.output
    assert len(run.checkpoints()) == saved
    verify(run.folder / run.checkpoints()[-1])
    weights = load_file(run.folder / run.checkpoints()[-1] / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())

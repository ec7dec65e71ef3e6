"""Two processes: NaN on one of them is found by both."""

import time
from pathlib import Path

import pytest

from tests.distributed.test_data_parallel import train
from trainwright.checkpoint import verify


@pytest.mark.parametrize(
    ("spoils", "at", "arguments", "says"),
    [
        ("loss", 6, (), "Iteration 7: total_loss is nan"),
        ("own metric", 6, (), "Iteration 7: aux_loss is nan"),
        ("loss", 7, (), "Iteration 8: total_loss is nan"),  # the last one before a save
        ("loss", 4 * 2 + 1, ("train.num_accumulation_steps=2",), "Iteration 5: total_loss is nan"),
        ("gradient", 6, ("train.log_period=100",), "parameters (body.0.weight, body.0.bias) are not"),
    ],
    ids=["in a period", "seen by one rank", "before a save", "in a window", "gradient"],
)
@pytest.mark.exhaustive(every=6)
def test_what_one_rank_meets_ends_all_of_them(
    tmp_path: Path, spoils: str, at: int, arguments: tuple[str, ...], says: str
) -> None:
    start = time.monotonic()
    planted = (f"model.spoils={spoils}", f"model.at={at}")
    run = train(tmp_path / "run", *planted, *arguments, processes=2, config="numbers_project.py")
    assert run.code != 0
    assert time.monotonic() - start < 30
    assert says in run.output, run.output
    printed = run.output.count(
        "trainwright: "
    )  # both have said it, with no traceback; or one, and the other that it has
    assert printed >= 1, run.output
    assert printed + run.output.count(", because rank ") == 2, run.output
    assert "Traceback (most recent call last)" not in run.output.partition("torch/distributed")[0], run.output
    assert "exitcode  : 1" in run.output
    (checkpoint,) = run.folder.glob("model_0*")
    verify(checkpoint)
    weights = run.weights(checkpoint.name)
    assert all(value.isfinite().all() for value in weights.values())

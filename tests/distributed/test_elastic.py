"""Another number of processes keeps the samples of each update; a restart by the launcher needs no other command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.distributed.test_data_parallel import Run, train
from tests.ranks import on_ranks
from tests.torchrun import torchrun
from tests.toys import quiet
from trainwright import Trainer
from trainwright.base.errors import ConfigError

SCRIPT = Path(__file__).parent / "restart_script.py"

CONSTANT = ("train.scheduler.warmup_factor=1.0", "train.scheduler.alpha=1.0")  # whatever the length of a run
SIZES = ("train.train_micro_batch_size=2", "train.global_batch_size=8", *CONSTANT)


def seen_by(*runs: Run) -> dict[int, list[int]]:
    """The samples of each iteration; a later run counts."""
    return {iteration: numbers for run in runs for iteration, numbers in run.seen().items()}


@pytest.mark.parametrize(
    "changes", [[(2, 3), (1, 6)], pytest.param([(2, 3), (1, 6), (4, 9)], marks=pytest.mark.exhaustive)]
)
def test_other_numbers_of_processes_train_on_the_samples_of_one_run(
    tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    whole = train(tmp_path / "whole", *SIZES, f"train.train_iter={changes[-1][1]}", processes=2)
    assert whole.code == 0, whole.output
    runs, folder = [], tmp_path / "run"
    for processes, until in changes:
        own = ("--resume", "train.dist.elastic=True", "train.global_batch_size=null") if runs else ()
        run = train(folder, *SIZES, *own, f"train.train_iter={until}", processes=processes)
        assert run.code == 0, run.output
        runs.append(run)
    assert "1 data ranks instead of 2, 8 samples per update as before" in runs[1].output
    assert seen_by(*runs) == whole.seen()
    losses, found = (
        {i: row["total_loss"] for i, row in run.rows().items() if i < changes[-1][1]} for run in (whole, runs[-1])
    )
    assert found == pytest.approx(losses, rel=1e-5)


def test_a_number_of_processes_that_does_not_divide_the_batch_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = train(folder, *SIZES, "train.train_iter=2", processes=2)
    assert first.code == 0, first.output
    rest = train(folder, "--resume", "train.dist.elastic=True", "train.train_micro_batch_size=3", "train.train_iter=4")
    assert rest.code != 0
    assert "global_batch_size=8" in rest.output, rest.output
    assert "train_micro_batch_size=3" in rest.output


def train_by_objects(folder: Path, epochs: int, accumulation: int, **settings: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 4), torch.randint(3, (48,)))
    settings |= {"num_epochs": epochs, "batch_size": 4, "gradient_accumulation_steps": accumulation, "log_steps": 1}
    Trainer(nn.Linear(4, 3), quiet(folder, optimizer="AdamW", lr=0.01, metric=None, **settings), data).train()
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        train_by_objects(folder, 2, 2, resume_from_checkpoint=True, elastic=True)
    return str(error.value)


def resume_by_objects(folder: Path, epochs: int) -> list[dict[str, Any]]:
    return train_by_objects(folder, epochs, 2, resume_from_checkpoint=True, elastic=True)


def test_objects_keep_the_samples_of_an_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainwright")
    whole = train_by_objects(tmp_path / "whole", 3, 4)
    folder = tmp_path / "run"
    on_ranks(train_by_objects, folder, 1, 2)  # 2 processes x 2 batches of 4 samples
    resume_by_objects(folder, 2)
    assert "Elastic: 4 batches per update instead of 2, 16 samples as before." in caplog.messages
    rows = on_ranks(resume_by_objects, folder, 3, world_size=4)[0]
    assert [row["total_loss"] for row in rows] == pytest.approx([row["total_loss"] for row in whole], rel=1e-5)
    assert "an update of the checkpoint has 16 samples" in on_ranks(refused, folder, world_size=3)[0]


def launch(folder: Path, *arguments: str) -> str:
    return torchrun(SCRIPT, folder, *arguments, options=("--max-restarts", "1")).stdout


@pytest.mark.exhaustive
def test_a_killed_rank_is_restarted_and_the_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    launch(tmp_path / "whole")
    output = launch(tmp_path / "run", "kill")
    assert "The launcher has restarted this run: it continues from its latest checkpoint." in output
    for rank in range(2):
        whole, run = ((tmp_path / f"{name}-{rank}").read_text().splitlines() for name in ("whole-seen-0", "run-seen-1"))
        assert whole[5:] == run  # the checkpoint was saved after 5 updates
    last = [next((tmp_path / name / "checkpoints" / "16").glob("model.safetensors")) for name in ("whole", "run")]
    assert last[0].read_bytes() == last[1].read_bytes()

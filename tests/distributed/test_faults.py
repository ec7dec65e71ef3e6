"""A rank that fails or hangs ends the job: its own traceback first and once, and the stacks of all where one hangs."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kinds import only_in_torture
from tests.ranks import on_ranks
from tests.torchrun import torchrun
from tests.toys import file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.errors import ConfigError
from trainwright.data import ColumnDataset

SCRIPT = Path(__file__).parent / "layout_faults_script.py"
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "data": (3, {}),
    "tensor": (2, {"tensor_parallel_size": 2}),
    "pipeline": (2, {"pipeline_parallel_size": 2}),
    "ZeRO 3": (2, {"zero_stage": 3}),
    "hybrid": (4, {"zero_stage": 3, "replicate_size": 2}),
    "pipeline, ZeRO 2": (4, {"pipeline_parallel_size": 2, "zero_stage": 2}),
    "tensor, pipeline": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}
OFTEN = ("data", "tensor, pipeline")
FAULTS = ("raise", "data", "hook", "hang", "kill")


def run(folder: Path, how: str, processes: int, layout: dict[str, int]) -> tuple[float, str]:
    """Seconds from the failure to the end of the job, and its output."""
    done = torchrun(SCRIPT, folder, how, json.dumps(layout), processes=processes, code=None)
    end = time.time()
    assert done.returncode != 0, done.stdout
    failed = re.search(r"failing at ([\d.]+)", done.stdout)
    assert failed, done.stdout
    return end - float(failed[1]), done.stdout


class Branches(nn.Module):
    """Leaves out a layer from the sixth batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra, self.calls = nn.Linear(4, 1), nn.Linear(4, 1), 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        self.calls += 1
        scores = self.layer(x) + (self.extra(x) if self.calls < 6 else 0)
        return {"loss": (scores - labels).square().mean()}


def leave_out(folder: Path, api: str, finds: bool) -> str:
    """The message of the error; empty: there was none."""
    data = ColumnDataset(x=torch.ones(80, 4), labels=torch.ones(80, 1))
    trainer: Any
    if api == "TrainingConfig":
        config = quiet(folder, batch_size=4, num_epochs=1, find_unused_parameters=finds)
        trainer = Trainer(Branches(), config, train_dataset=data)
    else:
        cfg = file_config(folder, Branches, lambda: data, train_iter=10, train_micro_batch_size=4)
        cfg.optim, cfg.train.dist.find_unused_parameters = LazyCall(torch.optim.SGD)(lr=0.01), finds
        trainer = DefaultTrainer(cfg)
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    return ""


def leave_out_all(folder: Path) -> list[tuple[str, str]]:
    apis = ("TrainingConfig", "train.dist")
    return [(api, leave_out(folder / f"{api}-{finds}", api, finds)) for finds in (False, True) for api in apis]


@pytest.mark.exhaustive
def test_a_parameter_that_a_later_update_leaves_out_is_named_with_the_setting(tmp_path: Path) -> None:
    for without in on_ranks(leave_out_all, tmp_path):
        for where, message in without[:2]:
            assert "The update before this one left out parameters that earlier ones used: extra." in message
            assert f"set {where}.find_unused_parameters=True" in message
        assert [message for _, message in without[2:]] == ["", ""]


def of_layout(layout: str, how: str) -> Any:
    exhaustive = [] if (layout, how) in (("data", "raise"), ("data", "hang")) else [pytest.mark.exhaustive]
    marks = exhaustive if layout in OFTEN and how in ("raise", "hang", "kill") else [only_in_torture]
    return pytest.param(layout, how, marks=marks, id=f"{layout}-{how}")


@pytest.mark.parametrize(("layout", "how"), [of_layout(layout, how) for layout in LAYOUTS for how in FAULTS])
def test_a_failure_of_one_process_under_a_layout(tmp_path: Path, layout: str, how: str) -> None:
    processes, settings = LAYOUTS[layout]
    seconds, output = run(tmp_path / "run", how, processes, settings)
    assert seconds < 30, output
    ours = output.partition("torch/distributed/elastic")[0]  # then the launcher's own report
    assert "Connection closed by peer" not in ours
    last = processes - 1
    if how == "kill":
        assert "exitcode  : -9" in output
        assert "Traceback (most recent call last)" not in ours, output
    elif how == "hang":
        assert seconds >= 3, output
        assert "waited at one place for 3 s (hang_timeout_s)" in ours
        assert re.search(r"ranks? 0[^:]*: waits? for the others in iteration 6, at ", ours), output
        for rank in range(processes):
            assert f"rank {rank}: the stacks of all threads in iteration 6:" in ours, output
        assert re.search(rf"rank {last}: did not come in iteration 6, at layout_faults_script.py:\d+ in fail", ours), (
            output
        )
    else:
        assert ours.count("Traceback (most recent call last)") == 1, output
        assert ours.count("ValueError: the last process fails") == 1, output
        lines = re.findall(r"rank \d: ended in iteration (\d), because rank (\d) failed in iteration 6", output)
        assert all(rank == str(last) for _, rank in lines), output  # the launcher may end the others before their line
        traceback = ours.index(f"[rank{last}]: Traceback")
        assert all(line.start() > traceback for line in re.finditer(", because rank", ours)), output
        cause = output.partition("Root Cause")[2]
        assert re.search(rf"rank +: {last} .*ValueError: the last process fails", cause, re.DOTALL), output

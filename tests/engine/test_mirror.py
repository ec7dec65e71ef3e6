"""A run that resumes on another machine, from the mirror of its checkpoints, has the values of one that stayed."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fork_server import python
from tests.toys import Classifier, assert_equal_weights, file_config, points, quiet
from tests.toys import trained as train
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.errors import ConfigError
from trainwright.checkpoint.mirror_store import Store
from trainwright.data import ColumnDataset, build_image_train_loader
from trainwright.engine import TrainingLoop
from trainwright.hooks import CallbackHook

STEPS = 12
KILLS = 40 if os.environ.get("TORTURE") else 3


def model() -> Classifier:
    torch.manual_seed(3)
    return Classifier(body=nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)))


def python_trainer(folder: Path, mirror: str | None, *, resumes: bool, **settings: Any) -> Trainer:
    config = quiet(
        folder, batch_size=4, num_epochs=3, log_steps=1, save_steps=2, max_to_keep=2, learning_rate=1e-2, seed=5,
        checkpoint_mirror=mirror, resume_from_checkpoint=resumes, eval_strategy="step", eval_steps=4, **settings,
    )  # fmt: skip
    return Trainer(model(), config, train_dataset=points(16), eval_dataset=points(8, seed=1))


def file_trainer(folder: Path, mirror: str | None, *, resumes: bool, **settings: Any) -> DefaultTrainer:
    cfg = file_config(folder, LazyCall(model)(), LazyCall(points)(length=16), LazyCall(points)(length=8, seed=1))
    cfg.train.update({"train_iter": STEPS, "train_micro_batch_size": 4, "log_period": 1, "resume": resumes})
    cfg.train.checkpointer = {"period": 2, "max_to_keep": 2, "mirror": mirror, **settings}
    cfg.train.evaluation.update({"eval_period": 4, "enabled": True, "eval_metric": "Acc@1"})
    cfg.train.topk = [1]
    return DefaultTrainer(cfg)


BOTH = {"Python": python_trainer, "config file": file_trainer}


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without times."""
    found = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "time" not in name and "speed" not in name} for row in found]


@pytest.mark.parametrize("api", BOTH)
def test_a_run_goes_on_on_another_machine_bitwise(tmp_path: Path, api: str) -> None:
    url, make = f"file://{tmp_path}/mirror", BOTH[api]
    unbroken = train(make(tmp_path / "unbroken", None, resumes=False))
    train(make(tmp_path / "first", url, resumes=False), stop=7)
    assert not list((tmp_path / "first").rglob(".tmp-*"))
    shutil.rmtree(tmp_path / "first")

    second = make(tmp_path / "second", url, resumes=True)
    assert second.start_iter == 6
    train(second)
    assert_equal_weights(second.model, unbroken.model)
    assert rows(tmp_path / "second") == rows(tmp_path / "unbroken")
    assert second.storage.latest().keys() == unbroken.storage.latest().keys()
    starts = json.loads((tmp_path / "second" / "run.json").read_text())["starts"]
    assert len(starts) == 2

    third = make(tmp_path / "third", url, resumes=True)
    assert third.start_iter == STEPS
    assert_equal_weights(third.model, unbroken.model)
    for name in ("metrics.json", "run.json", "log.txt"):
        there = (tmp_path / "second" / name).read_text()
        assert (tmp_path / "third" / name).read_text()[: len(there)] == there or name == "log.txt"


@pytest.mark.parametrize("api", BOTH)
def test_a_new_run_does_not_write_into_the_mirror_of_another(tmp_path: Path, api: str) -> None:
    url, make = f"file://{tmp_path}/mirror", BOTH[api]
    train(make(tmp_path / "first", url, resumes=False), stop=3)
    with pytest.raises(ConfigError, match="has the checkpoints of another run, and this is a new one"):
        make(tmp_path / "second", url, resumes=False).train()
    train(make(tmp_path / "third", f"{url}3", resumes=False), stop=3)
    with pytest.raises(ConfigError, match="of another run than"):
        make(tmp_path / "third", url, resumes=True)


@pytest.mark.parametrize("api", BOTH)
def test_files_of_no_run_are_not_replaced(tmp_path: Path, api: str) -> None:
    url, make = f"file://{tmp_path}/mirror", BOTH[api]
    train(make(tmp_path / "first", url, resumes=False), stop=3)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "metrics.json").write_text("mine")
    with pytest.raises(ConfigError, match="files that no run wrote, under names of the run in"):
        make(tmp_path / "second", url, resumes=True)
    assert (tmp_path / "second" / "metrics.json").read_text() == "mine"


@pytest.mark.parametrize("api", BOTH)
def test_a_mirror_that_cannot_be_written_is_an_error_before_the_run(tmp_path: Path, api: str) -> None:
    (tmp_path / "file").write_text("")
    setting = {"Python": "TrainingConfig.checkpoint_mirror", "config file": "train.checkpointer.mirror"}[api]
    with pytest.raises(ConfigError, match=f"{setting}: file://.*checkpoints cannot be copied there"):
        BOTH[api](tmp_path / "run", f"file://{tmp_path}/file/mirror", resumes=False)


@pytest.mark.slow
@pytest.mark.parametrize("api", BOTH)
def test_a_run_that_loses_its_machine_again_and_again_becomes_what_an_unbroken_one_does(
    tmp_path: Path, api: str, s3: str
) -> None:
    unbroken = train(BOTH[api](tmp_path / "unbroken", None, resumes=False))
    program = str(Path(__file__).with_name("mirror_program.py"))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    rng, kills = random.Random(7), 0
    for number in range(60):
        folder = tmp_path / str(number)  # a new machine
        with (tmp_path / "output").open("w") as output:
            process = subprocess.Popen(
                [python(), program, api, str(folder), s3], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            code = process.wait(rng.uniform(1.5, 4.0) if kills < KILLS else 60)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        assert code in (0, -9), (tmp_path / "output").read_text()
        if code == 0:
            break
        kills += 1
    last = BOTH[api](tmp_path / "last", s3, resumes=True)
    assert last.start_iter == STEPS
    assert_equal_weights(last.model, unbroken.model)
    assert rows(tmp_path / "last") == rows(tmp_path / "unbroken")
    print(f"{kills} kills")


@pytest.mark.parametrize("api", BOTH)
def test_a_queue_that_starts_the_job_again_on_another_machine_continues_it(
    tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, make = f"file://{tmp_path}/mirror", BOTH[api]
    monkeypatch.setenv("TRAINWRIGHT_RESUME", "1")  # as `trainwright launch --resume` sets it
    train(make(tmp_path / "first", url, resumes=False), stop=7)
    assert make(tmp_path / "second", url, resumes=False).start_iter == 6


@pytest.mark.parametrize("api", BOTH)
def test_a_secret_in_the_url_is_in_no_file_of_the_run(tmp_path: Path, api: str) -> None:
    url = f"memory://me:pass-word-1@{tmp_path}/mirror"
    train(BOTH[api](tmp_path / "run", url, resumes=False), stop=3)
    folder = tmp_path / "run"
    assert not [file for file in folder.rglob("*") if file.is_file() and b"pass-word-1" in file.read_bytes()]
    assert Store(url).sizes("")


def test_a_large_file_of_the_run_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/mirror"
    monkeypatch.setattr("trainwright.checkpoint.mirror._MAX_RUN_FILE", 200)
    train(python_trainer(tmp_path / "run", url, resumes=False))
    assert caplog.text.count("run.json has 0.0 MB, and is not copied") == 1
    again = python_trainer(tmp_path / "again", url, resumes=True)
    assert again.start_iter == STEPS
    assert not (tmp_path / "again" / "run.json").exists()


@pytest.mark.parametrize("api", BOTH)
def test_copies_for_checks_and_dev_runs_use_no_mirror(tmp_path: Path, api: str) -> None:
    url = f"file://{tmp_path}/mirror"
    trainer = BOTH[api](tmp_path / "run", url, resumes=False)
    assert trainer.run.copy(tmp_path / "copy").run.checkpointer.mirror is None
    trainer = python_trainer(tmp_path / "dev", url, resumes=False, fast_dev_run=True)
    assert trainer.checkpointer.mirror is None
    assert not Store(url).entries()


@pytest.mark.parametrize("api", BOTH)
def test_sigterm_waits_for_the_copy_and_says_so(
    tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, real = f"file://{tmp_path}/mirror", Store.upload

    def slow(self: Store, path: Path, name: str) -> None:
        time.sleep(0.05)
        real(self, path, name)

    monkeypatch.setattr(Store, "upload", slow)
    caplog.set_level("INFO")
    trainer = BOTH[api](tmp_path / "run", url, resumes=False)
    kill = CallbackHook(after_step=lambda at: os.kill(os.getpid(), signal.SIGTERM) if at.iter == 4 else None)
    trainer.register_hooks([kill])
    with pytest.raises(SystemExit):
        trainer.train()
    assert re.search(r"waiting until .* \(0.0 MB\) is copied to file://", caplog.text)
    assert BOTH[api](tmp_path / "again", url, resumes=True).start_iter == 5


def test_a_loop_of_the_users_own_continues_from_its_mirror_exactly(tmp_path: Path) -> None:
    def run(folder: str, max_iter: int, mirror: Path | None) -> tuple[int, nn.Module]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
        loader, _, _ = build_image_train_loader(ColumnDataset(inputs=inputs), 8, num_workers=0)
        url = None if mirror is None else mirror.as_uri()
        loop = TrainingLoop(
            model, optimizer, loader, max_iter=max_iter, output_dir=tmp_path / folder, save_period=2, mirror=url
        )
        start = loop.start_iter
        for batch in loop:
            model(batch["inputs"]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return start, model

    mirror = tmp_path / "mirror"
    mirror.mkdir()
    assert run("first", 6, mirror)[0] == 0
    start, model = run("second", 10, mirror)
    assert start == 6
    assert_equal_weights(model, run("whole", 10, None)[1])

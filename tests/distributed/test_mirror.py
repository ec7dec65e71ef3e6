"""The mirror of a sharded run: every process uploads its own parts, and a resume elsewhere is bitwise."""

import ctypes
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.test_sharded_resume import full
from tests.engine.test_sharded_resume import train as train_stages
from tests.ranks import on_ranks
from tests.toys import Classifier, file_config, points, quiet, trained
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.dist import get_rank, is_main_process, synchronize
from trainwright.checkpoint.mirror_report import inspect_mirror
from trainwright.checkpoint.mirror_store import Store

pytestmark = pytest.mark.slow
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a disk for each process"
)


def model() -> Classifier:
    torch.manual_seed(3)
    return Classifier(body=nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.3), nn.Linear(32, 2)))


def python_trainer(folder: Path, mirror: str | None, *, resumes: bool, zero_stage: int = 3) -> Trainer:
    config = quiet(
        folder, batch_size=4, num_epochs=2, log_steps=1, save_steps=2, max_to_keep=2, learning_rate=1e-2, seed=5,
        checkpoint_mirror=mirror, resume_from_checkpoint=resumes, eval_strategy="no", optimizer="AdamW",
        zero_stage=zero_stage,
    )  # fmt: skip
    return Trainer(model(), config, train_dataset=points(32))


def file_trainer(folder: Path, mirror: str | None, *, resumes: bool) -> DefaultTrainer:
    cfg = file_config(folder, LazyCall(model)(), LazyCall(points)(length=32))
    cfg.train.update({"train_iter": 8, "train_micro_batch_size": 4, "log_period": 1, "resume": resumes})
    cfg.train.checkpointer = {"period": 2, "max_to_keep": 2, "mirror": mirror}
    cfg.train.zero_optimization = {"enabled": True, "stage": 3}
    return DefaultTrainer(cfg)


BOTH = {"Python": python_trainer, "config file": file_trainer}


def train(trainer: Any, stop: int | None = None) -> dict[str, torch.Tensor]:
    trained(trainer, stop=stop)
    return {name: full(value) for name, value in trainer.model.state_dict().items()}


def on_another_machine(base: str, api: str) -> tuple[Any, ...]:
    make, url, here = BOTH[api], f"file://{base}/mirror", Path(base)
    unbroken = train(make(here / "unbroken", None, resumes=False))
    train(make(here / "first", url, resumes=False), stop=5)
    synchronize()
    if is_main_process():
        shutil.rmtree(here / "first")
    synchronize()
    second = make(here / "second", url, resumes=True)
    start = second.start_iter
    return start, unbroken, train(second)


@pytest.mark.parametrize("api", BOTH)
def test_a_sharded_run_goes_on_on_another_machine_bitwise(tmp_path: Path, api: str) -> None:
    for start, unbroken, resumed in on_ranks(on_another_machine, str(tmp_path), api, world_size=2, timeout=120):
        assert start == 4
        assert all(torch.equal(resumed[name], value) for name, value in unbroken.items())
    rows = [[json.loads(line) for line in (tmp_path / run / "metrics.json").read_text().splitlines()]
            for run in ("unbroken", "second")]  # fmt: skip
    assert [[row["iteration"], row["total_loss"]] for row in rows[0]] == [
        [row["iteration"], row["total_loss"]] for row in rows[1]
    ]
    names = Store(f"file://{tmp_path}/mirror").sizes("")
    assert {name.split("/")[-1] for name in names} >= {"model-00000-of-00002.safetensors", "shards.index"}
    assert not list(tmp_path.rglob(".tmp-*"))


def upload_of_each(base: str) -> list[str]:
    uploads, real = list[str](), Store.upload

    def upload(self: Store, path: Path, name: str) -> None:
        uploads.append(name.split("/")[-1])
        real(self, path, name)

    Store.upload = upload  # type: ignore[method-assign]
    train(python_trainer(Path(base, "run"), f"file://{base}/mirror", resumes=False))
    return uploads


def test_every_process_uploads_its_own_parts(tmp_path: Path) -> None:
    first, second = on_ranks(upload_of_each, str(tmp_path), world_size=2, timeout=120)
    assert set(second) == {
        "model-00001-of-00002.safetensors", "optimizer-00001-of-00002.safetensors",
        "trainer_ranks-00001-of-00002.safetensors",
    }  # fmt: skip
    assert not set(first) & set(second)


def failure_of_one(base: str) -> None:
    if get_rank() == 1:
        real = Store._do

        def do(self: Store, operation: str, *arguments: Any, **options: Any) -> Any:
            if operation == "put_file":
                raise OSError("no network here")
            return real(self, operation, *arguments, **options)

        Store._do = do  # type: ignore[method-assign]
    train(python_trainer(Path(base, "run"), f"file://{base}/mirror", resumes=False))


def test_if_one_process_cannot_upload_nothing_is_complete_and_the_training_goes_on(tmp_path: Path) -> None:
    on_ranks(failure_of_one, str(tmp_path), world_size=2, timeout=120)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "no network here). The training continues" in log
    assert "is NOT in the mirror" in log
    assert not [name for name in Store(f"file://{tmp_path}/mirror").entries() if name.startswith("index")]
    assert (tmp_path / "run" / "final_epoch").is_dir()


def on_own_host(folders: list[str]) -> None:
    """From now on this process has a disk of its own in these folders."""
    system = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x20000, 0x4000 | 0x40000
    calls = [system.unshare(new_mounts), system.mount(b"none", b"/", None, private, None)]
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
        calls.append(system.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, None))
    assert not any(calls), os.strerror(ctypes.get_errno())


def without_a_shared_folder(base: str, api: str) -> tuple[Any, ...]:
    runs = [Path(base, run) for run in ("unbroken", "first", "second")]
    synchronize()
    on_own_host([str(run) for run in runs])
    synchronize()
    make, url = BOTH[api], f"file://{base}/mirror"
    unbroken = train(make(runs[0], f"{url}-unbroken", resumes=False))
    train(make(runs[1], url, resumes=False), stop=5)
    files = sorted(path.name for path in runs[1].rglob("*.safetensors"))
    again = make(runs[1], url, resumes=True)  # on the same hosts
    start = again.start_iter
    on_same = train(again)
    synchronize()
    if is_main_process():  # as if the run had been killed in iteration 5
        shutil.rmtree(f"{base}/mirror")
    synchronize()
    train(make(runs[2], url, resumes=False), stop=5)
    synchronize()
    shutil.rmtree(runs[2], ignore_errors=True)  # the mount point stays
    synchronize()
    second = make(runs[2], url, resumes=True)
    rows = (runs[2] / "metrics.json").read_text() if is_main_process() else ""
    return start, second.start_iter, files, unbroken, on_same, train(second), rows


@needs_root
@pytest.mark.parametrize("api", BOTH)
def test_hosts_without_a_shared_folder_upload_their_parts_and_download_those_of_others(
    tmp_path: Path, api: str
) -> None:
    for rank, found in enumerate(on_ranks(without_a_shared_folder, str(tmp_path), api, world_size=2, timeout=180)):
        start, second_start, files, unbroken, *others, _ = found
        assert (start, second_start) == (4, 4)
        assert {name for name in files if name.startswith("model-")} == {f"model-0000{rank}-of-00002.safetensors"}
        for other in others:
            assert all(torch.equal(other[name], value) for name, value in unbroken.items())


def syncs_of_parts(base: str) -> dict[str, int]:
    synchronize()
    on_own_host([f"{base}/run"])
    synchronize()
    counts, sync = Counter[int](), os.fsync

    def counted(descriptor: int) -> None:
        counts[os.fstat(descriptor).st_ino] += 1
        sync(descriptor)

    os.fsync = counted
    train(python_trainer(Path(base, "run"), f"file://{base}/mirror", resumes=False))
    return {str(path): counts[path.stat().st_ino] for path in Path(base, "run").rglob("model-*.safetensors")}


@needs_root
def test_parts_of_a_host_are_synced_once(tmp_path: Path) -> None:
    for counts in on_ranks(syncs_of_parts, str(tmp_path), world_size=2, timeout=120):
        assert counts
        assert set(counts.values()) == {1}


def stages_without_a_shared_folder(base: str) -> tuple[Any, Any]:
    synchronize()
    on_own_host([f"{base}/run"])
    settings: dict[str, Any] = {"pipeline_parallel_size": 2, "checkpoint_mirror": f"file://{base}/mirror"}
    _, weights = train_stages(f"{base}/run", steps=4, **settings)
    shutil.rmtree(f"{base}/run", ignore_errors=True)
    synchronize()
    _, resumed = train_stages(f"{base}/run", steps=4, **settings)
    return weights, resumed


@needs_root
def test_stages_of_a_pipeline_on_hosts_without_a_shared_folder(tmp_path: Path) -> None:
    for weights, resumed in on_ranks(stages_without_a_shared_folder, str(tmp_path), world_size=2, timeout=180):
        assert weights
        assert all(torch.equal(resumed[name], value) for name, value in weights.items())


def best_without_a_shared_folder(base: str) -> dict[str, torch.Tensor]:
    synchronize()
    on_own_host([f"{base}/run"])
    config = quiet(
        Path(base, "run"), batch_size=4, num_epochs=2, save_steps=2, max_to_keep=1, learning_rate=0.5, seed=5,
        checkpoint_mirror=f"file://{base}/mirror", eval_strategy="step", eval_steps=1, zero_stage=3,
        load_best_model_at_end=True, metric_for_best_model="accuracy",
    )  # fmt: skip
    trainer = Trainer(model(), config, train_dataset=points(32), eval_dataset=points(8, seed=1))
    weights = train(trainer)
    assert len([path for path in Path(base, "run", "checkpoints").iterdir() if path.name.isdigit()]) == 1
    return weights


@needs_root
def test_the_best_weights_at_the_end_on_hosts_without_a_shared_folder(tmp_path: Path) -> None:
    first, second = on_ranks(best_without_a_shared_folder, str(tmp_path), world_size=2, timeout=180)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert any(
        report.path.name == "model_best" for report in inspect_mirror(f"file://{tmp_path}/mirror", contents=True).found
    )


def copies_without_a_shared_folder(base: str) -> tuple[Any, ...]:
    runs = [Path(base, run) for run in ("unbroken", "first")]
    synchronize()
    on_own_host([str(run) for run in runs])
    synchronize()
    unbroken = train(python_trainer(runs[0], None, resumes=False, zero_stage=0))
    train(python_trainer(runs[1], f"file://{base}/mirror", resumes=False, zero_stage=0), stop=5)
    had = sorted(path.name for path in runs[1].rglob("model.safetensors"))
    again = python_trainer(runs[1], f"file://{base}/mirror", resumes=True, zero_stage=0)
    return had, again.start_iter, unbroken, train(again)


@needs_root
def test_data_parallel_hosts_without_a_shared_folder_resume_from_the_mirror(tmp_path: Path) -> None:
    found = on_ranks(copies_without_a_shared_folder, str(tmp_path), world_size=2, timeout=180)
    assert [len(had) for had, *_ in found] == [2, 0]  # process 0 saves
    for _, start, unbroken, resumed in found:
        assert start == 4
        assert all(torch.equal(resumed[name], value) for name, value in unbroken.items())

"""The mirror of a sharded run: every process uploads its own parts, and a resume elsewhere is bitwise."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from tests.toys import Classifier, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.dist import get_rank, is_main_process, synchronize
from trainwright.checkpoint.mirror_store import Store
from trainwright.hooks import CallbackHook

pytestmark = pytest.mark.slow


class StopHereError(Exception):
    pass


def model() -> Classifier:
    torch.manual_seed(3)
    return Classifier(body=nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.3), nn.Linear(32, 2)))


def python_trainer(folder: Path, mirror: str | None, *, resumes: bool) -> Trainer:
    config = quiet(
        folder, batch_size=4, num_epochs=2, log_steps=1, save_steps=2, max_to_keep=2, learning_rate=1e-2, seed=5,
        checkpoint_mirror=mirror, resume_from_checkpoint=resumes, eval_strategy="no", optimizer="AdamW", zero_stage=3,
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
    def leave(at: Any) -> None:
        if at.iter == stop:
            raise StopHereError

    trainer.register_hooks([CallbackHook(before_step=leave)])
    if stop is None:
        trainer.train()
    else:
        with pytest.raises(StopHereError):
            trainer.train()
    return {name: value.full_tensor().clone() for name, value in trainer.model.state_dict().items()}


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

"""After a power failure, all that has a name is complete: files and folders are synced before the next step."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.toys import Classifier, file_config, pairs, pairs_net, points, quiet
from tests.watched_disk import WatchedDisk
from trainwright import DefaultTrainer, LazyConfig, Trainer
from trainwright.base import files
from trainwright.checkpoint import Checkpointer, keep_newest, verify
from trainwright.checkpoint import folder as folder_module
from trainwright.checkpoint.export import export_weights
from trainwright.engine import TrainingLoop
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig

LOST_IS_NO_HARM = ("log.txt", "runs", "curves.png")  # runs: the folder of TensorBoard


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedDisk:
    return WatchedDisk(tmp_path, monkeypatch)


@pytest.fixture(params=["usual", "without links", "without exchange"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The file system: as here, without symbolic links, without an exchange of two names."""
    files.has_links.cache_clear()
    if request.param == "without links":

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "symlink", refuse)
    if request.param == "without exchange":
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    yield str(request.param)
    files.has_links.cache_clear()


def python_api(folder: Path, *, resume: bool = False) -> None:
    settings = {"num_epochs": 2 + resume, "batch_size": 4, "save_steps": 2, "eval_strategy": "step", "eval_steps": 2}
    settings |= {"metrics": ["accuracy"], "log_steps": 1, "hardest_samples": 3, "save_total_limit": 2}
    config = quiet(folder, **settings, resume_from_checkpoint=resume)
    Trainer(Classifier(seed=0), config, points(), points()).train()


def config_file(folder: Path, *, resume: bool = False, asynchronous: bool = True) -> None:
    cfg = file_config(folder, Classifier, points, points, train_iter=6 + 2 * resume, train_micro_batch_size=4)
    cfg.train.update({"log_period": 2, "eval_period": 2, "resume": resume})
    cfg.train.checkpointer.update({"period": 2, "max_to_keep": 2, "asynchronous": asynchronous})
    cfg.train.evaluation.update({"enabled": True, "hardest_samples": 3})
    cfg.train.evaluation.evaluator.topk = (1,)
    DefaultTrainer(cfg).train()


@pytest.mark.parametrize("train", [python_api, config_file])
def test_a_run_its_resume_and_the_run_after_it(
    tmp_path: Path, system: str, disk: WatchedDisk, train: Callable[..., None]
) -> None:
    train(tmp_path / "new" / "run")
    train(tmp_path / "new" / "run", resume=True)
    train(tmp_path / "new" / "run")  # moves the one before aside
    assert (tmp_path / "new" / "run" / "earlier_runs" / "001").is_dir()
    disk.check(without=LOST_IS_NO_HARM)


def test_the_rows_that_a_checkpoint_refers_to_are_on_the_disk_before_it(tmp_path: Path, disk: WatchedDisk) -> None:
    disk.rows = {"metrics.json", "losses.csv", "hardest_samples.csv"}
    config_file(tmp_path / "run", asynchronous=False)  # no row is written during a save
    assert {path.name for path in (tmp_path / "run").iterdir()} >= disk.rows
    disk.check(without=LOST_IS_NO_HARM)


def test_a_name_that_is_saved_again_and_deleted(tmp_path: Path, system: str, disk: WatchedDisk) -> None:
    checkpointer = Checkpointer(nn.Linear(2, 2), tmp_path / "a" / "b")
    for iteration in range(3):
        for name in ("step_1", "model_best", f"step_{iteration + 2}"):
            checkpointer.save(name, iteration=iteration)
        torch.nn.init.normal_(checkpointer.model.weight)
        checkpointer.save("step_1", iteration=iteration)
    checkpointer.wait()
    keep_newest(tmp_path / "a" / "b", "step", 1)
    disk.check()


def own_loop(folder: Path) -> None:
    net = Classifier(seed=0)
    optimizer, loader = torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(points(), 4)
    loop = TrainingLoop(net, optimizer, loader, max_iter=4, output_dir=folder / "a" / "run", save_period=2)
    for batch in loop:
        loss = net(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.storage.put_scalar("total_loss", loss)


def exported(folder: Path) -> None:
    checkpointer = Checkpointer(nn.Linear(2, 2), folder / "run")
    checkpointer.save("one", iteration=1)
    checkpointer.wait()
    export_weights(folder / "run" / "one", folder / "new" / "exported")


def models(folder: Path) -> None:
    model = GPTTextGeneration(GPTTextGenerationConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1))
    for _ in range(2):  # the second replaces the first
        model.save(folder / "a" / "model")
    trainer = Trainer(pairs_net(), quiet(folder / "run"), pairs())
    trainer.export(folder / "b" / "model.pt2")


def settings(folder: Path) -> None:
    quiet(folder / "run").save(folder / "a")
    LazyConfig.save(file_config(folder, Classifier, points), folder / "b.yaml")


@pytest.mark.parametrize("write", [own_loop, exported, models, settings])
def test_what_else_is_written(tmp_path: Path, disk: WatchedDisk, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    disk.check(without=LOST_IS_NO_HARM)


def test_a_second_name_of_an_iteration_syncs_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 2)
    checkpointer = Checkpointer(model, tmp_path, optimizer=torch.optim.Adam(model.parameters()))
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.wait()
    names, sync = list[str](), os.fsync

    def watched(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    checkpointer.save("model_best", tag_last=False, iteration=9, value=0.5)
    checkpointer.wait()
    files_synced = [name for name in names if "." in name and not name.startswith(".")]
    assert sorted(files_synced) == ["extra.json", "manifest.json"]


def test_a_save_reads_no_manifest_of_the_checkpoints_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[Path]()
    read_manifest = folder_module.read_manifest

    def watched(path: Path) -> Any:
        read.append(path)
        return read_manifest(path)

    monkeypatch.setattr(folder_module, "read_manifest", watched)
    Checkpointer(nn.Linear(4, 2), tmp_path).save("model_0000000", iteration=0)
    checkpointer = Checkpointer(nn.Linear(4, 2), tmp_path)
    assert read == [tmp_path / "model_0000000"]
    for iteration in range(1, 5):
        checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
    checkpointer.wait()
    assert len(read) == 1
    another = Checkpointer(nn.Linear(4, 2), tmp_path)
    another.save("model_0000005", iteration=5)
    another.wait()
    assert verify(tmp_path / "model_0000005").sequence == 6

"""A worker of the user's own loader that cannot send what it read ends a run of either API with an error."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.toys import Classifier, Samples, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.data import DataError, build_image_test_loader


def value(index: int) -> torch.Tensor:
    class Local(Exception):  # noqa: N818
        pass

    if index == 5:
        raise Local("what happened")
    return torch.full((4,), float(index))


def broken() -> Samples:
    return Samples(inputs=value, labels=lambda index: index % 2, length=8)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield {"inputs": torch.ones(4), "labels": 0}
        yield {"inputs": torch.ones(4), "labels": threading.Lock()}


def as_lists(samples: list[Any]) -> dict[str, Any]:
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def of_torch() -> Any:
    return DataLoader(broken(), 2, num_workers=1, timeout=60)


PLACE = r"batch 3 \(the samples 4 to 5\) of Samples"
IN_STREAM = r"batch\['labels'\]\[1\] of batch 1 \(the samples 0 to 1\) of Stream"


@pytest.mark.parametrize(("kind", "place"), [("train", PLACE), ("loader", PLACE), ("stream", IN_STREAM)])
@pytest.mark.usefixtures("forked_workers")
def test_a_run_of_the_python_api_ends_with_an_error(tmp_path: Path, kind: str, place: str) -> None:
    config = quiet(tmp_path, num_epochs=1, batch_size=2, dataloader_num_workers=int(kind == "stream"), metrics=None)
    data: dict[str, Any] = {
        "train": {"train_dataloader": of_torch()},
        "loader": {"train_dataset": points(), "eval_dataloader": of_torch()},
        "stream": {"train_dataset": points(), "eval_dataset": Stream(), "data_collator": as_lists},
    }
    trainer = Trainer(Classifier(), config, **data[kind])
    with pytest.raises(DataError, match=place):
        trainer.train() if kind == "train" else trainer.evaluate()


@pytest.mark.parametrize(("kind", "place"), [("train", PLACE), ("loader", PLACE), ("stream", IN_STREAM)])
@pytest.mark.usefixtures("forked_workers")
def test_a_run_of_a_config_file_ends_with_an_error(tmp_path: Path, kind: str, place: str) -> None:
    cfg = file_config(tmp_path, Classifier, points, train_iter=4, train_micro_batch_size=2, test_micro_batch_size=2)
    loader = LazyCall(of_torch)()
    if kind == "train":
        cfg.dataloader.train = loader
    else:
        stream = LazyCall(build_image_test_loader)(dataset=LazyCall(Stream)(), num_workers=1, collate_fn=as_lists)
        cfg.dataloader.test = [loader if kind == "loader" else stream]
    trainer = DefaultTrainer(cfg)
    with pytest.raises(DataError, match=place):
        trainer.train() if kind == "train" else DefaultTrainer.test(trainer.cfg, trainer.test_loader, trainer.model)


def leaving(index: int) -> torch.Tensor:
    return sys.exit("no licence") if index == 5 else torch.full((4,), float(index))


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_leaves_is_the_error_also_where_its_last_tensors_cannot_be_received(tmp_path: Path) -> None:
    config = quiet(tmp_path, num_epochs=1, batch_size=2, dataloader_num_workers=1, metrics=None)
    data = Samples(inputs=leaving, labels=lambda index: index % 2, length=8)
    with pytest.raises((DataError, RuntimeError), match=r"worker .*(ended|exited unexpectedly).*exit code 1"):
        Trainer(Classifier(), config, data).train()


UNGUARDED = """
import multiprocessing, sys, torch
from trainwright import Trainer, TrainingConfig
multiprocessing.set_start_method("spawn", force=True)
data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
config = TrainingConfig(output_dir=sys.argv[1], batch_size=4, dataloader_num_workers=1, tensorboard=None)
Trainer(torch.nn.Linear(4, 2), config, data).train()
"""


def test_a_program_that_its_workers_import_and_that_trains_in_them_is_told_of_the_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert 'Put the training below `if __name__ == "__main__":`' in done.stderr

"""Processes whose data differ are refused before the first step; reading the samples for that changes no run."""

import logging
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, random_split

from tests.ranks import on_ranks
from tests.torchrun import torchrun
from tests.toys import file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.errors import ConfigError
from trainwright.data import MixedDataset, build_image_train_loader
from trainwright.data.same_samples import Data, check_same_samples, differing, values_of
from trainwright.data.seeding import read_state
from trainwright.data.tar_shards import TarShards
from trainwright.data.undone_reads import undone_reads
from trainwright.engine.loaders import shared_data

GENERATOR = np.random.default_rng(0)


def rank() -> int:
    return int(os.environ["RANK"])


def message(call: Callable[..., object], *arguments: Any) -> str:
    try:
        call(*arguments)
    except ConfigError as error:
        return str(error)
    return ""


# What is compared of a sample.


def test_samples_are_compared_by_their_values() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    sample = {"x": torch.ones(3), "image": image, "text": "one", "boxes": [[1, 2], [3.5]], "label": 3}
    assert differing(values_of(sample), values_of({**sample})) == []
    for name, other in {"x": torch.zeros(3), "image": image + 1, "text": "two", "boxes": [[1, 2]], "label": 4}.items():
        assert all(
            place.startswith(f"'{name}'") for place in differing(values_of(sample), values_of({**sample, name: other}))
        )
        assert differing(values_of(sample), values_of({**sample, name: other}))
    assert differing(values_of((torch.ones(2), 1)), values_of((torch.ones(2), 2))) == ["part 1"]


def test_other_machines_have_other_folders_and_last_digits() -> None:
    noise = torch.randn(3, 8, 8)
    one = {"path": "/scratch/node1/a.png", "x": noise, "missing": float("nan"), "object": object()}
    other = {"path": "/scratch/node2/a.png", "x": noise * (1 + 1e-6), "missing": float("nan"), "object": object()}
    assert differing(values_of(one), values_of(other)) == []
    assert differing(values_of(one), values_of({**other, "path": "/scratch/node2/b.png"})) == ["'path'"]


# Reading leaves no trace.


class Traces(Dataset[Any]):
    """Changes whatever a data set may change when it is read."""

    def __init__(self) -> None:
        self.file: Any = None
        self.reads, self.cache, self.order = 0, dict[int, float](), [1, 2]
        self.own = [np.random.default_rng(0), torch.Generator().manual_seed(0), random.Random(0)]
        factor = random.Random(1)
        self.transform = lambda x: x * factor.random()
        self.logger, self.by_class = logging.getLogger("data"), defaultdict[int, list[int]](list)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.file = self.file or object()
        self.reads += 1
        self.order.append(index)
        self.by_class[index % 2].append(index)
        self.logger.setLevel("INFO")
        self.cache[index] = random.random() + np.random.rand() + float(torch.rand(())) + GENERATOR.random()
        self.cache[index] += self.own[0].random() + float(torch.rand((), generator=self.own[1])) + self.own[2].random()
        return {"x": self.transform(self.cache[index])}


def test_reading_is_undone() -> None:
    data, untouched = Traces(), Traces()
    state, of_module = read_state(), GENERATOR.bit_generator.state
    with undone_reads(MixedDataset([data], [1.0])):
        first = data[3]
        assert data.reads == 1
        assert data[3] != first
    assert (data.file, data.reads, data.cache, data.order, data.by_class) == (None, 0, {}, [1, 2], {})
    assert data.logger.level == logging.INFO  # not a part of the data
    assert read_state() == state
    assert GENERATOR.bit_generator.state == of_module
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    found = data[0]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    GENERATOR.bit_generator.state = of_module
    assert found == untouched[0]


def test_a_data_set_that_holds_itself_or_much_is_walked_quickly() -> None:
    data = Traces()
    data.cache = {number: {number: data} for number in range(100_000)}  # type: ignore[misc]
    start = time.perf_counter()
    with undone_reads(data):
        pass
    assert time.perf_counter() - start < 0.5


# Which data are compared.


def test_what_is_declared_to_be_shared() -> None:
    data = TensorDataset(torch.arange(8))
    ours = build_image_train_loader(data, 2, seed=3)[0]
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=7)
    of_machine = DistributedSampler(data, num_replicas=2, rank=1)  # another one may have other data
    found = shared_data(DataLoader(data, 2, sampler=sampler), is_evaluated=False)
    assert found == Data(data, {"the seed of its order": 7, "shuffle": True})
    assert shared_data(ours, is_evaluated=False) == Data(data, {"the seed of its order": 3, "shuffle": True})
    assert shared_data(DataLoader(data, 2, sampler=of_machine), is_evaluated=False) is None
    assert shared_data(DataLoader(data, 2), is_evaluated=False) is None  # perhaps the share of this process
    assert shared_data([{"x": 1}], is_evaluated=False) is None


# On two processes.


class Files(Dataset[Any]):
    def __init__(
        self, order: list[int], seconds: float = 0.0, noise: Any = None, reads: list[int] | None = None
    ) -> None:
        self.order, self.seconds, self.noise = order, seconds, noise
        self.count = reads

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        if self.count is not None:
            COUNT[0] += 1
        index = self.order[place]
        noise = 0.0 if self.noise is None else self.noise()
        return {"x": torch.full((4,), index / 64) + noise, "labels": index % 2}


COUNT = [0]


def unpickled(*_: Any) -> Any:
    raise OSError("no such file on this machine")


def differences_of_rank() -> dict[str, Any]:
    straight, shuffled = list(range(64)), random.Random(rank()).sample(range(64), 64)
    own = np.random.default_rng(rank())
    order = {"the seed of its order": 0}
    split = random_split(Files(straight), [32, 32], generator=torch.Generator().manual_seed(rank()))[0]  # type: ignore[var-annotated]
    cases = {
        "same": Data(Files(straight), order),
        "shuffled": Data(Files(shuffled), order),
        "split": Data(split, order),
        "length": Data(Files(straight[: 64 - rank()]), order),
        "order": Data(Files(straight), {"the seed of its order": rank()}),
        "augmented": Data(Files(straight, noise=lambda: torch.rand(4) + random.random() + np.random.rand()), order),
        "augmented by an own generator": Data(Files(straight, noise=own.random), order),
        "fails": Data(Files(straight, noise=unpickled if rank() else None), order),
        "one sample": Data(Files([rank()]), order),
        "empty": Data(Files([]), order),
    }
    found: dict[str, Any] = {name: message(check_same_samples, {name: data}) for name, data in cases.items()}
    slow = {f"slow{number}": Data(Files(straight, 0.15, reads=[]), order) for number in range(2)}
    start = time.perf_counter()
    found["slow"] = message(check_same_samples, slow)
    found["seconds"], found["reads"] = time.perf_counter() - start, COUNT[0]
    start = time.perf_counter()
    check_same_samples({"large": Data(range(10**9), order)})
    found["seconds of a large one"] = time.perf_counter() - start
    return found


def test_processes_with_other_data_are_refused() -> None:
    first, second = on_ranks(differences_of_rank)
    for found in (first, second):
        assert found["same"] == found["augmented"] == found["augmented by an own generator"] == found["slow"] == ""
        assert found["fails"] == found["empty"] == ""  # the training reports what fails
        for name in ("shuffled", "split", "one sample"):
            assert found[name].startswith(f"{name}: sample "), found[name]
            assert "(its 'x') is another one on rank 1 than on rank 0." in found[name]
            assert "random.Random(0).shuffle(files)" in found[name]
        assert found["length"].startswith("length: the number of samples is 64 on rank 0, but 63 on rank 1.")
        assert found["order"].startswith("order: the seed of its order is 0 on rank 0, but 1 on rank 1.")
        assert found["seconds"] < 1.5
        assert found["reads"] <= 4
        assert found["seconds of a large one"] < 1


def trained_on_rank(folder: Path) -> dict[str, str]:
    order = random.Random(rank()).sample(range(64), 64)

    def python(**data: Any) -> None:
        config = quiet(folder / "p", batch_size=4, metrics=None, num_epochs=1)
        Trainer(nn.Linear(4, 2), config, **data)

    def of_file(train: Any, test: Any = None) -> None:
        sizes = {"train_iter": 2, "train_micro_batch_size": 4}
        cfg = file_config(
            folder / "f", lambda: nn.Linear(4, 2), lambda: train, None if test is None else lambda: test, **sizes
        )
        cfg.optim = LazyCall(torch.optim.SGD)(lr=0.1)
        DefaultTrainer(cfg)

    same, other = TensorDataset(torch.arange(64.0)[:, None].expand(-1, 4), torch.arange(64) % 2), [*order]
    mine = TensorDataset(*same[other])
    named = {"a": same, "b": mine}
    loader = DataLoader(mine, 4, sampler=DistributedSampler(mine, num_replicas=2, rank=rank()))
    share = DataLoader(mine, 4)
    return {
        "train": message(lambda: python(train_dataset=mine)),
        "eval": message(lambda: python(train_dataset=same, eval_dataset=named)),
        "train_dataloader": message(lambda: python(train_dataloader=loader)),
        "eval_dataloader": message(lambda: python(train_dataset=same, eval_dataloader=share)),
        "own share": message(lambda: python(train_dataloader=share)),
        "file": message(lambda: of_file(mine)),
        "test": message(lambda: of_file(same, mine)),
    }


def test_both_apis_refuse_training_and_evaluation_data_that_differ(tmp_path: Path) -> None:
    for found in on_ranks(trained_on_rank, tmp_path):
        assert found.pop("own share") == ""
        names = {
            "train": "Trainer.train_dataset",
            "eval": "Trainer.eval_dataset['b']",
            "file": "dataloader.train",
            "test": "dataloader.test[0]",
        }
        for case, text in found.items():
            assert text.startswith(f"{names.get(case, f'Trainer.{case}')}: sample "), (case, text)


PROGRAM = """
import random, sys, os, time
import torch
from trainwright import Trainer, TrainingConfig

files = random.Random(int(os.environ["RANK"])).sample(range(64), 64)  # each process shuffles its own list
data = [(torch.full((4,), index / 64), index % 2) for index in files]
config = TrainingConfig(output_dir=sys.argv[1], batch_size=4, num_epochs=1, device_str="cpu", progress_bar=False)
Trainer(torch.nn.Linear(4, 2), config, data).train()
print("TRAINED")
"""


def test_a_program_under_torchrun_is_refused_once(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    output = torchrun(program, tmp_path / "out", code=1).stdout
    assert "TRAINED" not in output
    assert output.count("]: Traceback (most recent call last)") == 1  # of one process
    assert "is another one on rank 1 than on rank 0." in output


# Streams.


class Lines(IterableDataset[Any]):
    """Without ``shard``: each rank reads all samples and keeps its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        order = list(range(32))
        if self.kind == "shuffled by each rank":
            random.Random(rank()).shuffle(order)
        if self.kind == "shuffled by the global generator":
            random.shuffle(order)
        for index in order:
            noise = random.random() if self.kind == "augmented" else 0.0
            yield torch.full((4,), index / 32 + noise), index % 2

    def __len__(self) -> int:
        return 32


class Share(Lines):
    is_sharded = True


def stream_trained(folder: Path, workers: int) -> dict[str, str]:
    kinds = ["same", "augmented", "shuffled by each rank", "shuffled by the global generator"]
    found = {}
    for name, stream in [*((kind, Lines(kind)) for kind in kinds), ("share", Share("shuffled by each rank"))]:
        trainer = Trainer(
            nn.Linear(4, 2),
            quiet(folder / name, batch_size=4, metrics=None, num_epochs=1, num_dataloader_workers=workers),
            stream,
        )
        found[f"{name}, evaluated"] = message(trainer.evaluate, stream) if workers == 0 else ""
        found[name] = message(trainer.train)
        assert bool(found[name]) == (trainer.state.global_step == 0)
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_each_rank_reads_completely_must_be_the_same(tmp_path: Path, workers: int) -> None:
    for found in on_ranks(stream_trained, tmp_path, workers):
        assert found["same"] == found["augmented"] == found["share"] == ""
        for kind in ("shuffled by each rank", "shuffled by the global generator"):
            assert found[kind].startswith("Trainer.train_dataset: sample "), found
            assert "another one on rank 1 than on rank 0" in found[kind]
            evaluated = "Evaluation of Lines: batch 0 (its part 0) is another one on rank 1 than on rank 0."
            assert found[f"{kind}, evaluated"].startswith("" if workers or "global" in kind else evaluated)
        assert [found[f"{kind}, evaluated"] for kind in ("same", "augmented", "share")] == [""] * 3


def streams_of_rank(folder: Path) -> dict[str, str]:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"x": list(range(32))}).to_iterable_dataset(num_shards=4)
    files = [folder / f"{number}.tar" for number in range(4)]
    own = files if rank() == 0 else files[::-1]
    np.random.seed(rank())
    streams = {
        "unseeded": whole.shuffle(buffer_size=8),
        "seeded": whole.shuffle(seed=1, buffer_size=8),
        "plain": whole,
        "shards": TarShards(own),
        "same shards": TarShards(files),
    }
    from trainwright.data import StreamLoader

    return {
        name: message(check_same_samples, {name: found} if found is not None else {})
        for name, stream in streams.items()
        for found in [shared_data(StreamLoader(stream, 2), is_evaluated=False)]
    }


def test_streams_that_are_sharded_compare_seeds_and_files(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.tar").touch()
    for found in on_ranks(streams_of_rank, tmp_path):
        assert found["seeded"] == found["plain"] == found["same shards"] == ""
        assert "unseeded: the state of its shuffle's generator (unseeded?) is " in found["unseeded"]
        assert found["shards"].startswith("shards: the list of its shards is 4 with the checksum ")

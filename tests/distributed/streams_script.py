"""Runs on two processes that are killed and resumed; rank 0 writes to ``sys.argv[1]`` whether they equal whole runs."""

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.engine.test_stream_resume import config_api, python_api, weights
from tests.toys import Classifier
from trainwright import LazyCall
from trainwright.base.dist import all_gather_object
from trainwright.data import StreamLoader, build_nlp_train_loader
from trainwright.parallel import get_rank, setup_dist_util

FOLDER = Path(sys.argv[1])
OWN_LOOP = Path(__file__).parents[2] / "examples/recipes/own_loop.py"
SEEN: list[int] = []


class Uneven(IterableDataset[Any]):
    """Rank 0 has three times as many samples as rank 1, and the state of a position."""

    def __init__(self, first: int = 0, length: int = 24) -> None:
        self.first, self.length, self.start, self.done = first, length, 0, 0

    def shard(self, num_shards: int, index: int) -> "Uneven":
        return Uneven(1000 * index, 18 if index == 0 else 6)

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["done"]

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        while self.done < self.length:
            self.done += 1
            number = self.first + self.done
            draw = torch.Generator().manual_seed(number)
            yield {"inputs": torch.randn(4, generator=draw), "labels": number % 3, "number": number}


class Model(Classifier):
    def __init__(self) -> None:
        super().__init__((4, 8, 3), dropout=0.3, seed=0, is_scored=False)

    def forward(self, inputs: Tensor, labels: Tensor, number: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        SEEN.extend(number.tolist())
        return super().forward(inputs, labels)


def by_objects(folder: Path, stop: int | None) -> Tensor:
    return python_api(folder, {"train_dataset": Uneven()}, stop, Model, shuffle_buffer=5)


def by_files(folder: Path, stop: int | None) -> Tensor:
    loader = LazyCall(build_nlp_train_loader)(dataset=LazyCall(Uneven)(), num_workers=0)
    return config_api(folder, loader, stop, Model)


def own_loop(folder: Path, stop: int | None) -> Tensor | None:
    plain, calls = F.cross_entropy, iter(range(1000))

    def failing(*arguments: Any, **settings: Any) -> Tensor:
        if next(calls) == stop:
            raise RuntimeError("killed")
        return plain(*arguments, **settings)

    F.cross_entropy = failing
    try:
        return weights(runpy.run_path(str(OWN_LOOP))["main"](str(folder), 70).model)
    except RuntimeError:
        return None
    finally:
        F.cross_entropy = plain


def outcome(name: str, api: Callable[[Path, int | None], Any], stops: list[int]) -> dict[str, Any]:
    SEEN.clear()
    whole = api(FOLDER / name / "whole", None)
    seen = [number // 1000 for number in SEEN]
    for stop in stops:
        api(FOLDER / name / "killed", stop)
    resumed = api(FOLDER / name / "killed", None)
    return {
        "is_exact": all(all_gather_object(torch.equal(whole, resumed))),
        "is_equal_on_ranks": len({tuple(each) for each in all_gather_object(whole.tolist())}) == 1,
        "ranks_of_samples": [sorted(set(each)) for each in all_gather_object(seen)],
    }


def without_shard() -> list[Any]:
    """The numbers that each rank reads of a stream that has no method ``shard``."""

    class Plain(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from range(23)

    loader = StreamLoader(Plain(), 3, drop_last=False, infinite=False)
    return all_gather_object([number for batch in loader for number in batch.tolist()])


if __name__ == "__main__":
    setup_dist_util()
    found = {
        "python": outcome("python", by_objects, [2, 6]),
        "config files": outcome("config", by_files, [2, 6]),
        "own loop": outcome("own", own_loop, [55]),
        "without shard": without_shard(),
    }
    if get_rank() == 0:
        (FOLDER / "found.json").write_text(json.dumps(found))

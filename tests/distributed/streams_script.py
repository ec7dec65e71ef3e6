"""Runs on two processes that are killed and resumed; rank 0 writes to ``sys.argv[1]`` whether they equal whole runs."""

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.data import StreamLoader, build_nlp_train_loader
from trainwright.hooks import CallbackHook
from trainwright.parallel import get_rank, setup_dist_util
from trainwright.parallel.dist import all_gather_object

FOLDER, STEPS = Path(sys.argv[1]), 9
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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, inputs: Tensor, labels: Tensor, number: Tensor) -> dict[str, Tensor]:
        SEEN.extend(number.tolist())
        return {"loss": F.cross_entropy(self.body(inputs), labels)}


def python_api(folder: Path, stop: int | None) -> Any:
    config = TrainingConfig(
        output_dir=folder, batch_size=4, lr=0.05, max_steps=STEPS, progress_bar=False, shuffle_buffer=5, save_steps=1,
        eval_strategy="no", model_checkpoint=None, resume_from_checkpoint=True,
    )  # fmt: skip
    return run(Trainer(Model(), config, Uneven()), stop)


def config_api(folder: Path, stop: int | None) -> Any:
    cfg = get_config("common/defaults.py")
    loader = LazyCall(build_nlp_train_loader)(dataset=LazyCall(Uneven)(), num_workers=0)
    cfg.model, cfg.dataloader = LazyCall(Model)(), {"train": loader}
    given = {"output_dir": str(folder), "train_iter": STEPS, "train_micro_batch_size": 4, "resume": True}
    cfg.train.update({**given, "checkpointer": {"period": 1}})
    return run(DefaultTrainer(cfg), stop)


def run(trainer: Any, stop: int | None) -> Any:
    def fail(trainer: Any) -> None:
        if trainer.iter == stop:
            raise RuntimeError("killed")

    trainer.register_hooks([CallbackHook(before_step=fail)])
    try:
        trainer.train()
    except RuntimeError:
        assert stop is not None
    return trainer.model


def own_loop(folder: Path, stop: int | None) -> Any:
    plain, calls = F.cross_entropy, iter(range(1000))

    def failing(*arguments: Any, **settings: Any) -> Tensor:
        if next(calls) == stop:
            raise RuntimeError("killed")
        return plain(*arguments, **settings)

    F.cross_entropy = failing
    try:
        return runpy.run_path(str(OWN_LOOP))["main"](str(folder), 70).model
    except RuntimeError:
        return None
    finally:
        F.cross_entropy = plain


def outcome(name: str, api: Callable[[Path, int | None], Any], stops: list[int]) -> dict[str, Any]:
    SEEN.clear()
    whole = weights(api(FOLDER / name / "whole", None))
    seen = [number // 1000 for number in SEEN]
    for stop in stops:
        api(FOLDER / name / "killed", stop)
    resumed = weights(api(FOLDER / name / "killed", None))
    return {
        "is_exact": all(all_gather_object(torch.equal(whole, resumed))),
        "is_equal_on_ranks": len({tuple(each) for each in all_gather_object(whole.tolist())}) == 1,
        "ranks_of_samples": [sorted(set(each)) for each in all_gather_object(seen)],
    }


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


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
        "python": outcome("python", python_api, [2, 6]),
        "config files": outcome("config", config_api, [2, 6]),
        "own loop": outcome("own", own_loop, [55]),
        "without shard": without_shard(),
    }
    if get_rank() == 0:
        (FOLDER / "found.json").write_text(json.dumps(found))

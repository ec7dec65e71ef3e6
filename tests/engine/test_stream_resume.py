"""Runs on streams: interrupted and resumed is uninterrupted, bit for bit, in both APIs."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.toys import Classifier, file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.data import StreamLoader, build_nlp_train_loader
from trainwright.hooks import CallbackHook

STEPS = 11


class Points(IterableDataset[Any]):
    def __init__(self, length: int = 21) -> None:
        self.length, self.start, self.done = length, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        while self.done < self.length:
            self.done += 1
            draw = torch.Generator().manual_seed(self.done)
            yield {"inputs": torch.randn(4, generator=draw) + 0.1 * torch.randn(()), "labels": self.done % 3}


class StatefulPoints(Points):
    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["done"]


def net(dropout: float = 0.3) -> nn.Module:
    return Classifier((4, 8, 3), dropout=dropout, seed=0, is_scored=False)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def python_api(
    folder: Path, data: dict[str, Any], stop: int | None, model: Callable[[], nn.Module] = net, **settings: Any
) -> Tensor:
    config = quiet(
        folder, batch_size=4, lr=0.05, lr_scheduler_type="linear", max_steps=STEPS, seed=1, eval_strategy="no",
        model_checkpoint=None, save_steps=1, resume_from_checkpoint=True, **settings,
    )  # fmt: skip
    return run(Trainer(model(), config, **data), stop)


def config_api(
    folder: Path, loader: Any, stop: int | None, model: Callable[[], nn.Module] = net, **train: Any
) -> Tensor:
    given = {"train_iter": STEPS, "train_micro_batch_size": 4, "seed": 1, "checkpointer": {"period": 1}}
    cfg = file_config(folder, model, rows, resume=True, **given, **train)
    cfg.dataloader = {"train": loader}
    return run(DefaultTrainer(cfg), stop)


def run(trainer: Any, stop: int | None) -> Tensor:
    def fail(trainer: Any) -> None:
        if trainer.iter == stop:
            raise RuntimeError("killed")

    trainer.register_hooks([CallbackHook(before_step=fail)])
    try:
        trainer.train()
    except RuntimeError:
        assert stop is not None
    return weights(trainer.model)


def by_hand(loader: StreamLoader) -> Tensor:
    model = net(dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)
    for batch in islice(loader, STEPS):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_the_numbers_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    config = quiet(tmp_path, batch_size=4, lr=0.05, max_steps=STEPS, shuffle_buffer=6)
    trainer = Trainer(net(dropout=0.0), config, StatefulPoints())
    trainer.train()
    loader = StreamLoader(StatefulPoints(), 4, seed=42, drop_last=True, shuffle_buffer=6)
    assert torch.equal(weights(trainer.model), by_hand(loader))


KINDS = {
    "state": (StatefulPoints, {}),
    "blocks": (StatefulPoints, {"shuffle_buffer": 6}),
    "no state": (Points, {"shuffle_buffer": 6}),
    "accumulation": (StatefulPoints, {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.exhaustive(every=4)
def test_the_python_api_resumes_exactly(kind: str, tmp_path: Path) -> None:
    stream, settings = KINDS[kind]
    data = {"train_dataset": stream()}
    whole = python_api(tmp_path / "whole", data, None, **settings)
    for stop in (1, 4, 5):  # in the first pass, in the second, and then in the second again
        python_api(tmp_path / "killed", {"train_dataset": stream()}, stop, **settings)
    assert torch.equal(python_api(tmp_path / "killed", {"train_dataset": stream()}, None, **settings), whole)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.exhaustive(every=2)
@pytest.mark.slow
def test_config_files_resume_exactly(num_workers: int, tmp_path: Path) -> None:
    def loader() -> Any:
        stream = LazyCall(StatefulPoints)()
        return LazyCall(build_nlp_train_loader)(dataset=stream, num_workers=num_workers, shuffle_buffer=6)

    whole = config_api(tmp_path / "whole", loader(), None, num_accumulation_steps=2)
    for stop in (1, 7):
        config_api(tmp_path / "killed", loader(), stop, num_accumulation_steps=2)
    assert torch.equal(config_api(tmp_path / "killed", loader(), None, num_accumulation_steps=2), whole)


def rows() -> list[dict[str, Any]]:
    inputs = torch.randn(21, 4, generator=torch.Generator().manual_seed(0))
    return [{"inputs": row, "labels": number % 3} for number, row in enumerate(inputs)]


def stateful_loader(num_workers: int = 0, *, is_stream: bool = False) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    if is_stream:  # whose state lacks the samples in its buffer
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list([{**row, "inputs": row["inputs"].tolist()} for row in rows()])
        stream = table.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=5).with_format("torch")
        return StatefulDataLoader(stream, 4, num_workers=num_workers)
    torch.manual_seed(0)  # the loader draws the seed of its order
    return StatefulDataLoader(rows(), 4, shuffle=True, num_workers=num_workers)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.exhaustive
@pytest.mark.parametrize("api", [python_api, config_api])
@pytest.mark.parametrize(("num_workers", "is_stream"), [(0, False), (1, False), (0, True)])
def test_a_stateful_data_loader_resumes_exactly(api: Any, num_workers: int, is_stream: bool, tmp_path: Path) -> None:
    pytest.importorskip("torchdata")

    def data() -> Any:
        loader = stateful_loader(num_workers, is_stream=is_stream)
        return {"train_dataloader": loader} if api is python_api else loader

    whole = api(tmp_path / "whole", data(), None)
    stops = (3, 6, 8) if num_workers == 0 else (8,)  # in a pass, and at its end: six batches
    for stop in stops:
        api(tmp_path / "killed", data(), stop)
    assert torch.equal(api(tmp_path / "killed", data(), None), whole)


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("api", [python_api, config_api])
@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, None])
def test_a_loader_without_a_state_reads_its_batches_again(
    api: Any, seed: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def data() -> Any:
        own = None if seed is None else torch.Generator().manual_seed(seed)
        loader = DataLoader(rows(), 4, shuffle=True, generator=own)
        return {"train_dataloader": loader} if api is python_api else loader

    whole = api(tmp_path / "whole", data(), None)
    for stop in (6, 8):  # at the end of a pass, and within one
        api(tmp_path / "killed", data(), stop)
    assert torch.equal(api(tmp_path / "killed", data(), None), whole)
    assert any("are read again and dropped" in record.message for record in caplog.records)

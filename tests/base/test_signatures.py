"""Signatures are read where annotations have names that only type checkers import."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainwright
from tests.toys import quiet
from trainwright import Trainer
from trainwright.base.signatures import read_signature
from trainwright.base.source_text import lacks_return
from trainwright.data import ColumnDataset


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python evaluates annotations where a function is defined")
def test_a_model_whose_annotations_cannot_be_evaluated_trains(tmp_path: Path) -> None:
    class Model(nn.Linear):
        def forward(self, images: OnlyForTypeCheckers, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[name-defined]  # noqa: F821
            return {"loss": nn.functional.cross_entropy(super().forward(images), labels)}

    data = ColumnDataset(images=torch.randn(8, 4), labels=torch.arange(8) % 3, unused=torch.zeros(8))
    trainer = Trainer(Model(4, 3), quiet(tmp_path, batch_size=4, num_epochs=1), data)
    trainer.train()
    assert trainer.iterations_done == 2
    assert list(read_signature(trainer.model.forward).parameters) == ["images", "labels"]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python evaluates annotations where a function is defined")
def test_functions_whose_annotations_cannot_be_evaluated_are_used(tmp_path: Path) -> None:
    def loss(outputs: OnlyForTypeCheckers, target: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]  # noqa: F821
        return nn.functional.cross_entropy(outputs, target)

    def accuracy(predictions: OnlyForTypeCheckers, labels: torch.Tensor) -> dict[str, float]:  # type: ignore[name-defined]  # noqa: F821
        return {"own_accuracy": (predictions.argmax(1) == labels).float().mean().item()}

    def collate(samples: OnlyForTypeCheckers) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[name-defined]  # noqa: F821
        inputs, labels = zip(*samples, strict=True)
        return torch.stack(inputs), torch.stack(labels)

    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    config = quiet(tmp_path, batch_size=4, num_epochs=1)
    parts = {"loss": loss, "metrics_handler": accuracy, "data_collator": collate}
    assert "own_accuracy" in Trainer(nn.Linear(4, 3), config, data, data, **parts).train()


def test_every_signature_is_read_by_the_one_function() -> None:
    package = Path(trainwright.__file__).parent
    files = [path for path in package.rglob("*.py") if "inspect.signature(" in path.read_text(encoding="utf-8")]
    assert files == [package / "base" / "signatures.py"]


def forgets(values: dict[str, float]) -> None:
    dict(values)


def forgets_a_dict(value: float) -> None:
    {"accuracy": value}  # noqa: B018


def does_nothing() -> None:
    """On purpose."""


def returns_nothing(values: list[float]) -> None:
    values.clear()
    return None


def ends_early(values: list[float]) -> None:
    if not values:
        return
    values.clear()


def raises(values: list[float]) -> None:
    values.clear()
    raise NotImplementedError(str(values))


def yields(values: list[float]) -> Iterator[float]:
    yield from sorted(values)


def as_dict(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *given: {"values": [*function(*given)]})


@pytest.mark.parametrize(
    ("function", "is_lacking"),
    [
        (forgets, True),
        (forgets_a_dict, True),
        *[(one, False) for one in (does_nothing, returns_nothing, ends_early, raises, yields)],
        *[(one, False) for one in (as_dict(forgets), lambda values: dict(values), len, functools.partial(forgets, {}))],
    ],
)
def test_a_forgotten_return_is_found_where_the_text_is_certain(function: Any, is_lacking: bool) -> None:
    assert lacks_return(function) is is_lacking

"""Simulates a later release of torch, in which a private part is missing or has changed."""

import functools
import importlib
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright._torch_compat as compat
import trainwright.graph as graph
from trainwright import Trainer, TrainingConfig

FILES = [
    importlib.import_module(f"{package.__name__}.{found.name}")
    for package in (compat, graph)
    for found in pkgutil.iter_modules(package.__path__)
]

# How a private part has changed.
CHANGES = ("missing", "other signature", "other result", "error")


@pytest.fixture(autouse=True)
def _fresh_probes() -> Iterator[None]:
    """Clear the cached results of the probes, before and after."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    for file in FILES:
        for value in vars(file).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


@pytest.fixture
def compiler() -> None:
    """Torch's compiler is imported."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor")


class Torch:
    """``torch`` with other objects at some dotted paths; None for a missing one."""

    def __init__(self, real: Any, others: dict[str, Any]) -> None:
        self._real, self._others = real, others

    def __getattr__(self, name: str) -> Any:
        if name in self._others:
            if self._others[name] is None:
                raise AttributeError(f"torch has no {name}")
            return self._others[name]
        inner = {path.partition(".")[2]: other for path, other in self._others.items() if path.startswith(f"{name}.")}
        found = getattr(self._real, name)
        return Torch(found, inner) if inner else found


def changed(original: Callable[..., Any], change: str, other: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` for torch's own calls, and a changed function for ours. ``other`` gives another result."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith((compat.__name__, graph.__name__)):
            return original(*args, **kwargs)
        if change == "missing":
            raise AttributeError("there is none")
        if change == "other signature":
            raise TypeError(f"{original} takes other arguments")
        if change == "error":
            raise RuntimeError("not on this machine")
        return other(*args, **kwargs)

    return call


def change_torch(
    monkeypatch: pytest.MonkeyPatch, file: ModuleType, path: str, change: str, other: Callable[..., Any]
) -> None:
    """Replace the object that ``file`` finds at ``path``, such as ``_C._set_grad_enabled``."""
    original: Any = functools.reduce(getattr, path.split("."), torch)
    found = None if change == "missing" else changed(original, change, other)
    monkeypatch.setattr(file, "torch", Torch(torch, {path: found}))


def take_public_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no private part of torch."""
    for file in FILES:
        for name in ("is_usable", "_is_usable"):
            if hasattr(file, name):
                monkeypatch.setattr(file, name, lambda *_: False)


def train(folder: Path, optimizer: str = "adam", **settings: Any) -> list[Tensor]:
    """The weights after a short training on samples that are read one by one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    inputs, labels = torch.randn(24, 4), torch.randint(0, 3, (24,))
    config = TrainingConfig(
        output_dir=str(folder),
        num_epochs=2,
        batch_size=4,
        optimizer=optimizer,
        learning_rate=0.01,
        loss="CrossEntropyLoss",
        eval_strategy="no",
        metrics=[],
        seed=0,
        **settings,
    )
    Trainer(model, config, train_dataset=[*zip(inputs, labels, strict=True)]).train()
    return [value.detach().clone() for value in model.state_dict().values()]


Trained = Callable[..., list[str]]


@pytest.fixture
def lines_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Trained:
    """Train and compare the weights with those of the public API, eagerly; return the log lines about torch.

    ``is_equal``: bit for bit; else up to the rounding of a compiled program.
    """

    def run(*, is_equal: bool = True, **settings: Any) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            take_public_ways(patch)
            expected = train(tmp_path / "public", **settings | {"graph": False})
        _forget()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="trainwright"):
            found = train(tmp_path / "run", **settings)
        are_same: Any = torch.equal if is_equal else functools.partial(torch.allclose, rtol=1e-3, atol=1e-3)
        assert all(are_same(a, b) for a, b in zip(found, expected, strict=True))
        lines = [(record.name, record.getMessage()) for record in caplog.records]
        return [line for name, line in lines if name == "trainwright.torch" or line.startswith("Graph mode")]

    return run

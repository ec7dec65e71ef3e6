"""Small data sets that tests of this room share: plates rendered by Pillow, and sounds made of tones."""

import csv
import inspect
import json
import wave
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from tests.models.conftest import files_of as files_of
from trainwright.models import Model

PLATES = {"train": ["12A34", "98B", "7", "55A01"], "test": ["21C9", "40"]}


def write_csv(path: Path, header: list[str], rows: Iterable[Iterable[Any]], delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([header, *rows])
    return path


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def draw_plate(path: Path, text: str, size: tuple[int, int] = (80, 24)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size, "white")
    ImageDraw.Draw(picture).text((4, 6), text.encode("ascii", "replace").decode(), fill="black")
    picture.save(path)
    return path


def write_wave(path: Path, samples: np.ndarray, rate: int = 8000, width: int = 2, channels: int = 1) -> Path:
    """Samples in [-1, 1] (n,) or (n, channels) as PCM."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = np.clip(np.rint(samples * 2 ** (8 * width - 1)), -(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1)
    if width == 1:
        content = (whole + 128).astype(np.uint8).tobytes()
    elif width == 3:
        content = whole.astype("<i4").reshape(-1, 1).view(np.uint8)[:, :3].tobytes()
    else:
        content = whole.astype(f"<i{width}").tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)
    return path


@pytest.fixture
def plates(tmp_path: Path) -> Path:
    """A folder with train.csv, test.csv and images/."""
    folder = tmp_path / "plates"
    for split, texts in PLATES.items():
        names = [f"{split}_{number}.png" for number in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            draw_plate(folder / "images" / name, text)
        write_csv(folder / f"{split}.csv", ["image_path", "label"], zip(names, texts, strict=True))
    return folder


@pytest.fixture
def make() -> Callable[..., Path]:
    """``make(kind, path, ...)``: write_csv, write_jsonl, draw_plate or write_wave."""
    makers = {"csv": write_csv, "jsonl": write_jsonl, "plate": draw_plate, "wave": write_wave}

    def write(kind: str, *arguments: Any, **how: Any) -> Path:
        return makers[kind](*arguments, **how)

    return write


@pytest.fixture
def learns() -> Callable[..., float]:
    """``learns(model, batch, steps=60, lr=1e-2)``: what share of the loss on one batch is left after steps of Adam."""

    def train(model: Model, batch: dict[str, Tensor], *, steps: int = 60, lr: float = 1e-2) -> float:
        names = inspect.signature(model.forward).parameters
        taken = inspect.signature(model.compute_loss).parameters
        inputs = {name: value for name, value in batch.items() if name in names}
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        losses = []
        model.train()
        for _ in range(steps):
            known = {**batch, **model(**inputs)}
            loss = model.compute_loss(**{name: value for name, value in known.items() if name in taken})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[-1] / losses[0]

    return train

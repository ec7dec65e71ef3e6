"""Images and texts are read from the TensorBoard files of a run."""

import base64
import io
from pathlib import Path

import torch
from PIL import Image

from trainwright.events import EventStorage
from trainwright.events.writers import TensorBoardWriter
from trainwright.inspect.report.samples import read_samples


def test_the_images_and_texts_of_a_run(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "logs")
    with EventStorage() as storage:
        for iteration in range(2):
            storage.iter = iteration
            storage.put_scalar("loss", 1.0)
            storage.put_image("prediction", torch.full((3, 4, 6), 0.5 * iteration))
            storage.put_text("generated", f"text {iteration}")
            writer.write(storage)
    writer.close()
    found = read_samples(tmp_path)
    assert [(one.name, one.iteration, one.text) for one in found] == [
        ("prediction", 0, ""),
        ("prediction", 1, ""),
        ("generated", 0, "text 0"),
        ("generated", 1, "text 1"),
    ]
    kind, _, content = found[0].uri.partition(",")
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(content))).size == (6, 4)


def test_files_without_samples_or_cut_off(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1").touch()
    (tmp_path / "events.out.tfevents.2").write_bytes(b"\xff\0\0\0\0\0\0\0\0\0\0\0 \x89PNG")
    assert read_samples(tmp_path) == []

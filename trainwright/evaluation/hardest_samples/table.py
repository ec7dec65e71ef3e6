"""``hardest_samples.csv`` in the folder of a run: the hardest samples of each evaluation, and their pictures."""

import csv
import io
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trainwright.base.batch import parts
from trainwright.base.errors import ConfigError
from trainwright.base.files import atomic_write, is_left_out
from trainwright.evaluation.hardest_samples.search import HardestSamples, Row
from trainwright.events.formats import HARDEST_COLUMNS, HARDEST_NAME, read_hardest
from trainwright.events.storage import EventStorage
from trainwright.events.writers.rows import RowFile
from trainwright.parallel.mesh import current_mesh

logger = logging.getLogger("trainwright.evaluation")

_MAX_TEXT = 2000  # characters of a sample


class Folder(Protocol):
    """The folder of a run. It is not open before the first step; ``files`` are those of the run."""

    is_open: bool

    @property
    def path(self) -> Path: ...

    @property
    def files(self) -> Any: ...


def watch_hardest(
    number: int, folder: Folder, storage: Callable[[], EventStorage], *, reads_losses: bool
) -> Callable[[], AbstractContextManager[None]]:
    """What to enter around each evaluation of a training, for a table of its ``number`` hardest samples.

    ``storage`` and ``reads_losses``: as of :class:`HardestTable` and :class:`HardestSamples`.

    Raises:
        ConfigError: no process has the scores of all classes.
    """
    mesh = current_mesh()
    if mesh is not None and (mesh.layout.tensor > 1 or mesh.layout.pipeline > 1):
        raise ConfigError(
            f"hardest_samples: got {number} with tensor or pipeline parallelism, where no process has the scores of all"
            " classes; set it to None."
        )
    return HardestSamples(number, HardestTable(folder, storage).add, reads_losses=reads_losses).watching


class HardestTable:
    """The rows of all evaluations. A resumed run replaces those that were evaluated after its checkpoint."""

    def __init__(self, folder: Folder, storage: Callable[[], EventStorage]) -> None:
        """``storage``: returns the metrics of the current training."""
        self._folder, self._storage = folder, storage
        self._new: list[Row] = []  # not written: the folder is not open before the first step
        self._shown: set[tuple[str, int]] = set()
        self._written: set[tuple[int, str]] = set()  # evaluations whose rows this process has written

    def add(self, rows: list[Row], dataset: Any) -> None:
        """Write the rows of the evaluation of one data set, and show its samples."""
        at, name = self._storage().iter, rows[0]["dataset"]
        self._new += [{"iteration": at, **row} for row in rows]
        if not self._folder.is_open:
            return
        path = self._folder.path / HARDEST_NAME
        if is_left_out(path) or not self._folder.files.is_own(HARDEST_NAME):
            self._new.clear()
            return
        self._write(path, at, name)
        if dataset is not None:
            for row in rows:
                self._show(row, dataset)

    def _write(self, path: Path, at: int, name: str) -> None:
        """Add the new rows; those of evaluations that are repeated, or that a resumed run repeats, are replaced."""
        is_next = bool(self._written) and at >= max(self._written)[0] and (at, name) not in self._written
        self._written.add((at, name))
        new, self._new = self._new, []
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, HARDEST_COLUMNS)
        if is_next and path.is_file():  # rewriting it would take longer with each evaluation
            writer.writerows(new)
            with open(path, "a", encoding="utf-8", newline="") as file:
                file.write(text.getvalue())
                file.flush()
                os.fsync(file.fileno())
            return
        known = read_hardest(path)
        if not known and RowFile(path).has_content():
            moved = RowFile(path).rename_to_backup()
            logger.warning(
                "%s: its columns are not %s (edited, or saved by another program?); it is now %s, and the rows of this"
                " run begin a new file.",
                path,
                ", ".join(HARDEST_COLUMNS),
                moved.name,
            )
        places = ((int(row["iteration"]), row["dataset"], row) for row in known)
        before = [row for iteration, dataset, row in places if iteration < at or (iteration == at and dataset != name)]
        writer.writeheader()
        writer.writerows([*before, *new])
        self._folder.files.add([HARDEST_NAME])
        atomic_write(path, text.getvalue().encode())

    def _show(self, row: Row, dataset: Any) -> None:
        """Put the sample into the storage, once, if it is a picture or a text."""
        key = (row["dataset"], row["sample"])
        if key in self._shown:
            return
        self._shown.add(key)
        try:
            sample = dataset[row["sample"]]
        except Exception as error:  # the evaluation has read it: only a picture is lost
            logger.debug("Sample %s cannot be shown: %s", row["sample"], error)
            return
        tag = "/".join(part for part in ("hardest", row["dataset"], str(row["sample"])) if part)
        for value in parts(sample):
            if isinstance(value, str) and value != row["name"]:
                self._storage().put_text(tag, value[:_MAX_TEXT])
                return
            picture = as_picture(value)
            if picture is not None:
                self._storage().put_image(tag, picture)
                return


def as_picture(value: Any) -> Tensor | None:
    """A value as an image (C, H, W) or (H, W): a picture of PIL, or a tensor or array of such a shape; None: neither.

    Floats are scaled to [0, 1], unless they lie there already.
    """
    if hasattr(value, "getbands") and hasattr(value, "convert"):  # of PIL
        value = np.asarray(value.convert("RGB"))
    if isinstance(value, np.ndarray) and value.dtype.kind in "uf":
        value = torch.from_numpy(value.copy())
    if not isinstance(value, Tensor) or value.ndim not in (2, 3):
        return None
    image: Tensor = value
    if image.ndim == 3 and image.shape[0] not in (1, 3, 4):
        image = image.permute(2, 0, 1)
    is_picture = (image.ndim == 2 or image.shape[0] in (1, 3, 4)) and min(image.shape[-2:]) >= 4
    if not is_picture or image.dtype == torch.uint8:
        return image if is_picture else None
    if not image.is_floating_point():
        return None
    low, high = float(image.min()), float(image.max())
    return image if low >= 0 and high <= 1 else (image - low) / max(high - low, 1e-12)

"""Scalars, images, histograms and texts for TensorBoard, with torch's SummaryWriter."""

import importlib
import logging
import os
import uuid
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from trainwright.base.errors import ConfigError, import_optional
from trainwright.base.files import sync_folder
from trainwright.events.media import Medium
from trainwright.events.storage import EventStorage
from trainwright.events.writers.base import FileWriter
from trainwright.events.writers.rows import open_files, rows_after, sync_files
from trainwright.events.writers.trackers import flat

logger = logging.getLogger("trainwright.events")
_MAX_ENCODED = 100  # media, after which the training waits


class TensorBoardWriter(FileWriter):
    """Write new metrics as TensorBoard events. The first write creates the folder and imports tensorboard.

    Images, which take 0.1 s each, are encoded in a thread.

    A run that starts at iteration N hides the events of earlier files in the folder from step N on. A resumed run does
    not write values from before its checkpoint: they are in the files of the earlier run.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        window_size: int = 20,
        *,
        aliases: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            aliases: second names, by metric name; such a metric is written under both names.
            settings: of the run, shown as hyperparameters by TensorBoard's page HPARAMS.
        """
        self._aliases = dict(aliases or {})
        self._settings = dict(flat(settings or {}))
        self._log_dir = str(Path(log_dir).absolute())
        self._window_size = window_size
        self._last_written = -1
        self._last_media = 0
        self._storage: EventStorage | None = None
        self._writer: Any = None  # a SummaryWriter
        self._file = Path()  # the current event file
        self._encoding: deque[Future[None]] = deque()

    def __repr__(self) -> str:
        return f"TensorBoardWriter({self._log_dir!r}, window_size={self._window_size})"

    def append(self, storage: EventStorage) -> None:
        if storage is not self._storage:
            self.close()
            self._storage = storage
            self._last_written = storage.first_unwritten - 1
            self._last_media = 0
        if self._writer is not None and not self._file.exists():
            logger.warning("%s: deleted or moved during the run; another one is made.", self._file)
            self.close()
        rows = rows_after(storage, self._last_written, self._window_size)
        media = storage.media(after=self._last_media)
        if not (rows or media):
            return
        if self._writer is None:
            self._open()
        for iteration, row in rows.items():
            # One event per row: add_scalar writes one per value, at five times the cost.
            row |= {also: row[name] for name, also in self._aliases.items() if name in row}
            values = [self._summary.Value(tag=name, simple_value=number) for name, number in row.items()]
            self._writer.file_writer.add_summary(self._summary(value=values), iteration)
            self._last_written = iteration
        for item in media:
            self._encoding.append(self._encoder.submit(self._add_media, item))
            self._last_media = item.number
        self._writer.flush()
        while self._encoding and (self._encoding[0].done() or len(self._encoding) > _MAX_ENCODED):
            self._encoding.popleft().result()

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._encoder.shutdown()  # waits for it
                self._writer.close()
                sync_files()
            finally:
                open_files.pop(self._file, None)
                self._writer = None
            while self._encoding:
                self._encoding.popleft().result()

    def _open(self) -> None:
        """Open a new event file, which hides the events of earlier files from the next iteration on."""
        message = (
            "TensorBoardWriter: the package tensorboard is not installed. Install it with `pip install tensorboard`, or"
            " remove this writer from build_writers()."
        )
        make_writer = import_optional("torch.utils.tensorboard", message, ConfigError).SummaryWriter
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._encoder = ThreadPoolExecutor(1, "trainwright-encode")
        mark = f".{uuid.uuid4().hex[:8]}"  # identifies this writer's file
        self._writer = make_writer(self._log_dir, purge_step=self._last_written + 1, filename_suffix=mark)
        (self._file,) = Path(self._log_dir).glob(f"events.out.tfevents.*{mark}")
        open_files[self._file] = lambda: wait([*self._encoding])
        if self._settings:  # hyperparameters; TensorBoard finds the metrics, which are not known yet, by itself
            hparams = importlib.import_module("torch.utils.tensorboard.summary").hparams
            known = {name: value for name, value in self._settings.items() if value is not None}
            self._writer.file_writer.add_summary(hparams(known, {})[1])
        self._writer.flush()
        sync_folder(self._file.parent)

    def _add_media(self, item: Medium) -> None:
        if isinstance(item.content, str) or item.kind == "image":
            add = self._writer.add_image if item.kind == "image" else self._writer.add_text
            add(item.name, item.content, item.iteration)
        else:
            low, high, count, total, total_of_squares, *counts = item.content.tolist()
            if count:  # 0 if every value was NaN or inf
                width = (high - low) / len(counts)
                limits = [low + width * (place + 1) for place in range(len(counts))]
                values = (low, high, count, total, total_of_squares, limits, counts)
                self._writer.add_histogram_raw(item.name, *values, global_step=item.iteration)
        self._writer.flush()

"""Experiment trackers: the metrics and the settings of a run in Weights & Biases, MLflow or Trackio.

The run of the tracker and its last written iteration are recorded in ``trackers.json`` in the run folder, so that a
resumed run continues it. Iterations that a killed run has already written are repeated by the resumed run with the same
values; they are not written again. What the tracker lost is sent from ``metrics.json``.
"""

import importlib.util
import json
import logging
import os
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from trainwright.base.errors import ConfigError
from trainwright.base.files import atomic_write
from trainwright.events.formats import METRICS_NAME
from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.rows import Row, read_metric_rows, rows_after

logger = logging.getLogger("trainwright.events")

RECORD_NAME = "trackers.json"
_record_lock = threading.Lock()  # each tracker writes in its own thread
_NOT_IN_MLFLOW = re.compile(r"[^\w\-./: ]")  # characters that no name may have, such as @

_RESERVED_IN_TRACKIO = {"project", "run", "timestamp", "step", "time", "metrics"}


class Tracker(EventWriter):
    """Base of the writers of a tracking service: opens its run with the first row, and sends each iteration once.

    A subclass defines ``name``, ``begin_run``, ``send`` and ``end_run``. They are called in a thread of the writer; if
    one of them raises, a message says so, and the training continues without the tracker.

    Args:
        folder: the run folder, whose name is the default name of the tracker's run.
        settings: the settings of the run, shown by the tracker as hyperparameters: names and plain values.
        arguments: of the tracker's own function that begins a run.

    Attributes:
        folder, settings, arguments: those given; ``settings`` by their dotted names.
        run_id: of the tracker's run while it is open, else None.

    Raises:
        ConfigError: the package of the tracker is not installed.
    """

    name: ClassVar[str]  # that of the package
    may_fail = True
    after_loss = "The next resume sends them from metrics.json."  # what a message of rows that were not sent adds

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec(self.name) is None:
            raise ConfigError(
                f"trackers: {self.name!r}: its package is not installed. Install it with `pip install {self.name}`, or"
                " remove it from trackers."
            )
        self.folder = Path(folder).absolute()
        self.settings = dict(flat(settings or {}))
        self.arguments = dict(arguments or {})
        self._storage: EventStorage | None = None
        self._last_written = -1
        self.run_id: str | None = None
        self._names: dict[str, str] = {}  # of the tracker, by ours

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"

    def write(self, storage: EventStorage | None = None) -> None:
        storage = get_event_storage() if storage is None else storage
        if storage is not self._storage:
            self.close()
            self._storage = storage
            self._last_written = storage.first_unwritten - 1
        rows = rows_after(storage, self._last_written)
        if not rows:
            return
        if self.run_id is None:
            rows = self._rows_to_begin_with(storage) | rows
        new = {iteration: row for iteration, row in rows.items() if iteration > self._last_written}
        if new:
            self.send({iteration: self._renamed(row) for iteration, row in new.items()})
            self._last_written = max(new)
            renamed = {name: other for name, other in self._names.items() if name != other}
            record: dict[str, Any] = {"id": self.run_id, "last_iteration": self._last_written}
            record |= {"names": renamed} if renamed else {}
            with _record_lock:
                content = json.dumps({**self._records(), self.name: record})
                atomic_write(self.folder / RECORD_NAME, content.encode())

    def _rows_to_begin_with(self, storage: EventStorage) -> dict[int, Row]:
        """Begin the run, or continue it; the rows of ``metrics.json`` that it does not have."""
        record = self._records().get(self.name) if storage.start_iter else None
        record = record if isinstance(record, dict) else {}
        self._names = dict(record.get("names") or {})
        self.run_id = self.begin_run(record.get("id"))
        there = self._last_written = self.last_iteration(self.run_id, record) if record else -1
        if there >= storage.first_unwritten:
            logger.info(
                "%s has the metrics up to iteration %d already, from before this resume: they are kept.",
                self.name, there + 1,
            )  # fmt: skip
        if not storage.start_iter:
            return {}
        known = read_metric_rows(self.folder / METRICS_NAME).items()
        return {iteration: row for iteration, row in known if there < iteration < storage.first_unwritten}

    def close(self) -> None:
        run_id, self.run_id = self.run_id, None
        if run_id is not None:
            self.end_run(run_id)

    def _renamed(self, row: Row) -> Row:
        new = [name for name in row if name not in self._names]
        if new:
            self._names |= unique_names(new, self.allowed_name, self._names.values())
        return {self._names[name]: value for name, value in row.items()}

    @staticmethod
    def allowed_name(name: str) -> str:
        """A name for a metric that the tracker takes: ``name``, if it does."""
        return name

    @abstractmethod
    def begin_run(self, run_id: str | None) -> str:
        """Begin a run of the tracker, or continue ``run_id``; returns the id."""

    @abstractmethod
    def send(self, rows: Mapping[int, Row]) -> None:
        """Send the metrics of some iterations, in order."""

    @abstractmethod
    def end_run(self, run_id: str) -> None:
        """Send what is left, and close the run."""

    def last_iteration(self, run_id: str, record: Mapping[str, Any]) -> int:
        """The last iteration that the run of the tracker has; -1: none."""
        return int(record.get("last_iteration", -1))

    def _records(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / RECORD_NAME).read_bytes())
        except (OSError, ValueError):  # none yet, or not ours
            return {}
        return found if isinstance(found, dict) else {}


class WandbTracker(Tracker):
    """Weights & Biases. ``arguments``: of ``wandb.init``, such as ``project``, ``name``, ``mode="offline"``."""

    name = "wandb"
    _id = "id"  # argument of ``init`` and attribute of its run

    def begin_run(self, run_id: str | None) -> str:
        arguments = {**self._defaults(), **self.arguments}
        if run_id is not None:
            arguments |= {self._id: run_id, "resume": "allow"}
        self._run: Any = importlib.import_module(self.name).init(**arguments)
        return str(getattr(self._run, self._id))

    def _defaults(self) -> dict[str, Any]:
        return {"dir": str(self.folder), "name": self.folder.name, "config": self.settings}

    @staticmethod
    def allowed_name(name: str) -> str:
        """Without underscores before it: those are names of W&B, such as ``_step``."""
        return name.lstrip("_") or "metric"

    def last_iteration(self, run_id: str, record: Mapping[str, Any]) -> int:
        """Offline, each session has a file of its own: the newest one is complete."""
        return -1 if self._run.offline else self._run.step - 1

    def send(self, rows: Mapping[int, Row]) -> None:
        for iteration, row in rows.items():
            self._run.log(dict(row), step=iteration)

    def end_run(self, run_id: str) -> None:
        self._run.finish()


class MLflowTracker(Tracker):
    """MLflow. ``arguments``: ``tracking_uri`` (default: of MLflow), ``experiment`` and ``run_name``."""

    name = "mlflow"

    def begin_run(self, run_id: str | None) -> str:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self.arguments.get("tracking_uri"))
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        name = self.arguments.get("experiment", "Default")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        run = self._client.create_run(experiment, run_name=self.arguments.get("run_name", self.folder.name))
        names = unique_names(self.settings, self.allowed_name)
        params = [Param(names[key], str(value)[:500]) for key, value in self.settings.items()]
        for first in range(0, len(params), 100):  # the most that a request may hold
            self._client.log_batch(run.info.run_id, params=params[first : first + 100])
        return str(run.info.run_id)

    @staticmethod
    def allowed_name(name: str) -> str:
        """Letters, digits and ``_-./: `` only; the parts of a path, such as ``val/loss``, at most 240 characters."""
        parts = PurePosixPath(_NOT_IN_MLFLOW.sub("_", name)).parts
        return (
            "/".join("_" if part == ".." else part for part in parts if part.strip("/"))[:240].rstrip("/") or "metric"
        )

    def last_iteration(self, run_id: str, record: Mapping[str, Any]) -> int:
        """Asked of the server: a process may be killed between a request and its record."""
        names = self._client.get_run(run_id).data.metrics
        steps = [metric.step for name in names for metric in self._client.get_metric_history(run_id, name)]
        return max(steps, default=-1)

    def send(self, rows: Mapping[int, Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, iteration) for iteration, row in rows.items() for name, value in row.items()
        ]
        for first in range(0, len(metrics), 1000):  # as above
            self._client.log_batch(str(self.run_id), metrics=metrics[first : first + 1000])

    def end_run(self, run_id: str) -> None:
        self._client.set_terminated(run_id)


class TrackioTracker(WandbTracker):
    """Trackio, which has the functions of W&B: local, or in a Space.

    ``arguments``: of ``trackio.init``, such as ``project`` and ``space_id``.
    """

    name = "trackio"
    _id = "name"
    last_iteration = Tracker.last_iteration

    def _defaults(self) -> dict[str, Any]:
        return {"project": "trainwright", "name": self.folder.name, "config": self.settings, "embed": False}

    @staticmethod
    def allowed_name(name: str) -> str:
        """``time`` is ``iter_time``; other names of Trackio's own are ``metric_step``, ``metric_run``, …"""
        other = "iter_time" if name == "time" else f"metric_{name}"
        return other if name.lower() in _RESERVED_IN_TRACKIO or name.startswith("__") else name


TRACKERS: dict[str, type[Tracker]] = {kind.name: kind for kind in (WandbTracker, MLflowTracker, TrackioTracker)}


def unique_names(names: Iterable[str], allowed: Callable[[str], str], taken: Iterable[str] = ()) -> dict[str, str]:
    """An allowed name for each of ``names``; where two would get the same one, the second ends with ``_2``."""
    found, used = {}, set(taken)
    for name in sorted(names, key=lambda name: allowed(name) != name):  # names that are allowed keep theirs
        other, number = allowed(name), 1
        while other in used:
            number += 1
            other = f"{allowed(name)}_{number}"
        found[name] = other
        used.add(other)
    return found


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings in nested dicts by their dotted names; lists as text."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, (bool, int, float, str)):
            yield f"{prefix}{name}", value
        else:
            yield f"{prefix}{name}", str(value)

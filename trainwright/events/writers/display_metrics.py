"""The metrics that log lines and the progress bar show, read from the storage once per update."""

import re
from dataclasses import dataclass

from trainwright.events.storage import EventStorage

_TIMES = ("time", "data_time", "eta_seconds")


@dataclass(frozen=True, slots=True)
class ShownMetrics:
    """The new metrics; an empty dict or None where there is no new value."""

    losses: dict[str, float]
    others: dict[str, float]
    time_s: float | None  # per iteration, mean over the window
    data_time_s: float | None
    lr: float | None
    last_iteration: int

    @property
    def main_loss(self) -> float | None:
        """The total loss, or the first loss if there is no total."""
        return self.losses.get("total_loss", next(iter(self.losses.values()), None))


def unit_of(name: str) -> str:
    """The unit shown after a value: top-k accuracies, ``Acc@k``, are in percent, as in LiBai."""
    return " %" if re.fullmatch(r"Acc@\d+", name.rpartition("/")[2]) else ""


def new_metrics(storage: EventStorage, after: int, window_size: int) -> ShownMetrics | None:
    """Metrics of iterations later than ``after``, or None if there are none."""
    new = {
        name: value
        for name, (value, iteration) in storage.latest_with_smoothing_hint(window_size).items()
        if iteration > after
    }
    if not new:
        return None

    def mean(name: str) -> float | None:
        return storage.history(name).avg(window_size) if name in new else None

    losses = {name: value for name, value in new.items() if "loss" in name}
    others = {name: value for name, value in new.items() if name not in (*losses, *_TIMES, "lr")}
    last_iteration = max(storage.history(name).latest_iteration() for name in new)
    return ShownMetrics(losses, others, mean("time"), mean("data_time"), new.get("lr"), last_iteration)

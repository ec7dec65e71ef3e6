"""A run's metrics as they were at one moment, for those who read them while the run goes on."""

from dataclasses import dataclass
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.events.media import FiguresUntil, Histogram, Image
from trainwright.events.smoothing import HistoryBuffer
from trainwright.events.storage import EventStorage, Scalar


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a storage would have told at one moment. Holds no copy of what was put, so it is taken in microseconds."""

    iter: int
    samples: int
    written: int | None
    histories: dict[str, HistoryBuffer]
    hints: dict[str, bool]
    figures: FiguresUntil
    shown: dict[int, dict[str, tuple[float, int]]]  # by window: worked out once, whoever asks first


def take_snapshot(storage: EventStorage) -> Snapshot:
    """What ``storage`` tells now. What is pending is read, and pictures come to the host: that waits for the device."""
    histories = {name: history.frozen() for name, history in storage.histories().items()}
    return Snapshot(
        storage.iter,
        storage.samples,
        storage.written,
        histories,
        storage.smoothing_hints(),
        storage._figures.until_now(),
        storage._shown,
    )


class StorageView(EventStorage):
    """A storage to read, which shows what one of a run told at the moments that it is given one after the other."""

    def __init__(self, storage: EventStorage) -> None:
        super().__init__(storage.start_iter)
        self.first_unwritten = storage.first_unwritten

    def __repr__(self) -> str:
        return f"StorageView({self.iter})"

    def show(self, snapshot: Snapshot) -> None:
        """Tell from now on what was at that moment."""
        self.iter, self.samples, self.written = snapshot.iter, snapshot.samples, snapshot.written
        self._histories, self._hints, self._shown = snapshot.histories, snapshot.hints, snapshot.shown
        self._figures_then = snapshot.figures

    def figures(self, after: int = 0) -> list[Image | Histogram]:
        return self._figures_then.after(after)

    def put_scalar(self, name: str, value: Scalar, smoothing_hint: bool = True) -> None:
        raise self._refusal(f"put_scalar({name!r})")

    def put_image(self, name: str, image: Any) -> None:
        raise self._refusal(f"put_image({name!r})")

    def put_histogram(self, name: str, values: Any, bins: int = 1000) -> None:
        raise self._refusal(f"put_histogram({name!r})")

    @staticmethod
    def _refusal(call: str) -> ConfigError:
        return ConfigError(
            f"{call}: a writer reads the metrics beside the training, which has gone on. Put them in a"
            " hook, or set in_background = False in the writer's class: the training then waits for it."
        )

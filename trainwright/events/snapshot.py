"""What writer threads read: the contents of a storage at one moment, while the training puts further values."""

from dataclasses import dataclass
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.events.media import MediaView, Medium
from trainwright.events.smoothing import HistoryBuffer
from trainwright.events.storage import EventStorage, Scalar


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of a storage at one moment. It copies no values, so taking one costs microseconds."""

    iter: int
    samples: int
    written: int | None
    histories: dict[str, HistoryBuffer]
    hints: dict[str, bool]
    media: MediaView
    shown: dict[int, dict[str, tuple[float, int]]]  # by window size; computed by the first reader


def take_snapshot(storage: EventStorage) -> Snapshot:
    """The current contents of ``storage``. Reads pending values and images to the host: this waits for the device."""
    histories = {name: history.frozen() for name, history in storage.histories().items()}
    return Snapshot(
        storage.iter,
        storage.samples,
        storage.written,
        histories,
        storage.smoothing_hints(),
        storage._media.until_now(),
        storage._shown,
    )


class StorageView(EventStorage):
    """A read-only storage that shows one snapshot of a run's storage after the other."""

    def __init__(self, storage: EventStorage) -> None:
        super().__init__(storage.start_iter)
        self.first_unwritten = storage.first_unwritten

    def __repr__(self) -> str:
        return f"StorageView({self.iter})"

    def show(self, snapshot: Snapshot) -> None:
        """Return the values of ``snapshot`` from now on."""
        self.iter, self.samples, self.written = snapshot.iter, snapshot.samples, snapshot.written
        self._histories, self._hints, self._shown = snapshot.histories, snapshot.hints, snapshot.shown
        self._media_view = snapshot.media

    def media(self, after: int = 0) -> list[Medium]:
        return self._media_view.after(after)

    def put_scalar(self, name: str, value: Scalar, smoothing_hint: bool = True) -> None:
        raise self._refusal(f"put_scalar({name!r})")

    def put_image(self, name: str, image: Any) -> None:
        raise self._refusal(f"put_image({name!r})")

    def put_histogram(self, name: str, values: Any, bins: int = 1000) -> None:
        raise self._refusal(f"put_histogram({name!r})")

    def put_text(self, name: str, text: str) -> None:
        raise self._refusal(f"put_text({name!r})")

    @staticmethod
    def _refusal(call: str) -> ConfigError:
        return ConfigError(
            f"{call}: a writer runs in a background thread and reads a snapshot, which cannot be changed. Put metrics"
            " in a hook, or set in_background = False in the writer's class: training then waits for this writer."
        )

"""What writer threads read: the contents of a storage at one moment, while the training puts further values."""

from dataclasses import dataclass
from typing import Any, NoReturn

from trainwright.config.errors import ConfigError
from trainwright.events.media import MediaView, Medium
from trainwright.events.smoothing import HistoryBuffer
from trainwright.events.storage import EventStorage


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of a storage at one moment. It copies no values, so taking one costs microseconds."""

    iter: int
    samples: int
    written: int | None
    histories: dict[str, HistoryBuffer]
    hints: dict[str, bool]
    media: MediaView


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
        self._histories, self._hints = snapshot.histories, snapshot.hints
        self._media_view = snapshot.media

    def media(self, after: int = 0) -> list[Medium]:
        return self._media_view.after(after)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            "A writer runs in a background thread and reads a snapshot, which cannot be changed. Put metrics in a hook,"
            " or set in_background = False in the writer's class: training then waits for this writer."
        )

    put_scalar = put_image = put_histogram = put_text = _refuse

"""A writer's failure need not end a run."""

import logging

from trainwright.events.storage import EventStorage
from trainwright.events.writers.base import EventWriter

logger = logging.getLogger("trainwright.events")


class SafeWriter(EventWriter):
    """Around another writer: when that one raises, say so once and switch it off; the run goes on."""

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self._is_on = True

    def __repr__(self) -> str:
        return f"SafeWriter({self._writer!r})"

    def write(self, storage: EventStorage | None = None) -> None:
        if not self._is_on:
            return
        try:
            self._writer.write() if storage is None else self._writer.write(storage)
        except Exception:  # whatever a tracker or a disk may do: the log has it, the run does not need it
            self._switch_off()

    def close(self) -> None:
        try:
            self._writer.close()
        except Exception:
            if self._is_on:
                self._switch_off()

    def _switch_off(self) -> None:
        self._is_on = False
        logger.exception("%r failed and is switched off for the rest of the run; training goes on.", self._writer)

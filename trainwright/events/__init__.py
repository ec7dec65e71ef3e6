"""Metrics of a run: recorded without waiting for the device, read as floats, passed to the writers."""

from trainwright.events.phases import PhaseTimes
from trainwright.events.smoothing import HistoryBuffer
from trainwright.events.storage import EventStorage, get_event_storage, has_event_storage
from trainwright.events.writers import (
    ConsoleWriter,
    CSVWriter,
    EventWriter,
    JSONWriter,
    ProgressAwareHandler,
    ProgressWriter,
    SafeWriter,
    TensorBoardWriter,
)

__all__ = [
    "EventStorage",
    "get_event_storage",
    "has_event_storage",
    "HistoryBuffer",
    "PhaseTimes",
    "EventWriter",
    "JSONWriter",
    "CSVWriter",
    "TensorBoardWriter",
    "ConsoleWriter",
    "ProgressWriter",
    "ProgressAwareHandler",
    "SafeWriter",
]

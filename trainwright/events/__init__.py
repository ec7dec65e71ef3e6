"""Metrics of a run: recorded without waiting for the device, read as floats, passed to the writers."""

from typing import TYPE_CHECKING

from trainwright.base.lazy_names import declared_names

if TYPE_CHECKING:
    from trainwright.events.phases import PhaseTimes as PhaseTimes
    from trainwright.events.smoothing import HistoryBuffer as HistoryBuffer
    from trainwright.events.storage import EventStorage as EventStorage
    from trainwright.events.storage import get_event_storage as get_event_storage
    from trainwright.events.storage import has_event_storage as has_event_storage
    from trainwright.events.writers.base import EventWriter as EventWriter
    from trainwright.events.writers.base import SafeWriter as SafeWriter
    from trainwright.events.writers.console import ConsoleWriter as ConsoleWriter
    from trainwright.events.writers.console import ProgressAwareHandler as ProgressAwareHandler
    from trainwright.events.writers.progress import ProgressWriter as ProgressWriter
    from trainwright.events.writers.rows import CSVWriter as CSVWriter
    from trainwright.events.writers.rows import JSONWriter as JSONWriter
    from trainwright.events.writers.tensorboard import TensorBoardWriter as TensorBoardWriter
    from trainwright.events.writers.trackers import Tracker as Tracker

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __all__, __getattr__ = declared_names(__name__)

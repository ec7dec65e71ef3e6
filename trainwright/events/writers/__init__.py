"""Where metrics go: files, TensorBoard, the log, the terminal."""

from trainwright.events.writers.base import EventWriter
from trainwright.events.writers.console import ConsoleWriter
from trainwright.events.writers.csv_table import CSVWriter
from trainwright.events.writers.defaults import default_writers
from trainwright.events.writers.fault_tolerant import SafeWriter
from trainwright.events.writers.json_lines import JSONWriter
from trainwright.events.writers.progress import ProgressAwareHandler, ProgressWriter
from trainwright.events.writers.tensorboard import TensorBoardWriter

__all__ = [
    "default_writers",
    "EventWriter",
    "JSONWriter",
    "CSVWriter",
    "TensorBoardWriter",
    "ConsoleWriter",
    "ProgressWriter",
    "ProgressAwareHandler",
    "SafeWriter",
]

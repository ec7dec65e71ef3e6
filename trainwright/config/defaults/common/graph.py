"""Whether each update is one compiled program. Read by get_config("common/graph.py").graph."""

from trainwright.config import LazyCall
from trainwright.config.settings import SECTIONS

graph = SECTIONS["graph"].value(LazyCall)

"""Whether each update is one compiled program. Read by get_config("common/graph.py").graph."""

from trainwright.config import LazyCall, settings

graph = settings.SECTIONS["graph"].value(LazyCall)

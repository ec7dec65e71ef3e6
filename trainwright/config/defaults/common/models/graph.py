"""common/graph.py, with settings of another backend, which have no effect."""

from ..graph import graph  # noqa: TID252 - a config file, not a module

graph.update(debug=-1, auto_parallel={"enabled": False}, global_mode={"enabled": False})
